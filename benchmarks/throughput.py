"""Training speed and memory of this project against transformers' `Trainer`, in one run on one machine.

    python benchmarks/throughput.py [--precisions float32 bfloat16] [--rounds 2] [--steps 10]

Both train the same Llama (dim 512, 8 layers, 8 heads, 4 key/value heads, ffn 1,536, vocabulary 8,192, sequence 512,
batch 4) with AdamW (fused), gradient clipping and, for bfloat16, autocast over float32 weights. Each measurement is a
separate process, and the two projects take turns, so that a change in the machine's load hits both. Speed is the
median over steps after the first two; memory is the process's peak resident set (on CUDA: peak reserved).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536, "vocab_size": 8192}
SEQ_LEN, BATCH_SIZE, WARMUP_STEPS = 512, 4, 2
PROJECTS = ("torchtitan", "transformers")


def train_torchtitan(precision: str, steps: int, folder: str) -> list[float]:
    """Return the seconds of each step in this project."""
    from torchtitan.components.data.dataloader import PretrainDataLoader
    from torchtitan.config import TrainingConfig
    from torchtitan.models.common.rope import RoPEConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.trainer import Trainer

    marks: list[float] = []

    class TimedTrainer(Trainer):
        def complete_step(self, outcome):
            super().complete_step(outcome)
            marks.append(time.perf_counter())

    spec = model_registry("debugmodel")
    spec.model = Llama3Model.Config(**SIZES, rope=RoPEConfig())
    trainer = TimedTrainer.Config(
        model_spec=spec,
        dump_folder=folder,
        # One document, as in the other project: attention over whole windows.
        dataloader=PretrainDataLoader.Config(document_mask=False),
        training=TrainingConfig(
            steps=steps, seq_len=SEQ_LEN, local_batch_size=BATCH_SIZE, mixed_precision_param=precision
        ),
    ).build()
    trainer.train()
    trainer.close()
    return [later - earlier for earlier, later in zip(marks, marks[1:], strict=False)]


def train_transformers(precision: str, steps: int, folder: str) -> list[float]:
    """Return the seconds of each step in transformers' Trainer."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["dim"],
        intermediate_size=SIZES["ffn_dim"],
        num_hidden_layers=SIZES["n_layers"],
        num_attention_heads=SIZES["n_heads"],
        num_key_value_heads=SIZES["n_kv_heads"],
        use_cache=False,
    )
    marks: list[float] = []

    class Timer(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            marks.append(time.perf_counter())

    tokens = torch.randint(SIZES["vocab_size"], (steps * BATCH_SIZE, SEQ_LEN))
    transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            bf16=precision == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Timer()],
    ).train()
    return [later - earlier for earlier, later in zip(marks, marks[1:], strict=False)]


def measure(project: str, precision: str, steps: int) -> None:
    """Train in this process and print one line of JSON."""
    import torch

    from torchtitan.tools.device import device_type, memory_gib

    train = train_torchtitan if project == "torchtitan" else train_transformers
    with tempfile.TemporaryDirectory() as folder:
        seconds = train(precision, steps, folder)[WARMUP_STEPS - 1 :]
    speed = BATCH_SIZE * SEQ_LEN / statistics.median(seconds)
    memory = memory_gib(torch.device(device_type()))
    print(json.dumps({"tokens_per_second": speed, "memory_gib": memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each project, taking turns")
    parser.add_argument("--steps", type=int, default=10, help="steps of each measurement")
    parser.add_argument("--measure", nargs=2, metavar=("PROJECT", "PRECISION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.steps)
        return
    print(f"{'precision':10} {'project':13} {'tokens/s':>9} {'memory GiB':>11}")
    for precision in options.precisions:
        results: dict[str, list[dict[str, float]]] = {project: [] for project in PROJECTS}
        for _ in range(options.rounds):
            for project in PROJECTS:
                command = [sys.executable, __file__, "--measure", project, precision, "--steps", str(options.steps)]
                output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                results[project].append(json.loads(output.splitlines()[-1]))
        medians = {
            project: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for project, runs in results.items()
        }
        for project, numbers in medians.items():
            print(f"{precision:10} {project:13} {numbers['tokens_per_second']:9.0f} {numbers['memory_gib']:11.2f}")
        ours, theirs = (medians[project] for project in PROJECTS)
        ratios = [ours[key] / theirs[key] for key in ("tokens_per_second", "memory_gib")]
        print(f"{precision:10} {'ratio':13} {ratios[0]:9.2f} {ratios[1]:11.2f}", flush=True)


if __name__ == "__main__":
    main()
