"""Routed experts compared with transformers' implementations, for Qwen3's shape scaled down: 128 experts, 8 per token.

    python benchmarks/experts.py [--rounds 5] [--threads 1] [--dtype float32] [--eager]

Both compute the same block of a Qwen3-MoE layer (router, experts, weighted sum) with the same weights, forward and
backward, in turns. Time is the median processor time of all threads, so that other programs on the machine matter less;
ratios compare calls of one round. `--eager` also measures transformers' eager implementation, about 20 times slower;
its batched one copies the weights of each pair, 20 GB here.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.layer import MixtureOfExperts
from torchtitan.models.common.moe.router import Router, TopK

TOKENS, DIM, HIDDEN, EXPERTS, K = 2048, 512, 192, 128, 8


Block = Callable[[Tensor], Tensor]


def make_blocks(dtype: torch.dtype, with_eager: bool) -> tuple[dict[str, Block], list[nn.Parameter]]:
    """Return the blocks to compare, ours first, with the same weights, and all weights."""
    config = Qwen3MoeConfig(
        hidden_size=DIM,
        moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        norm_topk_prob=True,
    )
    theirs = Qwen3MoeSparseMoeBlock(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    router = Router(dim=DIM, n_experts=EXPERTS, choose=TopK(K), init_std=0.02)
    stds = {"init_std": 0.02, "out_init_std": 0.02}
    ours = MixtureOfExperts(router, RoutedExperts(n_experts=EXPERTS, top_k=K, dim=DIM, hidden_dim=HIDDEN, **stds))
    with torch.no_grad():
        router.weight.copy_(theirs.gate.weight)
        ours.experts.w13.copy_(theirs.experts.gate_up_proj.view_as(ours.experts.w13))
        ours.experts.w2.copy_(theirs.experts.down_proj)
    ours, theirs = ours.to(dtype), theirs.to(dtype)

    def implementation(name: str) -> Block:
        def compute(x_BLD: Tensor) -> Tensor:
            config._experts_implementation = name
            out_BLD: Tensor = theirs(x_BLD)
            return out_BLD

        return compute

    names = ("grouped_mm", "eager") if with_eager else ("grouped_mm",)
    blocks = {"torchtitan": ours, **{f"transformers, {name}": implementation(name) for name in names}}
    return blocks, [*ours.parameters(), *theirs.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    blocks, parameters = make_blocks(dtype, options.eager)
    x_BLD = torch.randn(1, TOKENS, DIM).to(dtype).requires_grad_()
    upstream = torch.randn(1, TOKENS, DIM).to(dtype)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
    for _ in range(options.rounds + 1):  # the first warms up
        for name, block in blocks.items():
            x_BLD.grad = None
            for parameter in parameters:
                parameter.grad = None  # as at the first micro-batch of a step
            start = time.process_time()
            out_BLD = block(x_BLD)
            middle = time.process_time()
            out_BLD.backward(upstream)
            times[name].append((middle - start, time.process_time() - start))
    print(
        f"| {options.dtype}, {options.threads} thread(s) | forward ms | forward + backward ms | speed of torchtitan |"
    )
    print("|---|---:|---:|---:|")
    ours = [total for _, total in times["torchtitan"][1:]]
    for name, (_, *measured) in times.items():
        forward, total = (statistics.median(column) for column in zip(*measured, strict=True))
        ratios = [theirs / own for (_, theirs), own in zip(measured, ours, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {1000 * forward:,.0f} | {1000 * total:,.0f} | {spread} |")


if __name__ == "__main__":
    main()
