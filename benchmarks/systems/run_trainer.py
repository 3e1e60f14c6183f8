"""Run transformers' Trainer on the task in a folder; fine-tuning pads each micro-batch to its
longest sample."""

import sys
from typing import Any

import transformers
from hugging_face import (
    END_OF_TEXT,
    make_model,
    make_tokenizer,
    random_windows,
    read_rows,
    train,
    training_arguments,
)
from task import Task

MICRO_BATCHES = 7
"""Micro-batches in a step of fine-tuning: 4 samples of GSM8K have about a seventh of the tokens in
4 packed windows."""


def main(folder: str) -> None:
    task = Task.read(folder)
    if task.kind == "pretrain":
        rows = [{"input_ids": window, "labels": window} for window in random_windows(task)]
        arguments = transformers.TrainingArguments(**training_arguments(task, folder))
        collator = transformers.default_data_collator
    else:
        tokenizer = make_tokenizer(task)
        rows = [encode(tokenizer, *row) for row in read_rows(task)]
        arguments = transformers.TrainingArguments(
            **training_arguments(task, folder, MICRO_BATCHES)
        )
        collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    trainer = transformers.Trainer(
        model=make_model(task), args=arguments, train_dataset=rows, data_collator=collator
    )
    train(trainer, folder, count)


def encode(tokenizer: Any, prompt: str, completion: str) -> dict[str, list[int]]:
    """Return a sample whose labels are the completion's tokens."""
    prompt_ids, completion_ids = tokenizer([prompt, completion + END_OF_TEXT])["input_ids"]
    return {
        "input_ids": prompt_ids + completion_ids,
        "labels": [-100] * len(prompt_ids) + completion_ids,
    }


def count(batch: dict[str, Any]) -> tuple[int, int]:
    if "attention_mask" not in batch:  # windows full of text
        return batch["input_ids"].numel(), batch["labels"].numel()
    return int((batch["attention_mask"].sum(1) - 1).sum()), int((batch["labels"] != -100).sum())


if __name__ == "__main__":
    main(sys.argv[1])
