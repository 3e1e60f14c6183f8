"""The interface between `benchmarks/peers.py` and the programs it runs: a task to read, a log of
steps to write."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUP_SIZE, NEW_TOKENS = 8, 128
"""Samples of each prompt in `grpo`, and tokens of each; also the new tokens of `generate`."""

EXPERTS = {"dim": 512, "hidden_dim": 192, "n_experts": 128, "top_k": 8}
"""Sizes of the layer of `experts`."""

WIDTHS = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536}
"""`Task.widths` of all jobs."""

_CLASS = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CLASSES: dict[str, dict[str, Any]] = {
    "qwen3": {**_CLASS, "head_dim": 64},
    "gemma3_text": {**_CLASS, "head_dim": 64, "sliding_window": 256},
    "qwen3_5_text": {
        **_CLASS,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
}
"""model_type → sizes in config.json of the models that torchtitan trains through their class in
transformers."""

LEARNING_RATE, WEIGHT_DECAY, BETAS, MAX_NORM = 8e-4, 0.1, (0.9, 0.95), 1.0
"""Settings of AdamW and gradient clipping in all systems: torchtitan's defaults."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run of one system."""

    kind: str
    """`pretrain` on windows full of text, `sft` on questions and answers, `dpo` on pairs, `grpo` on
    prompts, `generate` after prompts, or compute one layer of `experts`."""

    vocab_size: int
    seq_len: int
    """Tokens in a window, or in a prompt of `generate`."""

    precision: str
    """Type of the computation, `float32` or `bfloat16` over weights in float32."""

    steps: int
    """Steps to take."""

    compile: bool
    """Use torch.compile, in systems that leave the choice to the user."""

    data: str
    """JSON Lines file with the columns `question` and `answer` for `sft`, or `prompt`, `chosen` and
    `rejected`, or `prompt` alone."""

    tokenizer: str
    """Folder with `tokenizer.json`; only `pretrain` needs none."""

    model: str = ""
    """Key of `CLASSES`; empty: the Llama of `widths`."""

    widths: dict[str, int] = field(default_factory=lambda: WIDTHS)
    """Sizes of the model except its vocabulary, under torchtitan's names."""

    batch_size: int = 4
    """Windows that the system processes at once; pairs in `dpo`, prompts in `grpo`."""

    checkpointing: bool = False
    """Recompute activations in the backward pass, in systems that leave the choice to the user."""

    @property
    def document(self) -> dict[str, Any]:
        """Content of config.json of a model in `CLASSES`."""
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return {
            "model_type": self.model,
            **CLASSES[self.model],
            **ids,
            "vocab_size": self.vocab_size,
        }

    @classmethod
    def read(cls, folder: str) -> "Task":
        return cls(**json.loads((Path(folder) / "task.json").read_text()))


class StepLog:
    """`steps.jsonl` in a folder: a line per step, written when the step ends."""

    def __init__(self, folder: str):
        self.path = Path(folder) / "steps.jsonl"

    def end_step(self, time: float, tokens: int, labels: int) -> None:
        """Log the end of a step.

        Args:
            time: `time.monotonic()`, which all processes share.
            tokens: tokens of its batch that have a next token; padding does not count.
            labels: tokens that it trained on.
        """
        with self.path.open("a") as file:
            file.write(json.dumps({"time": time, "tokens": tokens, "labels": labels}) + "\n")
