"""Memory, speed and held-out loss of each option for fine-tuning, in one run on one machine.

    python benchmarks/levers.py [--steps 40] [--base_steps 80] [--only lora qlora]

A Llama (dim 512, 8 layers, 8 heads, 4 key/value heads, ffn 1,536, vocabulary 2,050) is trained on
the built-in stories first; the measured runs start from it, on the built-in conversations: batches
of 4 windows of 512 tokens, in bfloat16 unless the option changes it. Each measurement is a separate
process, one after the other. Speed is the median over steps after the first two; memory is the
process's peak resident set (on CUDA: peak reserved); `state` is the memory between steps, for
weights and optimizer state; the loss is on held-out conversations after the last step.

Then the memory of one GPU for Llama 3.1 8B: the peak of a step with full activation checkpointing,
by a dry run (docs/dry_run.md).
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import torchtitan.models.llama3.config_registry as configurations
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.qat import QAT
from torchtitan.dry_run import dry_run
from torchtitan.tools.device import device_type, memory_gib

SIZES = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536}
WARMUP_STEPS = 2
GIB = 2**30


Lever = Callable[[Any], None]
"""Changes a configuration."""


def float32(config: Any) -> None:
    config.training.mixed_precision_param = "float32"


def recompute(config: Any) -> None:
    config.activation_checkpoint.mode = "full"


def converting(converter: Any) -> Lever:
    """Return the lever that converts layers."""

    def apply(config: Any) -> None:
        config.model_converters = [converter]

    return apply


def adapters(converter: Any) -> Lever:
    """Return the lever that trains only adapters, at their own learning rate."""

    def apply(config: Any) -> None:
        config.model_converters = [converter]
        config.optimizer = dataclasses.replace(
            config.optimizer, lr=5e-3, weight_decay=0.0, param_groups={}
        )

    return apply


LEVERS: dict[str, Lever] = {
    "full, float32": float32,
    "full": lambda config: None,
    "full, recomputing": recompute,
    "float8, emulated": converting(Float8LinearConverter.Config(emulate=True, min_features=16)),
    "qat": converting(QAT.Config()),
    "lora": adapters(LoRA.Config()),
    "dora": adapters(LoRA.Config(dora=True)),
    "qlora": adapters(QLoRA.Config()),
}


def sized(config: Any) -> Any:
    """Return `config` with the measured model."""
    spec = config.model_spec
    return dataclasses.replace(
        config, model_spec=dataclasses.replace(spec, model=dataclasses.replace(spec.model, **SIZES))
    )


def train_base(folder: str, steps: int) -> None:
    """Train the model that the measurements start from, and save it in `folder`."""
    config = sized(configurations.llama3_debugmodel())
    config.dump_folder, config.validator.enable, config.training.steps = folder, False, steps
    config.training.mixed_precision_param = "bfloat16"
    config.optimizer.lr = 1e-3
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=steps, last_save_model_only=True
    )
    trainer = config.build()
    trainer.train()
    trainer.close()


def measure(lever: str, base: str, steps: int) -> dict[str, float]:
    """Fine-tune with an option in this process; return the measurements."""
    config = sized(configurations.llama3_debugmodel_sft())
    config.training.mixed_precision_param = "bfloat16"
    config.training.steps = config.validator.freq = steps
    config.validator.at_start, config.metrics.log_freq = True, 1
    config.optimizer.lr = 5e-4
    config.checkpoint.initial_load_path = base
    LEVERS[lever](config)
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        trainer = config.build()
        trainer.train()
        trainer.close()
        lines = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    seconds = [line["step_time"] for line in lines if "step_time" in line][WARMUP_STEPS:]
    held = [p for part in trainer.model_parts for p in part.parameters()]
    states = [
        v
        for o in trainer.optimizer.optimizers
        for state in o.state.values()
        for v in state.values()
    ]
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
    config = getattr(configurations, f"llama3_8b_{name}")()
    config.model_spec.model.vocab_size = 128256
    config.dataloader.dataset = ["chats"]  # a placeholder; no data is read
    config.training.local_batch_size, config.activation_checkpoint.mode = 1, "full"
    (rank,) = dry_run(config, world_size=1)
    return {"weights": rank.parameter_bytes / GIB, "peak": rank.peak_bytes / GIB}


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, called in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each measurement")
    parser.add_argument(
        "--base_steps", type=int, default=80, help="of the model that they start from"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(LEVERS), default=list(LEVERS), help="which levers"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        in_process(train_base, folder, options.base_steps)
        base = f"{folder}/checkpoint/step-{options.base_steps}"
        print(
            "| lever | trained | state, GiB | memory, GiB | tokens/s | held-out loss "
            "|\n|---|---|---|---|---|---|"
        )
        for lever in options.only:
            row = in_process(measure, lever, base, options.steps)
            if lever == options.only[0]:
                print(f"| before | | | | | {row['before']:.3f} |")
            numbers = (
                f"{row['state']:.2f} | {row['memory']:.2f} | {row['speed']:,.0f} | "
                f"{row['loss']:.3f}"
            )
            print(f"| {lever} | {row['trained']:.1%} | {numbers} |", flush=True)
    print("\n| Llama 3.1 8B, one GPU | weights, GiB | peak of a step, GiB |\n|---|---|---|")
    for name in ("sft", "lora", "qlora"):
        row = in_process(dry_run_8b, name)
        print(f"| {name} | {row['weights']:.1f} | {row['peak']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
