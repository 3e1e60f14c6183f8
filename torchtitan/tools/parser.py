"""Command lines whose mistakes are reported in one line."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torchtitan.tools.errors import suggest
from torchtitan.tools.logging import presentable

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("model", "model_path", "model_name_or_path", "model_id", "model_dir", "pretrained"),
        ("--checkpoint DIR, a folder with the model",),
    ),
    "model_args": ("--checkpoint DIR, a folder with the model, and --dtype",),
    **dict.fromkeys(
        ("lora", "lora_modules", "lora_path", "enable_lora", "adapter", "peft"),
        ("--adapters NAME=DIR", "--checkpoint DIR, the adapter's folder, and --base"),
    ),
    **dict.fromkeys(("max_num_seqs", "gpu_memory_utilization"), ("--max_rows, texts at a time",)),
    "served_model_name": ("--model_name",),
    **dict.fromkeys(("max_tokens", "max_length", "max_gen_toks"), ("--max_new_tokens",)),
    "prompts": ("--prompt, which may be repeated",),
    "outtype": ("--export_dtype or --quantize",),
    "outfile": ("--to FORMAT INPUT OUTPUT, whose last word is the folder to write",),
}
"""Option of other programs, without dashes → our options. The answer of a command is the first one
whose option it has."""

_NOTHING = {
    **dict.fromkeys(
        ("tensor_parallel_size", "tp", "tensor_parallel", "data_parallel_size"),
        "the model is computed on one device",
    ),
    **dict.fromkeys(
        ("max_model_len", "context_length", "ctx_size"), "the length is the model's own"
    ),
    "trust_remote_code": "a model's code runs with the variable TORCHTITAN_TRUST_REMOTE_CODE=1",
    "quantization": "the numbers are as in the folder, which torchtitan convert quantizes",
}
"""Option of other programs that commands on a checkpoint do not need → why."""


class Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one line, without the usage, and exits with code 2."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse all arguments; name the option nearest to an unknown one."""
        words = sys.argv[1:] if args is None else args
        self._answer_other_names(words)
        options, others = self.parse_known_args(words)
        if others:
            known = re.findall(r"--[\w-]+", self.format_usage())
            self.error(
                f"unrecognized argument {others[0]}{suggest(others[0].partition('=')[0], known)}"
            )
        return options

    def _answer_other_names(self, words: Sequence[str]) -> None:
        """Answer an option of another program with ours, also if a required one is missing."""
        known = re.findall(r"--[\w-]+", self.format_usage())
        for word in words:
            if word == "--":
                return
            option = word.partition("=")[0]
            if not option.startswith("--") or option in known:
                continue
            name = option[2:].replace("-", "_")
            for ours in _OTHER_NAMES.get(name, ()):
                if re.split("[ ,]", ours)[0] in known:
                    self.error(f"unrecognized argument {option}; use {ours}")
            if (why := _NOTHING.get(name)) and "--checkpoint" in known:
                self.error(f"unrecognized argument {option}; leave it out: {why}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, presentable(f"{self.prog}: {message}; see {self.prog} --help") + "\n")
