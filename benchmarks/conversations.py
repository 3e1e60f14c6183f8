"""Job Q: conversations per processor second of encoding fine-tuning data, compared with earlier
builds.

    python benchmarks/conversations.py --data FILE.jsonl ... --model FOLDER [--before CHECKOUT ...]
        [--rounds 5] [--train_on all] [--joined 1500]

The files have rows of fine-tuning data, the folder a tokenizer and a chat template. `--joined` adds
this number of conversations of several turns, each with the messages of 2 to 6 random rows of the
files. Each run reads, checks, renders, tokenizes and writes all rows in one process; its time is
the processor time without the start of the process and without opening the tokenizer and gigatoken.
Builds take turns in rounds. Builds whose ids and masks differ are marked.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def encode(data: str, model: str, train_on: str) -> None:
    """Encode a file with the package on the path; print numbers as JSON."""
    from torchtitan.components.data.finetuning.row_formats import find_format
    from torchtitan.components.data.finetuning.sample_cache import first_columns, write_samples
    from torchtitan.components.data.finetuning.sft import SFTDataLoader
    from torchtitan.components.data.sources.source import CHAT_DATASETS, resolve_source
    from torchtitan.components.tokenizer import PretrainedTokenizer

    tokenizer = PretrainedTokenizer.Config().build(path=model)
    config = SFTDataLoader.Config(dataset=[data], train_on=train_on)
    source = resolve_source(data, catalog=CHAT_DATASETS)
    row_format = find_format(first_columns(source), "auto", {}, "sft")
    encoder = config.encoder(tokenizer, config.find_template(tokenizer))
    if hasattr(encoder, "arrays"):  # earlier builds have none
        encoder.arrays.expect(source.size())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.process_time()
        report = write_samples(
            source, row_format, encoder, config.filters(), folder, lambda n_bytes: None
        )
        seconds = time.process_time() - started
        files = ("ids.bin", "trained.bin", "offsets.bin")
        content = b"".join((folder / file).read_bytes() for file in files)
    numbers = {"rate": report.rows / seconds, "digest": hashlib.sha256(content).hexdigest()}
    print(json.dumps(numbers))


def write_joined(files: list[Path], number: int, path: Path) -> None:
    """Write conversations of 2 to 6 random rows each."""
    from torchtitan.components.data.finetuning.row_formats import find_format
    from torchtitan.components.data.finetuning.sample_cache import first_columns
    from torchtitan.components.data.sources.source import CHAT_DATASETS, resolve_source

    known: list[list[dict[str, Any]]] = []
    for file in files:
        source = resolve_source(str(file), catalog=CHAT_DATASETS)
        row_format = find_format(first_columns(source), "auto", {}, "sft")
        samples = (row_format.convert(row.values) for row in source.rows(lambda n_bytes: None))
        known += [sample.messages for sample in samples]
    generator = random.Random(0)
    with path.open("w") as lines:
        for _ in range(number):
            chosen = generator.sample(known, generator.randint(2, 6))
            lines.write(json.dumps({"messages": list(itertools.chain(*chosen))}) + "\n")


def run(checkout: Path, data: Path, model: Path, train_on: str) -> tuple[float, str]:
    """Return conversations per processor second of a build, and the digest of what it writes."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    others = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout), *others])
    arguments = [str(data.resolve()), str(model.resolve()), train_on]
    command = [sys.executable, __file__, "--encode", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
    numbers = json.loads(result.stdout.splitlines()[-1])
    return numbers["rate"], numbers["digest"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", default=[])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--before", type=Path, nargs="+", default=[], help="earlier checkouts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train_on", default="assistant")
    parser.add_argument("--joined", type=int, default=0, help="conversations of several turns")
    parser.add_argument("--encode", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.encode:
        encode(*options.encode)
        return
    if not options.data or not options.model:
        parser.error("--data and --model are required")
    with tempfile.TemporaryDirectory() as folder:
        files = options.data
        if options.joined:
            sys.path.insert(0, str(ROOT))
            files = [*files, Path(folder) / "joined.jsonl"]
            write_joined(options.data, options.joined, files[-1])
        compare(files, options)


def compare(files: list[Path], options: argparse.Namespace) -> None:
    """Encode files with each build in turns, and print the medians."""
    checkouts = [ROOT, *(path.resolve() for path in options.before)]
    for data in files:
        rates: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
        digests: dict[Path, str] = {}
        for number in range(options.rounds):
            shift = number % len(checkouts)
            for checkout in [*checkouts[shift:], *checkouts[:shift]]:
                rate, digests[checkout] = run(checkout, data, options.model, options.train_on)
                rates[checkout].append(rate)
        print(data.name)
        for checkout in checkouts:
            pairs = zip(rates[ROOT], rates[checkout], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            note = "" if digests[checkout] == digests[ROOT] else ", other ids or masks"
            median = statistics.median(rates[checkout])
            print(f"  {checkout.name}: {median:,.0f}/s, ratio {ratio:.2f}{note}", flush=True)


if __name__ == "__main__":
    main()
