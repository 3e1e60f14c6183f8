"""Run TRL's SFTTrainer or DPOTrainer on the task in a folder; SFTTrainer packs samples, with its default strategy."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import trl
from hugging_face import make_model, make_tokenizer, random_windows, read_rows, train, training_arguments
from task import Task


def main(folder: str) -> None:
    task = Task.read(folder)
    if task.kind == "dpo":
        train_on_pairs(task, folder)
        return
    if task.kind == "pretrain":
        rows = [{"input_ids": window.tolist()} for window in random_windows(task)]
    else:
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in read_rows(task)]
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
    """Train as DPOTrainer's page shows: the model is a folder, of which TRL loads a second copy as the reference."""
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
        train_dataset=datasets.Dataset.from_list([{**row, "prompt": f"{row['prompt']}\n"} for row in rows]),
        processing_class=make_tokenizer(task),
    )
    train(trainer, folder, count_pairs)


def count_pairs(batch: dict[str, Any]) -> tuple[int, int]:
    return int((batch["attention_mask"].sum(1) - 1).sum()), int(batch["completion_mask"].sum())


def count(batch: dict[str, Any]) -> tuple[int, int]:
    labels = int((batch["labels"] != -100).sum())
    if "position_ids" not in batch:  # windows full of text
        return batch["input_ids"].numel(), labels
    return batch["input_ids"].numel() - int((batch["position_ids"] == 0).sum()), labels


if __name__ == "__main__":
    main(sys.argv[1])
