"""Simulate preparing a corpus and reading it on many hosts, from rates of this machine and a dry
run's predicted speed.

    python benchmarks/scale.py [--tokens 15e12] [--hosts 1024]

One process prepares and reads 40 MB of made-up text here, and looks for duplicates among random
hashes. The simulation then gives parts of 64 MB to 64 processes per host at this rate; a part takes
0.8 to 1.2 times the mean, and a lost host loses the parts that it is writing and returns after an
hour. 64 processes of one host look for duplicates and copy the rest, without the first process's
own work (gathering hashes, counting). Shared disks and networks are assumed to keep up; the table
says what they must transfer.
"""

import argparse
import heapq
import itertools
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan.cli.main import main as torchtitan
from torchtitan.components.checkpoint.filesystem import LocalFolder
from torchtitan.components.data.disk_cache import record_blocks
from torchtitan.components.data.prepare.encoding import HASH_BYTES, ITEM, document_encoding
from torchtitan.components.data.prepare.merge import ITEMS_PER_PASS, find_duplicates
from torchtitan.components.data.prepare.preparation import INDEX_ROWS
from torchtitan.config.manager import ConfigManager
from torchtitan.foresight import predict
from torchtitan.tools import durable

SOURCE_BYTES = 40e6
PART_BYTES = 64e6
PROCESSES_PER_HOST = 64
SECONDS_PER_LOSS = 6_300 * 3600
"""Mean time between losses of a host: 419 in 54 days on 2,048 hosts of 8 GPUs (arXiv:2407.21783,
section 3.3.4)."""
SECONDS_AWAY = 3600
_BATCHES, _COPIES, _HASHES, _SEARCHES = 200, 10, 1 << 22, 2000


class Rates(NamedTuple):
    """Measurements of one process on this machine."""

    bytes_per_token: float
    tokens_per_document: float
    prepared_bytes: float
    """Per second, of the source."""
    copied_bytes: float
    """Per second, of tokens, by the merge."""
    searched_parts: float
    """Per second, for the hashes of one pass."""
    compared_hashes: float
    """Per second."""
    read_tokens: float
    """Per second."""


def write_source(path: Path, n_bytes: float) -> None:
    """Write documents of made-up words, of 100 to 1,000 words each."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(20_000)
    ]
    with path.open("w") as file:
        while file.tell() < n_bytes:
            file.write(
                json.dumps(
                    {"text": " ".join(generator.choices(words, k=generator.randint(100, 1000)))}
                )
                + "\n"
            )


def seconds(function: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measure(folder: Path) -> Rates:
    """Prepare and read a file with one process."""
    source, small = folder / "source.jsonl", folder / "small.jsonl"
    write_source(small, 1e5)
    write_source(source, SOURCE_BYTES)

    def prepare(path: Path) -> None:
        place = ["--out", str(folder / path.stem), "--workers", "1"]
        assert (
            torchtitan(
                [
                    "data",
                    "prepare",
                    str(path),
                    *place,
                    "--module",
                    "llama3",
                    "--config",
                    "debugmodel",
                ]
            )
            == 0
        )

    fixed = seconds(prepare, small)
    prepared = seconds(prepare, source) - fixed
    train = json.loads((folder / source.stem / "manifest.json").read_text())["splits"]["train"]
    config = ConfigManager().parse_args(["--dataloader.dataset", str(folder / source.stem)]).config
    tokenizer = config.tokenizer.build(path=config.hf_assets_path)
    loader = config.dataloader.build(
        tokenizer=tokenizer, seq_len=2048, local_batch_size=4, epochs=None, seed=0
    )
    next(loader)
    [cache] = (folder / source.stem / "train").iterdir()

    def copy() -> None:
        for number in range(_COPIES):
            target = folder / f"copy{number}"
            document_encoding(tokenizer).select(
                [(LocalFolder(cache), np.arange(train["items"]))], target
            )
            record_blocks(target)
            durable.sync_tree(target)

    items = np.zeros(_HASHES, ITEM)
    items["hash"] = np.frombuffer(
        np.random.default_rng(0).bytes(_HASHES * HASH_BYTES), f"S{HASH_BYTES}"
    )
    part = np.sort(items[: round(train["items"] * PART_BYTES / source.stat().st_size)])
    return Rates(
        bytes_per_token=source.stat().st_size / train["tokens"],
        tokens_per_document=train["tokens"] / train["items"],
        prepared_bytes=source.stat().st_size / prepared,
        copied_bytes=_COPIES * (cache / "tokens.bin").stat().st_size / seconds(copy),
        searched_parts=_SEARCHES / seconds(find_duplicates, [part] * _SEARCHES, 0, 1 << 12),
        compared_hashes=_HASHES / seconds(find_duplicates, [items]),
        read_tokens=_BATCHES * 4 * 2048 / seconds(lambda: list(itertools.islice(loader, _BATCHES))),
    )


def simulate_parts(n_parts: int, hosts: int, mean_seconds: float) -> float:
    """Return the seconds until all parts are written."""
    generator = random.Random(0)
    free = [(0.0, host) for host in range(hosts) for _ in range(PROCESSES_PER_HOST)]
    losses = [generator.expovariate(1 / SECONDS_PER_LOSS) for _ in range(hosts)]
    left, end = n_parts, 0.0
    while left:
        start, host = heapq.heappop(free)
        if start > losses[host] + SECONDS_AWAY:  # it is back
            losses[host] = start + generator.expovariate(1 / SECONDS_PER_LOSS)
        done = start + mean_seconds * generator.uniform(0.8, 1.2)
        if done > losses[host]:  # the part is lost
            heapq.heappush(free, (losses[host] + SECONDS_AWAY + 1, host))
            continue
        heapq.heappush(free, (done, host))
        left, end = left - 1, max(end, done)
    return end


def in_words(duration: float) -> str:
    return f"{duration / 3600:,.1f} hours" if duration >= 3600 else f"{duration / 60:,.1f} minutes"


def rows(rates: Rates, tokens: float, hosts: int) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    n_parts = round(tokens * rates.bytes_per_token / PART_BYTES)
    n_documents = tokens / rates.tokens_per_document
    n_passes = 1 + n_documents // ITEMS_PER_PASS
    result = [
        ("measured: text prepared by one process", f"{rates.prepared_bytes / 1e6:.1f} MB/s"),
        ("measured: tokens copied by one process", f"{rates.copied_bytes / 1e6:.1f} MB/s"),
        (
            "measured: hashes compared, parts searched",
            f"{rates.compared_hashes:,.0f}/s, {rates.searched_parts:,.0f}/s",
        ),
        ("measured: tokens read by one process", f"{rates.read_tokens / 1e6:.1f} million/s"),
        ("text, parts of 64 MB", f"{tokens * rates.bytes_per_token / 1e12:,.0f} TB, {n_parts:,}"),
    ]
    for count in sorted({1, 32, hosts}):
        taken = simulate_parts(n_parts, count, PART_BYTES / rates.prepared_bytes)
        transfer = count * PROCESSES_PER_HOST * rates.prepared_bytes / 1e9
        result.append(
            (
                f"prepare, {count:,} host{'s' * (count > 1)}",
                f"{in_words(taken)}, {transfer:,.1f} GB/s from the source",
            )
        )
    comparing = n_documents / rates.compared_hashes + n_passes * n_parts / rates.searched_parts
    comparing, copying = (
        comparing / PROCESSES_PER_HOST,
        tokens * 4 / rates.copied_bytes / PROCESSES_PER_HOST,
    )
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b"]).config
    speed = predict(config, 8 * hosts, "h100").tokens_per_second * 8
    return result + [
        (
            f"merge, 1 host: find duplicates, {n_passes:,.0f} passes",
            f"{in_words(comparing)}, {n_documents * ITEM.itemsize / 1e12:.1f} TB on its disk",
        ),
        (
            "merge, 1 host: copy",
            f"{in_words(copying)}, {tokens * 4 / copying / 1e9:.1f} GB/s read and written",
        ),
        ("predicted: `llama3_8b` on 8 H100 per host", f"{speed:,.0f} tokens/s per host"),
        (
            f"train on all tokens with {hosts:,} hosts",
            f"{tokens / speed / hosts / 86400:,.1f} days",
        ),
        (
            "read, 4 bytes per token",
            f"{speed * 4e-6:.2f} MB/s per host, {speed * hosts * 4e-6:,.0f} MB/s in all",
        ),
        ("reading, part of one process per GPU", f"{speed / 8 / rates.read_tokens:.2%}"),
        ("index mapped by each process", f"{n_parts * INDEX_ROWS * 8 / 1e6:.0f} MB"),
    ]


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokens", type=float, default=15e12, help="tokens of the corpus (default: 15e12)"
    )
    parser.add_argument("--hosts", type=int, default=1024, help="hosts (default: 1024)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["TORCHTITAN_CACHE"] = name
        rates = measure(Path(name))
    print("| quantity | value |\n|---|---|")
    for row in rows(rates, arguments.tokens, arguments.hosts):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
