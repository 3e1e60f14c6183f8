"""Trained tokens per second of packed windows against padded ones, in one run on one machine.

    python benchmarks/packing.py [--rounds 2] [--windows 8]

The samples have the lengths of GSM8K's (question and answer, GPT-2's tokens; from
sft/gsm8k_train.jsonl of the test assets, or a similar log-normal distribution without them) and
random ids. A small Llama (dim 256, 2 layers, 8 heads, 4 key/value heads, ffn 768, vocabulary 2,048)
computes loss and gradients in float32 over windows of 1,024:

- none: one sample per window, padded; also padded only to the longest of 8 samples, which is common
  in trainers,
- ffd and multipack: packed windows, attention per document,
- ffd, full square: the same windows with a mask over the whole square of the window.

One layer's attention is timed alone too, over the packed windows: per document, over the full
square by a mask, and as if each window were one document. All take turns, so that a change in the
machine's load hits all; the fastest round counts.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from torchtitan.components.data.base import Batch, to_batch
from torchtitan.components.data.finetuning.encoded import EncodedSample
from torchtitan.components.data.finetuning.samples import pack_samples
from torchtitan.components.data.plan import Planner, ShuffleSampler
from torchtitan.components.data.plan.packing import PACKINGS, Packing
from torchtitan.components.data.plan.sampler import Array
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.distributed import initialize_weights
from torchtitan.models.common.attention import Attention, with_kernel
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata

SEQ_LEN, VOCABULARY = 1024, 2048
ASSETS = Path(
    os.environ.get("TORCHTITAN_TEST_ASSETS", Path(__file__).parents[2] / "shared" / "assets")
)


def lengths_of_samples() -> tuple[Array, Array]:
    """Return the tokens of each sample, and the number of trained tokens at its end."""
    file = ASSETS / "sft" / "gsm8k_train.jsonl"
    if not file.is_file():
        trained = (
            np.exp(np.random.default_rng(0).normal(4.7, 0.45, 7473)).astype(np.int64).clip(20, 600)
        )
        return 2 * trained, trained
    tokenizer = PretrainedTokenizer.Config().build(path=ASSETS / "gpt2-tokenizer")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    questions, answers = (
        np.array([len(ids) for ids in tokenizer.encode_batch([row[column] for row in rows])])
        for column in ("question", "answer")
    )
    return questions + answers, answers


def make_windows(
    lengths: Array, trained: Array, packing: Packing, n: int, seed: int = 0
) -> list[dict[str, Array]]:
    """Return the first windows of an epoch, with random ids."""
    rng = np.random.default_rng(seed)
    sampler = ShuffleSampler.Config().build(n_samples=len(lengths), seed=seed)
    planner = Planner([lengths - 1], SEQ_LEN, [sampler], packing=packing)

    def sample(number: int) -> EncodedSample:
        mask = np.arange(lengths[number]) >= lengths[number] - trained[number]
        return EncodedSample(rng.integers(0, VOCABULARY, lengths[number]), mask)

    return [pack_samples([sample(i) for i in next(planner).samples], SEQ_LEN) for _ in range(n)]


def batches_of(
    windows: Sequence[dict[str, Array]], batch_size: int, *, to_longest: bool = False
) -> list[Batch]:
    """Return windows as batches; `to_longest` removes the padding that all windows of a batch
    share."""
    batches = []
    for start in range(0, len(windows), batch_size):
        part = windows[start : start + batch_size]
        # The padding of a window with one sample is its second document.
        ends = (
            [int(np.flatnonzero(window["positions"] == 0)[1]) for window in part]
            if to_longest
            else [SEQ_LEN]
        )
        batches.append(to_batch([_first(window, max(ends)) for window in part]))
    return batches


def _first(window: dict[str, Array], n_tokens: int) -> dict[str, Array]:
    """Return a window with its first tokens only; it also has numbers, of its whole."""
    return {name: value[:n_tokens] if value.ndim else value for name, value in window.items()}


def seconds_of(model: Llama3Model, batches: Sequence[Batch], *, masked: bool) -> float:
    """Return the seconds for loss and gradients of all batches."""
    model.is_compiled = masked  # compiled blocks need a mask of constant shape
    started = time.perf_counter()
    for batch in batches:
        logits = model(batch["input"], batch["attention"])
        F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX
        ).backward()
        model.zero_grad()
    return time.perf_counter() - started


def compare_speeds(lengths: Array, trained: Array, rounds: int, n_windows: int) -> None:
    """Print trained tokens per second of each variant, and their ratio to the padded windows."""
    model = Llama3Model.Config(
        vocab_size=VOCABULARY,
        dim=256,
        n_layers=2,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=768,
        rope=RoPEConfig(theta=10_000.0),
    ).build()
    initialize_weights(model, seed=0)
    padded = make_windows(lengths, trained, "none", n_windows)
    packed = {
        packing: make_windows(lengths, trained, packing, n_windows)
        for packing in ("ffd", "multipack")
    }
    variants = {
        "none": (batches_of(padded, 2), False),
        "none, to the longest of 8": (batches_of(padded, 8, to_longest=True), False),
        "ffd": (batches_of(packed["ffd"], 2), False),
        "multipack": (batches_of(packed["multipack"], 2), False),
        "ffd, full square": (batches_of(packed["ffd"], 2), True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (batches, masked) in variants.items():
            seconds[name].append(seconds_of(model, batches, masked=masked))
    speeds = {
        name: sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
        / min(seconds[name])
        for name, (batches, _) in variants.items()
    }
    print(f"\n{'packing':26} {'trained tokens/s':>16} {'ratio':>6}")
    for name, speed in speeds.items():
        print(f"{name:26} {speed:16,.0f} {speed / speeds['none']:6.2f}")


def compare_attention(windows: Sequence[dict[str, Array]], rounds: int) -> None:
    """Print the milliseconds of forward and backward of one layer's attention, 8 heads of 64, per
    window."""
    batches = batches_of(windows, 1)
    attend, rows = Attention(), AttentionMetadata.of_rows(1, SEQ_LEN)
    q, k, v = (torch.randn(1, SEQ_LEN, 8, 64, requires_grad=True) for _ in range(3))
    milliseconds: dict[str, list[float]] = {
        "per document": [],
        "full square": [],
        "one document": [],
    }
    for _ in range(rounds):
        for name, of_round in milliseconds.items():
            prepare = partial(
                with_kernel,
                device=q.device,
                dtype=q.dtype,
                head_dim=64,
                static=name == "full square",
            )
            started = time.perf_counter()
            for batch in batches:
                attention = rows if name == "one document" else batch["attention"]
                attend(q, k, v, prepare(attention)).sum().backward()
            of_round.append(1000 * (time.perf_counter() - started) / len(batches))
    print(f"\n{'attention (ffd)':26} {'ms per window':>16} {'ratio':>6}")
    for name, of_name in milliseconds.items():
        print(
            f"{name:26} {min(of_name):16.1f} {min(of_name) / min(milliseconds['full square']):6.2f}"
        )


def compare_plans(lengths: Array) -> None:
    """Print how full the windows of each packing are, in chunks as the loader packs them."""
    print(f"{'packing':26} {'windows':>16} {'filled':>6}")
    for packing in PACKINGS:
        sampler = ShuffleSampler.Config().build(n_samples=len(lengths), seed=0)
        planner = Planner([lengths - 1], SEQ_LEN, [sampler], packing=packing, epochs=1)
        n_windows = sum(1 for _ in planner)
        print(f"{packing:26} {n_windows:16,} {(lengths - 1).sum() / (n_windows * SEQ_LEN):6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="measurements of each variant, taking turns"
    )
    parser.add_argument(
        "--windows", type=int, default=8, help="windows of 1,024 per measurement; a multiple of 8"
    )
    options = parser.parse_args()
    lengths, trained = lengths_of_samples()
    fits = lengths - 1 <= SEQ_LEN
    lengths, trained = lengths[fits], trained[fits]
    print(
        f"{len(lengths):,} samples of {lengths.mean():.0f} tokens, {trained.mean():.0f} of them "
        "trained\n"
    )
    compare_plans(lengths)
    compare_attention(make_windows(lengths, trained, "ffd", options.windows), options.rounds)
    compare_speeds(lengths, trained, options.rounds, options.windows)


if __name__ == "__main__":
    main()
