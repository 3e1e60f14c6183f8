"""Run litgpt's pre-training on the task in a folder."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import litgpt
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.pretrain import setup
from task import BETAS, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, StepLog, Task
from torch.utils.data import DataLoader, IterableDataset


class Windows(IterableDataset):
    """Windows of random ids. As litgpt asks for the first window of a step, the previous step has
    ended."""

    def __init__(self, task: Task, log: StepLog):
        self.task, self.log = task, log

    def __iter__(self) -> Iterator[torch.Tensor]:
        task = self.task
        windows = torch.randint(task.vocab_size, (task.steps * task.batch_size, task.seq_len + 1))
        for step in range(task.steps + 1):
            if step:
                self.log.end_step(
                    time.monotonic(), task.batch_size * task.seq_len, task.batch_size * task.seq_len
                )
            if step == task.steps:
                # without validation and a last checkpoint, which other systems do not have
                os._exit(0)
            yield from windows[step * task.batch_size : (step + 1) * task.batch_size]


class Data(litgpt.data.DataModule):
    """The windows, for litgpt."""

    def __init__(self, task: Task, log: StepLog):
        self.task, self.log = task, log

    def connect(
        self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Windows(self.task, self.log), batch_size=self.task.batch_size)

    val_dataloader = train_dataloader


def main(folder: str) -> None:
    task = Task.read(folder)
    setup(
        model_name="benchmark",
        model_config=litgpt.Config(
            name="benchmark",
            block_size=task.seq_len,
            vocab_size=task.vocab_size,
            padded_vocab_size=task.vocab_size,
            n_layer=task.widths["n_layers"],
            n_embd=task.widths["dim"],
            n_head=task.widths["n_heads"],
            n_query_groups=task.widths["n_kv_heads"],
            intermediate_size=task.widths["ffn_dim"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        ),
        out_dir=Path(folder) / "out",
        precision="bf16-mixed" if task.precision == "bfloat16" else "32-true",
        data=Data(task, StepLog(folder)),
        train=TrainArgs(
            global_batch_size=task.batch_size,
            micro_batch_size=task.batch_size,
            # One step more: the end of a step is known when the next one begins.
            max_tokens=(task.steps + 1) * task.batch_size * task.seq_len,
            max_norm=MAX_NORM,
            lr_warmup_steps=0,
        ),
        eval=EvalArgs(initial_validation=False, final_validation=False),
        optimizer={
            "class_path": "torch.optim.AdamW",
            "init_args": {
                "lr": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "betas": list(BETAS),
                "fused": True,
            },
        },
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    main(sys.argv[1])
