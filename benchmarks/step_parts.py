"""Parts of a training step computed in several ways, each measured alone: forward and backward
pass, in turns.

    python benchmarks/step_parts.py [--rounds 7] [--threads 1] [--dtype float32]

The shapes belong to a Llama with dim 512, 8 heads, 4 key/value heads and ffn 1,536 on 2,048 tokens.
Time is the median processor time of all threads, so that other programs on the machine matter less;
ratios compare calls of one round.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.models.common.block_attention import Flash, attend_in_blocks
from torchtitan.models.common.rope import apply_rope
from torchtitan.tools.torch_private import onednn_linear

TOKENS, DIM, HEAD_DIM, HEADS, KV_HEADS, FFN = 2048, 512, 64, 8, 4, 1536

Part = Callable[[], Tensor]


class AutogradLoss(CrossEntropyLoss):
    """The same loss, differentiated by autograd."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return super().from_logits(logits_NV, labels_N)


def parameter(*shape: int) -> Tensor:
    return (
        (torch.randn(shape, device="cpu") / shape[-1] ** 0.5)
        .to(torch.get_default_dtype())
        .requires_grad_()
    )


def loss_parts(vocabulary: int, tokens: int) -> dict[str, Part]:
    hidden, weight = parameter(1, tokens, DIM), parameter(vocabulary, DIM)
    labels = torch.randint(vocabulary, (1, tokens))

    def part(kind: type[CrossEntropyLoss], chunk_tokens: int | None) -> Part:
        loss = kind.Config(chunk_tokens=chunk_tokens).build()
        return lambda: loss(hidden, weight, labels)

    return {
        "autograd, all logits at once": part(AutogradLoss, 0),
        "autograd, chunks of 512 tokens": part(AutogradLoss, 512),
        "closed form, chunks of 512 tokens": part(CrossEntropyLoss, 512),
        "closed form, chunks of 1,024 tokens (default)": part(CrossEntropyLoss, None),
    }


def attention_in_bfloat16() -> dict[str, Part]:
    length = TOKENS // 4
    shapes = [(4, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    weight = torch.randn_like(inputs[0])

    def library() -> Tensor:
        heads_first = [x.transpose(1, 2) for x in inputs]
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return (out.transpose(1, 2) * weight).sum()

    def own() -> Tensor:
        return (attend_in_blocks(Flash(HEAD_DIM**-0.5), *inputs, [length], None) * weight).sum()

    return {"PyTorch's kernel": library, "batched products (used)": own}


def attention_inputs() -> dict[str, Part]:
    x, widths = parameter(TOKENS, DIM), [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    separate, fused = [parameter(width, DIM) for width in widths], parameter(sum(widths), DIM)
    ones = [torch.ones(TOKENS, width) for width in widths]

    def total(parts: list[Tensor]) -> Tensor:
        return sum(
            ((one * part).sum() for one, part in zip(ones, parts, strict=True)), torch.zeros(())
        )

    return {
        "three products (used)": lambda: total([F.linear(x, weight) for weight in separate]),
        "one product": lambda: total(list(F.linear(x, fused).split(widths, dim=-1))),
    }


def gated_feed_forward() -> dict[str, Part]:
    x, w1, w3, both, w2 = (
        parameter(*shape)
        for shape in ((TOKENS, DIM), (FFN, DIM), (FFN, DIM), (2 * FFN, DIM), (DIM, FFN))
    )

    def one_product() -> Tensor:
        gate, up = F.linear(x, both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w2).sum()

    return {
        "two products (used)": lambda: F.linear(
            F.silu(F.linear(x, w1)) * F.linear(x, w3), w2
        ).sum(),
        "one product": one_product,
    }


def rotary_embedding() -> dict[str, Part]:
    x = parameter(4, TOKENS // 4, HEADS, HEAD_DIM)
    angles = torch.randn(4, TOKENS // 4, 1, HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return {
        "products of halves (used)": lambda: apply_rope(x, (cos, sin)).sum(),
        "rolled heads": lambda: (x * wide_cos + x.roll(HEAD_DIM // 2, -1) * wide_sin).sum(),
    }


def linear_layers_without_gradients(rows: int) -> dict[str, Part]:
    """Weights of 24 layers are larger than the processor's cache, as in generation. The result is
    for `compare`."""
    weights, x = [torch.randn(FFN, DIM) for _ in range(24)], torch.randn(rows, DIM)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    linear, rest = onednn_linear(), (None, "none", [], "")

    def part(multiply: Callable[[Tensor, Tensor], Tensor], matrices: list[Tensor]) -> Part:
        def multiply_all() -> Tensor:
            with torch.no_grad():
                for matrix in matrices:
                    multiply(x, matrix)
            return torch.zeros((), requires_grad=True)

        return multiply_all

    return {
        "MKL": part(F.linear, weights),
        "oneDNN (used on AMD with AVX-512)": part(
            lambda x, weight: linear(x, weight, *rest), weights
        ),
        "oneDNN, copies of the weights in its own order": part(
            lambda x, weight: linear(x, weight, *rest), packed
        ),
    }


def compare(title: str, parts: dict[str, Part], rounds: int) -> None:
    """Print the time of each way, and its ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds + 1):  # the first warms up
        for name, part in parts.items():
            start = time.process_time()
            part().backward()
            times[name].append(time.process_time() - start)
    first = next(iter(times.values()))[1:]
    print(f"| {title} | ms | speed relative to the first |\n|---|---:|---:|")
    for name, (_, *seconds) in times.items():
        ratios = [reference / own for reference, own in zip(first, seconds, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {1000 * statistics.median(seconds):,.1f} | {spread} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.manual_seed(0)
    compare("loss, vocabulary 8,192, 2,048 tokens", loss_parts(8192, TOKENS), options.rounds)
    compare(
        "loss, vocabulary 128,256, 1,024 tokens", loss_parts(128_256, TOKENS // 2), options.rounds
    )
    compare(
        "causal attention in bfloat16, windows of 512 tokens",
        attention_in_bfloat16(),
        options.rounds,
    )
    compare("queries, keys and values", attention_inputs(), options.rounds)
    compare("gated feed-forward network", gated_feed_forward(), options.rounds)
    compare("rotary position embedding", rotary_embedding(), options.rounds)
    if options.dtype == "float32":
        for rows in (1, 8, 128, TOKENS):
            title = f"24 linear layers without gradients, {rows:,} rows"
            compare(title, linear_layers_without_gradients(rows), options.rounds)


if __name__ == "__main__":
    main()
