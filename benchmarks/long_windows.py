"""Attention of documents packed in long windows, on a processor: forward and backward pass.

    python benchmarks/long_windows.py [--windows 2048 8192] [--sliding 0 256] [--rounds 3]

Systems attend within the same documents of 250 to 750 tokens: each document in a call of its own
("single"), all in one call as a training run packs them ("packed"), and `sdpa` of transformers with
its mask of packed documents ("masks", made before the time counts). Each run is a process, and the
systems take turns. Time is the processor time of all threads per token, the least of two passes;
memory is the process's peak resident set above that before the first pass. Ratios compare runs of
one round: medians, with minimum and maximum.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from torchtitan.models.common.attention import Attention, with_kernel
from torchtitan.protocols.attention import AttentionMetadata

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
SYSTEMS = ("single", "packed", "masks")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def document_lengths(window: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(250, 751, (window // 250 + 1,), generator=generator)
    ends = [int(end) for end in drawn.cumsum(0) if end < window]
    return [end - start for start, end in zip([0, *ends], [*ends, window], strict=True)]


def ours(lengths: list[int], sliding: int | None) -> Attend:
    """Return attention within documents of these lengths."""
    positions_BL = torch.cat([torch.arange(n) for n in lengths])[None]
    metadata = with_kernel(
        replace(AttentionMetadata.from_positions(positions_BL), window=sliding),
        device=torch.device("cpu"),
        dtype=torch.get_default_dtype(),
        head_dim=HEAD_DIM,
        static=False,
    )
    attend = Attention()
    return lambda q, k, v: attend(q, k, v, metadata)


def with_masks(lengths: list[int], sliding: int | None) -> Attend:
    """Return the attention of transformers for documents packed in a row."""
    from transformers import MistralConfig, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    config = MistralConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        sliding_window=sliding,
        attn_implementation="sdpa",
    )
    whole, cut = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    mask = (whole if sliding is None else cut)(
        config,
        torch.empty(1, sum(lengths), 1),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
    )
    layer = torch.nn.Module()
    layer.num_key_value_groups = HEADS // KV_HEADS
    layer.is_causal = True

    def attend(*inputs: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        out: Tensor = sdpa_attention_forward(layer, q, k, v, mask)[0]
        return out

    return attend


def calls_of(system: str, window: int, sliding: int | None) -> list[tuple[slice, Attend]]:
    """Return calls of attention, each for some tokens."""
    lengths = document_lengths(window)
    if system == "masks":
        return [(slice(None), with_masks(lengths, sliding))]
    if system == "packed":
        return [(slice(None), ours(lengths, sliding))]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(slice(end - n, end), ours([n], sliding)) for n, end in zip(lengths, ends, strict=True)]


def measure(system: str, window: int, sliding: int | None) -> dict[str, float]:
    """Return microseconds per token, and mebibytes."""
    torch.manual_seed(0)
    shapes = [(1, window, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *qkv, grad = (torch.randn(shape) for shape in shapes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls = [
        ([x[:, part].clone().requires_grad_() for x in qkv], grad[:, part], attend)
        for part, attend in calls_of(system, window, sliding)
    ]
    seconds = []
    for _ in range(2):
        start = time.process_time()
        for inputs, grad_out, attend in calls:
            attend(*inputs).backward(grad_out)
        seconds.append(time.process_time() - start)
        for inputs, *_ in calls:
            for x in inputs:
                x.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"time": 1e6 * min(seconds) / window, "memory": peak / 1024}


def in_process(system: str, window: int, sliding: int, threads: int) -> dict[str, float]:
    words = ["--measure", system, "--windows", window, "--sliding", sliding, "--threads", threads]
    command = [sys.executable, __file__, *map(str, words)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers: dict[str, float] = json.loads(printed)
    return numbers


def spread(values: list[float], digits: int = 2) -> str:
    return (
        f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to "
        f"{max(values):.{digits}f})"
    )


def compare(window: int, sliding: int, systems: list[str], rounds: int, threads: int) -> None:
    """Print a row for each system."""
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system in systems:
            runs[system].append(in_process(system, window, sliding, threads))
    for system, measured in runs.items():
        ratios = [
            run["time"] / first["time"]
            for run, first in zip(measured, runs[systems[0]], strict=True)
        ]
        time_per_token = spread([run["time"] for run in measured], 1)
        memory = statistics.median(run["memory"] for run in measured)
        reach = f"{sliding:,}" if sliding else "none"
        cells = [f"{window:,}", reach, system, time_per_token, spread(ratios), f"{memory:,.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument(
        "--sliding", type=int, nargs="+", default=[0, 256], help="tokens that one sees; 0: all"
    )
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        numbers = measure(options.measure, options.windows[0], options.sliding[0] or None)
        print(json.dumps(numbers))
        return
    print("| window | sliding | documents | us/token | time relative to the first | memory, MiB |")
    print("|---:|---:|---|---:|---:|---:|")
    for window in options.windows:
        for sliding in options.sliding:
            compare(window, sliding, options.systems, options.rounds, options.threads)


if __name__ == "__main__":
    main()
