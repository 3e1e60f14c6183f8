"""Job S: processor seconds of commands that print or refuse something, and of the debug model until
the end of its first step, next to `import torch` and earlier builds.

    python benchmarks/start.py [--before CHECKOUT ...] [--rounds 3] [--threads 1] [--only TITLE ...]

Systems take turns in rounds, after a run of each that is not counted, which compiles Python's code.
The time of the whole process counts. `report` and `migrate` read what this program has written in
a temporary folder.
"""

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DEBUG_MODEL = ["train", "--module", "llama3", "--config", "debugmodel"]
RL = ["train", "--module", "rl", "--config", "debugmodel"]
FIRST_STEP = [*DEBUG_MODEL, "--training.steps", "1", "--validator.no_enable"]

AXOLOTL = """\
base_model: meta-llama/Llama-3.2-1B
datasets: [{path: my.jsonl, type: alpaca}]
learning_rate: 1e-4
num_epochs: 1
"""

COMMANDS: dict[str, list[str]] = {
    "`ls`": ["ls"],
    "`--help`": ["--help"],
    "`train --help`": ["train", "--help"],
    "`tokenizer train --help`": ["tokenizer", "train", "--help"],
    "`plan --help`": ["plan", "--help"],
    "`serve --help`": ["serve", "--help"],
    "an unknown option": [*DEBUG_MODEL, "--optimizer.lrr", "1"],
    "a wrong value": [*DEBUG_MODEL, "--training.steps", "x"],
    "a wrong module": ["train", "--module", "lama3"],
    "a value out of range": [*DEBUG_MODEL, "--optimizer.lr", "-1"],
    "a wrong degree": [*DEBUG_MODEL, "--parallelism.tensor_parallel_degree", "3"],
    "a wrong batch": [*DEBUG_MODEL, "--training.global_batch_size", "3"],
    "a wrong file": [*DEBUG_MODEL, "--dataloader.dataset", "nowhere.txt"],
    "a wrong column": [*DEBUG_MODEL, "--dataloader.dataset", "rows.jsonl"],
    "a wrong function": [*RL, "--rewards", "nowhere.py:score"],
    "a folder without a checkpoint": ["generate", "--checkpoint", "nowhere", "--prompt", "x"],
    "`report`": ["report", "run"],
    "`migrate`": ["migrate", "axolotl.yaml", "--out", "migrated.yaml"],
    "first step": [*FIRST_STEP, "--dump_folder", "out"],
}

TRAINER = """\
import torch
import transformers

config = transformers.LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4,
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2048, (8, 256))]
arguments = transformers.TrainingArguments(
    "trainer", max_steps=1, per_device_train_batch_size=8, use_cpu=True, report_to=[],
    save_strategy="no",
)
model = transformers.LlamaForCausalLM(config)
transformers.Trainer(model, arguments, train_dataset=rows).train()
"""
"""A first step of transformers' Trainer, with a model of the debug model's sizes and random
tokens, which need no tokenizer."""

REFUSED = [
    words
    for title, words in COMMANDS.items()
    if title.startswith(("an unknown", "a wrong", "a value", "a folder"))
]
"""Commands that end with exit code 2."""


def processor_seconds(
    command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> float:
    """Run a command in a folder; return its processor seconds, or NaN if it does not end as
    `REFUSED` says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode != (2 if list(command[3:]) in REFUSED else 0):
        return math.nan
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def environment_of(checkout: Path, threads: int) -> dict[str, str]:
    """Return the variables with which Python finds a build, and keeps its compiled code."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, nargs="+", default=[], help="earlier checkouts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, help="rows besides `import torch`")
    parser.add_argument("--trainer", action="store_true", help="add transformers' Trainer")
    options = parser.parse_args()
    checkouts = [ROOT, *(path.resolve() for path in options.before)]
    print("| command | " + " | ".join(checkout.name for checkout in checkouts) + " |")
    print("|---|" + "---:|" * len(checkouts))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "axolotl.yaml").write_text(AXOLOTL)
        (folder / "rows.jsonl").write_text('{"answer": "no text"}\n')
        ours = environment_of(ROOT, options.threads)
        run = [sys.executable, "-m", "torchtitan", *FIRST_STEP, "--dump_folder", "run"]
        if math.isnan(processor_seconds(run, ours, folder)):
            sys.exit(f"{' '.join(run)} failed, whose run `report` needs")
        commands = {"`import torch`": [sys.executable, "-c", "import torch"]}
        for title in options.only or COMMANDS:
            words = COMMANDS[title]
            commands[title] = [sys.executable, "-m", "torchtitan", *words]
        if options.trainer:
            commands["first step of the Trainer"] = [sys.executable, "-c", TRAINER]
        for title, command in commands.items():
            seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
            for _ in range(options.rounds + 1):
                for checkout in checkouts:
                    environment = environment_of(checkout, options.threads)
                    seconds[checkout].append(processor_seconds(command, environment, folder))
            cells = [f"{statistics.median(times[1:]):.2f}" for times in seconds.values()]
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
