"""Run TRL's SFTTrainer, DPOTrainer or GRPOTrainer on the task in a folder; SFTTrainer packs
samples, with its default strategy."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import transformers
import trl
from hugging_face import (
    make_model,
    make_tokenizer,
    random_windows,
    read_rows,
    train,
    training_arguments,
)
from task import GROUP_SIZE, NEW_TOKENS, StepLog, Task


def main(folder: str) -> None:
    task = Task.read(folder)
    if task.kind == "dpo":
        train_on_pairs(task, folder)
        return
    if task.kind == "grpo":
        train_on_samples(task, folder)
        return
    if task.kind == "pretrain":
        rows = [{"input_ids": window.tolist()} for window in random_windows(task)]
    else:
        rows = [
            {"prompt": prompt, "completion": completion} for prompt, completion in read_rows(task)
        ]
    arguments = training_arguments(task, folder) | {
        "max_length": task.seq_len,
        "packing": task.kind == "sft",
        # On by default; it would save memory at the cost of time.
        "gradient_checkpointing": False,
    }
    trainer = trl.SFTTrainer(
        model=make_model(task),
        args=trl.SFTConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=make_tokenizer(task),
    )
    train(trainer, folder, count)


def train_on_pairs(task: Task, folder: str) -> None:
    """Train as DPOTrainer's page shows: the model is a folder, and TRL loads it again as the
    reference."""
    make_model(task).save_pretrained(f"{folder}/model")
    rows = [json.loads(line) for line in Path(task.data).read_text().splitlines()]
    arguments = training_arguments(task, folder) | {
        "max_length": task.seq_len,
        "gradient_checkpointing": task.checkpointing,
        "model_init_kwargs": {"dtype": "float32"},
    }
    trainer = trl.DPOTrainer(
        model=f"{folder}/model",
        args=trl.DPOConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(
            [{**row, "prompt": f"{row['prompt']}\n"} for row in rows]
        ),
        processing_class=make_tokenizer(task),
    )
    train(trainer, folder, count_pairs)


def train_on_samples(task: Task, folder: str) -> None:
    """Train as GRPOTrainer's page shows, sampling with transformers and its key/value cache; no
    text ends early."""
    model = make_model(task)
    model.config.use_cache = model.generation_config.use_cache = True
    model.save_pretrained(f"{folder}/model")
    arguments = training_arguments(task, folder) | {
        "per_device_train_batch_size": task.batch_size * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": NEW_TOKENS,
        "gradient_checkpointing": task.checkpointing,
        "model_init_kwargs": {"dtype": "float32"},
    }
    prompts = [json.loads(line)["prompt"] for line in Path(task.data).read_text().splitlines()]
    n_tokens: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        n_tokens.append(sum(map(len, completion_ids)))
        return [max(0.0, 1 - abs(len(text) / 500 - 1)) for text in completions]

    trainer = trl.GRPOTrainer(
        model=f"{folder}/model",
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{prompt}\n"} for prompt in prompts]),
        processing_class=make_tokenizer(task),
    )
    log = StepLog(folder)

    class Steps(transformers.TrainerCallback):
        """Log the end of each step with its sampled tokens and samples."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            log.end_step(time.monotonic(), n_tokens[-1], task.batch_size * GROUP_SIZE)

    trainer.add_callback(Steps())
    trainer.train()


def count_pairs(batch: dict[str, Any]) -> tuple[int, int]:
    return int((batch["attention_mask"].sum(1) - 1).sum()), int(batch["completion_mask"].sum())


def count(batch: dict[str, Any]) -> tuple[int, int]:
    labels = int((batch["labels"] != -100).sum())
    if "position_ids" not in batch:  # windows full of text
        return batch["input_ids"].numel(), labels
    return batch["input_ids"].numel() - int((batch["position_ids"] == 0).sum()), labels


if __name__ == "__main__":
    main(sys.argv[1])
