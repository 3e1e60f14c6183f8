"""Job P: MB of text per processor second of preparing data, compared with an earlier build and with
other libraries.

    python benchmarks/prepare.py --text FILE.jsonl --tokenizers FOLDER ... [--before CHECKOUT]
        [--rounds 3] [--systems torchtitan before datatrove litdata] [--peer_python PYTHON]

The text is a JSON Lines file with the column `text`, the folders have a tokenizer.json. Each run is
a command in one process, and its time is the processor time of the whole command, also of processes
that it starts, so other work on the machine matters little. torchtitan and `before`, a checkout of
an earlier revision (git worktree add), read, tokenize, remove duplicates, write and merge; their
tokens must be equal. datatrove (`DocumentTokenizer`) and litdata (`optimize` with `TokensLoader`)
only read, tokenize and write, as their documentation shows.

Systems take turns in rounds; results are stored in the form of benchmarks/peers.py.
"""

import argparse
import datetime
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import RESULTS, read_processor, result_path
from start import environment_of
from systems.report import FASTEST, OURS, spread

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "before"
PEERS = ("datatrove", "litdata")
BYTES_PER_MB = 1e6


def command_of(system: str, text: Path, tokenizer: Path, folder: Path, python: str) -> list[str]:
    """Return the command that writes the tokens of a text to a folder."""
    if system in PEERS:
        program = ROOT / "benchmarks" / "systems" / "run_tokenizer.py"
        return [
            python,
            str(program),
            system,
            str(text),
            str(tokenizer / "tokenizer.json"),
            str(folder),
        ]
    arguments = [
        "--workers",
        "1",
        "--module",
        "llama3",
        "--config",
        "debugmodel",
        "--hf_assets_path",
        str(tokenizer),
    ]
    return [
        python,
        "-m",
        "torchtitan",
        "data",
        "prepare",
        str(text),
        "--out",
        str(folder),
        *arguments,
    ]


def processor_seconds(command: Sequence[str], checkout: Path) -> float:
    """Run a command with the package of a checkout; return its processor time. Exit with the end of
    its messages if it fails."""
    environment = environment_of(checkout, threads=1) | {"TOKENIZERS_PARALLELISM": "false"}

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    result = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, errors="replace"
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
    return spent() - before


def digest_of_tokens(folder: Path) -> str:
    """Return the digest of the tokens in prepared data."""
    digest: str = json.loads((folder / "manifest.json").read_text())["digest"]
    return digest


def measure(text: Path, tokenizer: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the numbers of each system, as [median, minimum, maximum] over the rounds."""
    systems = [system for system in options.systems if system != BEFORE or options.before]
    rounds: dict[str, list[float]] = {system: [] for system in systems}
    megabytes = text.stat().st_size / BYTES_PER_MB
    digests = set()
    for system in {OURS, BEFORE}.intersection(systems):  # compiles Python's code
        checkout = options.before.resolve() if system == BEFORE else ROOT
        with tempfile.TemporaryDirectory() as name:
            short, out = Path(name) / "short.jsonl", Path(name) / "out"
            short.write_text(json.dumps({"text": "tea"}))
            command = command_of(system, short, tokenizer.resolve(), out, sys.executable)
            processor_seconds(command, checkout)
    for round in range(options.rounds):
        shift = round % len(systems)
        for system in [*systems[shift:], *systems[:shift]]:
            checkout = options.before.resolve() if system == BEFORE else ROOT
            python = options.peer_python if system in PEERS else sys.executable
            with tempfile.TemporaryDirectory() as folder:
                command = command_of(
                    system, text.resolve(), tokenizer.resolve(), Path(folder) / "out", python
                )
                rounds[system].append(megabytes / processor_seconds(command, checkout))
                if system not in PEERS:
                    digests.add(digest_of_tokens(Path(folder) / "out"))
    if len(digests) > 1:
        sys.exit(f"{tokenizer}: {OURS} and {BEFORE} wrote different tokens")
    summary: dict[str, dict[str, Any]] = {
        name: {"mb_per_second": spread(speeds)} for name, speeds in rounds.items()
    }
    for name, speeds in rounds.items():
        if name != OURS:
            pairs = zip(rounds[OURS], speeds, strict=True)
            summary[name]["speed_ratio"] = spread(ours / theirs for ours, theirs in pairs)
    if peers := [rounds[name] for name in systems if name in PEERS]:
        fastest = [max(speeds) for speeds in zip(*peers, strict=True)]
        ratios = (ours / theirs for ours, theirs in zip(rounds[OURS], fastest, strict=True))
        summary[FASTEST] = {"speed_ratio": spread(ratios)}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True)
    parser.add_argument("--before", type=Path, help="checkout of an earlier revision")
    parser.add_argument(
        "--systems", nargs="+", default=[OURS, BEFORE], choices=[OURS, BEFORE, *PEERS]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer_python", default=sys.executable, help="interpreter that has the peers"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if OURS not in options.systems:
        parser.error(f"--systems needs {OURS}, which the others are compared with")
    processor = read_processor(Path("/proc/cpuinfo").read_text())
    date = datetime.date.today().isoformat()
    document: dict[str, Any] = {"date": date, "processor": processor, "threads": 1, "jobs": {}}
    document["text_mb"] = options.text.stat().st_size / BYTES_PER_MB
    options.results.mkdir(parents=True, exist_ok=True)
    path = result_path(options.results, date, processor)
    for tokenizer in options.tokenizers:
        title = f"P, {tokenizer.name}"
        document["jobs"][title] = summary = measure(options.text, tokenizer, options)
        print(f"\n{title}")
        for system, numbers in summary.items():
            print(
                f"{system:13}",
                *(f"{name} {value[0]:.2f}" for name, value in numbers.items()),
                flush=True,
            )
        # after each job, in case the next is interrupted
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
