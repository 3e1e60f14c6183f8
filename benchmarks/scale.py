"""Simulate preparing a corpus and reading it on many hosts, from rates of this machine and a dry run's predicted speed.

    python benchmarks/scale.py [--source FILE.jsonl] [--tokens 15e12] [--hosts 1024]

One process prepares, merges and reads a JSON Lines file here. The simulation then gives parts of 64 MB to all cores of
the hosts at this rate; a part takes 0.8 to 1.2 times the mean, and a lost host loses the parts that it is writing and
returns after an hour. Shared disks and networks are assumed to keep up; the table says what they must transfer.
"""

import argparse
import heapq
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.cli.main import main as torchtitan
from torchtitan.config.manager import ConfigManager
from torchtitan.foresight import predict

PART_BYTES = 64e6
HOURS_PER_LOSS = 6_300
"""Mean time between losses of a host: 419 in 54 days on 2,048 hosts of 8 GPUs (arXiv:2407.21783, section 3.3.4)."""
_HOURS_AWAY = 1.0
_BATCHES = 200
_INDEX_BYTES = 40  # of a part


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one process on this machine."""

    bytes_per_token: float
    tokens_per_document: float
    prepared_bytes: float
    """Per second, of the source."""
    merged_documents: float
    """Per second."""
    read_tokens: float
    """Per second."""


def write_source(path: Path, n_bytes: int) -> None:
    """Write documents of made-up words, of 100 to 1,000 words each."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(20_000)]
    with path.open("w") as file:
        while file.tell() < n_bytes:
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=generator.randint(100, 1000)))}) + "\n")


def measure(source: Path, folder: Path) -> Rates:
    """Prepare, merge and read a file with one process."""
    small = folder / "small.jsonl"
    with source.open() as lines:
        small.write_text("".join(itertools.islice(lines, 20)))
    seconds: dict[str, list[float]] = {"--part=1/1": [], "--merge": []}
    for path in (small, source):  # the first has only the fixed costs
        for step, times in seconds.items():
            start = time.perf_counter()
            place = ["--out", str(folder / path.stem), "--workers", "1", "--module", "llama3", "--config", "debugmodel"]
            assert torchtitan(["data", "prepare", str(path), *place, step]) == 0
            times.append(time.perf_counter() - start)
    train = json.loads((folder / source.stem / "manifest.json").read_text())["splits"]["train"]
    prepare, merge = (last - first for first, last in seconds.values())
    config = ConfigManager().parse_args(["--dataloader.dataset", str(folder / source.stem)]).config
    tokenizer = config.tokenizer.build(path=config.hf_assets_path)
    loader = config.dataloader.build(tokenizer=tokenizer, seq_len=2048, local_batch_size=4, epochs=None, seed=0)
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    n_read = sum(batch["input"].numel() for batch in itertools.islice(batches, _BATCHES))
    return Rates(
        bytes_per_token=source.stat().st_size / train["tokens"],
        tokens_per_document=train["tokens"] / train["items"],
        prepared_bytes=source.stat().st_size / prepare,
        merged_documents=train["items"] / merge,
        read_tokens=n_read / (time.perf_counter() - start),
    )


def simulate_parts(n_parts: int, hosts: int, cores: int, mean_seconds: float) -> float:
    """Return the seconds until all parts are written."""
    generator = random.Random(0)
    free = [(0.0, host) for host in range(hosts) for _ in range(cores)]
    losses = [generator.expovariate(1 / (HOURS_PER_LOSS * 3600)) for _ in range(hosts)]
    left, end = n_parts, 0.0
    while left:
        start, host = heapq.heappop(free)
        if start > losses[host] + _HOURS_AWAY * 3600:  # it is back
            losses[host] = start + generator.expovariate(1 / (HOURS_PER_LOSS * 3600))
        done = start + mean_seconds * generator.uniform(0.8, 1.2)
        if done > losses[host]:  # the part is lost
            heapq.heappush(free, (losses[host] + _HOURS_AWAY * 3600 + 1, host))
            continue
        heapq.heappush(free, (done, host))
        left, end = left - 1, max(end, done)
    return end


def rows(rates: Rates, tokens: float, hosts: int, cores: int) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    n_parts = round(tokens * rates.bytes_per_token / PART_BYTES)
    part_seconds = PART_BYTES / rates.prepared_bytes
    result = [
        ("measured: text prepared by one process", f"{rates.prepared_bytes / 1e6:.1f} MB/s"),
        ("measured: documents merged by one process", f"{rates.merged_documents:,.0f}/s"),
        ("measured: tokens read by one process", f"{rates.read_tokens / 1e6:.1f} million/s"),
        ("text, parts of 64 MB", f"{tokens * rates.bytes_per_token / 1e12:,.0f} TB, {n_parts:,}"),
    ]
    for count in sorted({1, 32, hosts}):
        hours = simulate_parts(n_parts, count, cores, part_seconds) / 3600
        transfer = count * cores * rates.prepared_bytes / 1e9
        result.append((f"prepare on {count:,} hosts", f"{hours:,.1f} hours, {transfer:,.1f} GB/s from the source"))
    merge_hours = tokens / rates.tokens_per_document / rates.merged_documents / 3600 / cores
    result.append((f"merge on one host of {cores} cores, if it scales", f"{merge_hours:,.1f} hours"))
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b"]).config
    speed = predict(config, 8 * hosts, "h100").tokens_per_second * 8
    result += [
        ("predicted: `llama3_8b` on 8 H100 per host", f"{speed:,.0f} tokens/s per host"),
        (f"train on all tokens with {hosts:,} hosts", f"{tokens / speed / hosts / 86400:,.1f} days"),
        ("read per host and in all, 4 bytes per token", f"{speed * 4e-6:.1f} MB/s, {speed * hosts * 4e-9:.1f} GB/s"),
        ("reading, part of one process per GPU", f"{speed / 8 / rates.read_tokens:.1%}"),
        ("index mapped by each process", f"{n_parts * _INDEX_BYTES / 1e6:.0f} MB"),
    ]
    return result


def main(words: Sequence[str] | None = None) -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, help="JSON Lines file (default: 40 MB of made-up words)")
    parser.add_argument("--tokens", type=float, default=15e12, help="tokens of the corpus (default: 15e12)")
    parser.add_argument("--hosts", type=int, default=1024, help="hosts (default: 1024)")
    parser.add_argument("--cores", type=int, default=64, help="processes per host that prepare (default: 64)")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        source = arguments.source or Path(name) / "source.jsonl"
        if not arguments.source:
            write_source(source, 40_000_000)
        os.environ["TORCHTITAN_CACHE"] = name
        rates = measure(source, Path(name))
    print("| quantity | value |\n|---|---|")
    for row in rows(rates, arguments.tokens, arguments.hosts, arguments.cores):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
