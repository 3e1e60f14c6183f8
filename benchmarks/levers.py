"""Memory, speed and held-out loss of each option for fine-tuning, in one run on one machine.

    python benchmarks/levers.py [--steps 40] [--base_steps 80] [--only lora qlora]

A Llama (dim 512, 8 layers, 8 heads, 4 key/value heads, ffn 1,536, vocabulary 2,050) is trained on the built-in stories
first; the measured runs start from it, on the built-in conversations: batches of 4 windows of 512 tokens, in bfloat16
unless the option changes it. Each measurement is a separate process, one after the other. Speed is the median over
steps after the first two; memory is the process's peak resident set (on CUDA: peak reserved); `state` is
the memory between steps, for weights and optimizer state; the loss is on held-out conversations after the last step.

Then the memory of one GPU for Llama 3.1 8B: the peak of a step with full activation checkpointing, by a dry run
(docs/dry_run.md).
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536}
WARMUP_STEPS = 2
GIB = 2**30


def full(config: Any) -> None:
    """Train all weights."""


def float32(config: Any) -> None:
    config.training.mixed_precision_param = "float32"


def recompute(config: Any) -> None:
    config.activation_checkpoint.mode = "full"


def float8(config: Any) -> None:
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    config.model_converters = [Float8LinearConverter.Config(emulate=True, min_features=16)]


def qat(config: Any) -> None:
    from torchtitan.components.quantization.qat import QAT

    config.model_converters = [QAT.Config()]


def adapters(converter: Any) -> Callable[[Any], None]:
    """Train only adapters, at their own learning rate."""

    def apply(config: Any) -> None:
        config.model_converters = [converter()]
        config.optimizer = dataclasses.replace(config.optimizer, lr=5e-3, weight_decay=0.0, param_groups={})

    return apply


def lora_config() -> Any:
    from torchtitan.components.peft import LoRA

    return LoRA.Config()


def dora_config() -> Any:
    return dataclasses.replace(lora_config(), dora=True)


def qlora_config() -> Any:
    from torchtitan.components.peft import QLoRA

    return QLoRA.Config()


LEVERS: dict[str, Callable[[Any], None]] = {
    "full, float32": float32,
    "full": full,
    "full, recomputing": recompute,
    "float8, emulated": float8,
    "qat": qat,
    "lora": adapters(lora_config),
    "dora": adapters(dora_config),
    "qlora": adapters(qlora_config),
}


def sized(config: Any) -> Any:
    """Return `config` with the measured model."""
    spec = config.model_spec
    return dataclasses.replace(
        config, model_spec=dataclasses.replace(spec, model=dataclasses.replace(spec.model, **SIZES))
    )


def train_base(folder: Path, steps: int) -> None:
    """Train the model that the measurements start from, and save it in `folder`."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = sized(llama3_debugmodel())
    config.dump_folder, config.validator.enable, config.training.steps = str(folder), False, steps
    config.training.mixed_precision_param = "bfloat16"
    config.optimizer.lr = 1e-3
    config.checkpoint = CheckpointManager.Config(enable=True, interval=steps, last_save_model_only=True)
    trainer = config.build()
    trainer.train()
    trainer.close()


def measure(lever: str, base: str, steps: int) -> dict[str, float]:
    """Fine-tune with an option in this process; return the measurements."""
    import torch

    from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft
    from torchtitan.tools.device import device_type, memory_gib

    marks: list[float] = []
    config = sized(llama3_debugmodel_sft())
    config.training.mixed_precision_param = "bfloat16"
    config.training.steps = config.validator.freq = steps
    config.validator.at_start = True
    config.optimizer.lr = 5e-4
    config.checkpoint.initial_load_path = base
    LEVERS[lever](config)

    class TimedTrainer(config._owner):  # type: ignore[name-defined,misc]
        """Records the start time of each step."""

        def train_step(self, batches):
            marks.append(time.perf_counter())
            return super().train_step(batches)

    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        trainer = TimedTrainer(config)
        trainer.train()
        trainer.close()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    seconds = [later - earlier for earlier, later in zip(marks, marks[1:], strict=False)][WARMUP_STEPS:]
    held = [p for part in trainer.model_parts for p in part.parameters()]
    states = [v for o in trainer.optimizer.optimizers for state in o.state.values() for v in state.values()]
    held += [value for value in states if isinstance(value, torch.Tensor)]
    return {
        "trained": trainer.num_trained / trainer.num_parameters,
        "state": sum(tensor.nbytes for tensor in held) / GIB,
        "memory": memory_gib(torch.device(device_type())),
        "speed": trainer.tokens_per_step / statistics.median(seconds),
        "before": losses[0],
        "loss": losses[-1],
    }


def dry_run_8b(name: str) -> dict[str, float]:
    """Return the memory of one GPU for a step of a configuration of Llama 3.1 8B."""
    import torchtitan.models.llama3.config_registry as configurations
    from torchtitan.dry_run import dry_run

    config = getattr(configurations, f"llama3_8b_{name}")()
    config.model_spec.model.vocab_size = 128256
    config.dataloader.dataset = ["chats"]  # a placeholder; no data is read
    config.training.local_batch_size, config.activation_checkpoint.mode = 1, "full"
    (rank,) = dry_run(config, world_size=1)
    return {"weights": rank.parameter_bytes / GIB, "peak": rank.peak_bytes / GIB}


def in_process(*words: str) -> Any:
    """Call this script with `words`; return the JSON of its last line."""
    command = [sys.executable, __file__, *words]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each measurement")
    parser.add_argument("--base_steps", type=int, default=80, help="of the model that they start from")
    parser.add_argument("--only", nargs="+", choices=list(LEVERS), default=list(LEVERS), help="which levers")
    parser.add_argument("--measure", nargs=2, metavar=("LEVER", "BASE"), help=argparse.SUPPRESS)
    parser.add_argument("--dry_run_8b", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure, options.steps)))
        return
    if options.dry_run_8b:
        print(json.dumps(dry_run_8b(options.dry_run_8b)))
        return
    if options.base:
        train_base(options.base, options.base_steps)
        print("{}")
        return
    with tempfile.TemporaryDirectory() as folder:
        in_process("--base", folder, "--base_steps", str(options.base_steps))
        base = f"{folder}/checkpoint/step-{options.base_steps}"
        print("| lever | trained | state, GiB | memory, GiB | tokens/s | held-out loss |\n|---|---|---|---|---|---|")
        for lever in options.only:
            row = in_process("--measure", lever, base, "--steps", str(options.steps))
            if lever == options.only[0]:
                print(f"| before | | | | | {row['before']:.3f} |")
            numbers = f"{row['state']:.2f} | {row['memory']:.2f} | {row['speed']:,.0f} | {row['loss']:.3f}"
            print(f"| {lever} | {row['trained']:.1%} | {numbers} |", flush=True)
    print("\n| Llama 3.1 8B, one GPU | weights, GiB | peak of a step, GiB |\n|---|---|---|")
    for name in ("sft", "lora", "qlora"):
        row = in_process("--dry_run_8b", name)
        print(f"| {name} | {row['weights']:.1f} | {row['peak']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
