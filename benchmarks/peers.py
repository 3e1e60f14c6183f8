"""Speed and memory of torchtitan compared with other trainers, in one run on the processor of a
Linux machine.

    python benchmarks/peers.py [--jobs A B C D E F G H I J K] [--precisions float32] [--rounds 3]
        [--systems torchtitan trainer ...] [--pythons PYTHON ...] [--data gsm8k_train.jsonl
        --tokenizer FOLDER]

All train a Llama (dim 512, 8 layers, 8 heads, 4 key/value heads, ffn 1,536) in batches of 4
windows, with fused AdamW and clipped gradients; bfloat16 is mixed precision, over weights in
float32.

- A: pre-training, vocabulary 8,192, windows of 512 tokens
- B: the same with vocabulary 128,256
- C: fine-tuning on questions and answers such as GSM8K (`--data`), windows of up to 1,024 tokens,
  GPT-2's vocabulary (`--tokenizer`). torchtitan and TRL pack samples; transformers' Trainer pads
  them, and accumulates micro-batches until a step has about the same number of tokens
- D: time from the start of the command to the end of the first step of A
- E, F, G: pre-training Qwen3, Gemma 3 and a hybrid with delta nets, tied, vocabulary 32,768,
  windows of 512 tokens; torchtitan trains the class of transformers, as the Trainer does
- H: C with the Qwen3 of E
- I: a layer of Qwen3's experts scaled down (dim 512, 128 experts of width 192, 8 per token),
  forward and backward over 2,048 tokens, compared with the implementations of transformers; its
  batched one would copy 20 GB of weights
- J, K: greedy generation with the Llama of A and a key/value cache, 1 prompt (J) and 8 prompts (K)
  of 128 tokens, 128 new tokens each; a step is one batch of prompts, and bfloat16 includes the
  weights

Each run is a process, and the systems take turns: once per round, in rotated order. A run's step
time and tokens/s are medians over its steps after the warm-up; padding does not count. Memory is
the process's peak resident set, reported by the operating system. MFU is relative to the fastest
matrix product measured before the job in the same type. Ratios compare runs of one round. Tables
show the median over rounds, the minimum and the maximum.

Results are written to benchmarks/results/DATE-PROCESSOR.json; benchmarks/compare.py compares two
such files.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from systems.report import OURS, Run, summarize, table
from systems.runs import SYSTEMS, RunFailed, find_interpreters, measure, measure_machine
from systems.task import Task

RESULTS = Path(__file__).resolve().parent / "results"
PRECISIONS = ("bfloat16", "float32")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")
"""Processor flags that decide the speed of matrix products."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work of all systems."""

    kind: str = "pretrain"
    model: str = ""
    vocab_size: int = 8192
    seq_len: int = 512
    batch_size: int = 4
    precisions: tuple[str, ...] = PRECISIONS
    systems: tuple[str, ...] = (OURS, "loop", "trainer", "trainer-compiled", "litgpt", "trl")
    first_step_only: bool = False

    def task(self, precision: str, system: str, options: argparse.Namespace) -> Task:
        return Task(
            kind=self.kind,
            model=self.model,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            precision=precision,
            steps=1 if self.first_step_only else options.steps,
            compile=SYSTEMS[system].compile,
            checkpointing=SYSTEMS[system].checkpointing,
            data=getattr(options, f"{self.kind}_data", options.data),
            tokenizer=options.tokenizer,
        )


JOBS = {
    "A": Job(),
    "B": Job(vocab_size=128_256),
    "C": Job(kind="sft", vocab_size=50_257, seq_len=1024, systems=(OURS, "trainer", "trl")),
    "E": Job(model="qwen3", vocab_size=32_768, systems=(OURS, "trainer")),
    "F": Job(model="gemma3_text", vocab_size=32_768, systems=(OURS, "trainer")),
    "G": Job(model="qwen3_5_text", vocab_size=32_768, systems=(OURS, "trainer")),
    "H": Job(kind="sft", model="qwen3", vocab_size=50_257, seq_len=1024, systems=(OURS, "trainer")),
    "I": Job(kind="experts", systems=(OURS, "grouped_mm", "eager")),
    "J": Job(kind="generate", seq_len=128, batch_size=1, systems=(OURS, "generate")),
    "K": Job(kind="generate", seq_len=128, batch_size=8, systems=(OURS, "generate")),
    "D": Job(
        precisions=("float32",),
        systems=(OURS, "loop", "trainer", "litgpt", "trl"),
        first_step_only=True,
    ),
}


def run_rounds(
    name: str,
    job: Job,
    precision: str,
    interpreters: Mapping[str, tuple[str, str]],
    options: argparse.Namespace,
) -> list[Run]:
    """Run a job with all installed systems in turns. Later rounds skip a system that failed."""
    systems = [system for system in job.systems if system in interpreters]
    runs = []
    for round in range(options.rounds):
        shift = round % max(1, len(systems))
        for system in [*systems[shift:], *systems[:shift]]:
            try:
                numbers = measure(
                    system,
                    job.task(precision, system, options),
                    interpreters[system][0],
                    threads=options.threads,
                    limit=options.limit,
                    warm_up=None if job.first_step_only else options.warm_up,
                )
            except RunFailed as error:
                print(f"{name}, {precision}: {system} is skipped: {error}", file=sys.stderr)
                systems.remove(system)
            else:
                runs.append(
                    Run(job=name, precision=precision, system=system, round=round, **numbers)
                )
    return runs


def read_processor(cpuinfo: str) -> dict[str, Any]:
    """Return name, cores and `FLAGS` of the processor from the text of /proc/cpuinfo."""
    fields = re.findall(r"^(model name|flags)\s*: (.*)$", cpuinfo, re.MULTILINE)
    last = dict(fields)
    return {
        "name": last["model name"].strip(),
        "cores": sum(field == "flags" for field, _ in fields),
        "flags": [flag for flag in FLAGS if flag in last["flags"].split()],
    }


def result_path(folder: Path, date: str, processor: Mapping[str, Any]) -> Path:
    """Return an unused path for results: `DATE-PROCESSOR-CORES.json`, with a number from the second
    file on."""
    slug = re.sub(r"[^a-z0-9]+", "-", processor["name"].lower()).strip("-")
    stem = f"{date}-{slug}-{processor['cores']}-cores"
    paths = (
        folder / f"{stem}{suffix}.json"
        for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    )
    return next(path for path in paths if not path.exists())


def parser_of(
    jobs: Mapping[str, Job], default: list[str], description: str | None
) -> argparse.ArgumentParser:
    """Return the parser of the options that all benchmarks of jobs share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", nargs="+", default=default, choices=jobs)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each system")
    parser.add_argument("--steps", type=int, default=8, help="steps of a run, with the warm-up")
    parser.add_argument(
        "--warm_up", type=int, default=2, help="steps that are not timed, at least 1"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=900,
        help="seconds of a run, which counts if it has enough steps",
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core"
    )
    parser.add_argument(
        "--pythons", nargs="+", default=[], help="further interpreters to search for peers"
    )
    parser.add_argument(
        "--tokenizer", default="", help="folder with GPT-2's tokenizer.json, for jobs with text"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return parser


def main() -> None:
    parser = parser_of(JOBS, ["A", "B", "C", "D"], __doc__)
    parser.add_argument(
        "--data", default="", help="for C and H: JSON Lines with the columns question and answer"
    )
    options = parser.parse_args()
    if {"C", "H"} & set(options.jobs) and not (options.data and options.tokenizer):
        parser.error("jobs C and H need --data and --tokenizer; --jobs A B D leaves them out")
    run(JOBS, options)


def run(jobs: Mapping[str, Job], options: argparse.Namespace) -> None:
    """Run the jobs of the options, print their tables, and store the results."""
    if not 1 <= options.warm_up < options.steps:
        sys.exit(
            f"--warm_up is {options.warm_up}, but must be at least 1 and below --steps, "
            f"{options.steps}"
        )
    interpreters = find_interpreters(options.systems, [sys.executable, *options.pythons])
    for system in options.systems:
        print(f"{system}: {interpreters[system][1] if system in interpreters else 'not installed'}")

    processor, date = (
        read_processor(Path("/proc/cpuinfo").read_text()),
        datetime.date.today().isoformat(),
    )
    print(
        f"{processor['name']}, {processor['cores']} cores, {' '.join(processor['flags'])}, "
        f"{options.threads} threads"
    )
    document: dict[str, Any] = {
        "date": date,
        "processor": processor,
        "threads": options.threads,
        "load_before": os.getloadavg()[0],
        "versions": {system: version for system, (_, version) in interpreters.items()},
        "machine": {},
        "jobs": {},
        "runs": [],
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = result_path(options.results, date, processor)
    for name in options.jobs:
        for precision in [
            precision for precision in jobs[name].precisions if precision in options.precisions
        ]:
            facts = measure_machine(jobs[name].task(precision, OURS, options), options.threads)
            runs = run_rounds(name, jobs[name], precision, interpreters, options)
            title = f"{name}, {precision}"
            summary = summarize(runs, facts["flops_per_token"], facts["peak_flops"])
            print(
                f"\nPeak: {facts['peak_flops'] / 1e9:,.1f} GFLOP/s "
                f"({facts['peak_source']})\n\n{table(title, summary)}"
            )
            sys.stdout.flush()
            document["machine"][title], document["jobs"][title] = facts, summary
            document["runs"] += map(dataclasses.asdict, runs)
            # after each job, in case the next is interrupted
            path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
