"""The model, data and training arguments that the programs for transformers and TRL share."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from task import BETAS, LEARNING_RATE, MAX_NORM, NEW_TOKENS, WEIGHT_DECAY, StepLog, Task

END_OF_TEXT = "<|endoftext|>"


def make_model(task: Task) -> transformers.PreTrainedModel:
    """Return the model with random weights in float32."""
    if task.model:
        config = transformers.AutoConfig.for_model(**task.document, use_cache=False)
        return transformers.AutoModelForCausalLM.from_config(config)
    config = transformers.LlamaConfig(
        vocab_size=task.vocab_size,
        hidden_size=task.widths["dim"],
        intermediate_size=task.widths["ffn_dim"],
        num_hidden_layers=task.widths["n_layers"],
        num_attention_heads=task.widths["n_heads"],
        num_key_value_heads=task.widths["n_kv_heads"],
        max_position_embeddings=task.seq_len + NEW_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def random_windows(task: Task) -> list[torch.Tensor]:
    """Return windows of random ids, for all steps."""
    return list(torch.randint(task.vocab_size, (task.steps * task.batch_size, task.seq_len)))


def read_rows(task: Task) -> list[tuple[str, str]]:
    """Return prompts and completions, rendered as by `question_answer.jinja`; the completion lacks
    its final token."""
    rows = map(json.loads, Path(task.data).read_text().splitlines())
    return [(f"{row['question']}\n", row["answer"]) for row in rows]


def make_tokenizer(task: Task) -> transformers.PreTrainedTokenizerFast:
    """Return the task's tokenizer, or an empty one to pre-train on ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if task.kind != "pretrain":
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(task.tokenizer) / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def training_arguments(task: Task, folder: str, micro_batches: int = 1) -> dict[str, Any]:
    """Return the arguments of transformers' Trainer, as its page on CPUs recommends: `use_cpu`, and
    `bf16` for mixed precision. Optimizer and clipping are the same in all systems."""
    return dict(
        output_dir=folder,
        max_steps=task.steps,
        per_device_train_batch_size=task.batch_size,
        gradient_accumulation_steps=micro_batches,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=MAX_NORM,
        optim="adamw_torch_fused",
        bf16=task.precision == "bfloat16",
        use_cpu=True,
        torch_compile=task.compile,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def train(
    trainer: transformers.Trainer, folder: str, count: Callable[[dict[str, Any]], tuple[int, int]]
) -> None:
    """Train, and log each step. `count` returns the useful tokens and the labels of a
    micro-batch."""
    log, collate, counts = StepLog(folder), trainer.data_collator, []

    def counting_collator(rows: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(rows)
        counts.append(count(batch))
        return batch

    class Steps(transformers.TrainerCallback):
        """Log the end of each step with its useful tokens and labels."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            ended = time.monotonic()
            # By number: the Trainer loads batches ahead.
            n = args.gradient_accumulation_steps
            of_step = counts[(state.global_step - 1) * n : state.global_step * n]
            log.end_step(ended, *map(sum, zip(*of_step, strict=True)))

    trainer.data_collator = counting_collator
    trainer.add_callback(Steps())
    trainer.train()
