"""Entry point of the `torchtitan` command."""

import importlib
import sys
from collections.abc import Sequence

import torchtitan
from torchtitan.tools.logging import presentable
from torchtitan.tools.process import default_signals

# Imported on demand: `ls`, for example, does not import torch.
COMMANDS = {
    "train": (
        "train:train",
        "train a model (torchtitan train --module llama3 --config debugmodel; --help lists every "
        "option)",
    ),
    "plan": (
        "plan:plan",
        "find the best layout of a run on given devices (torchtitan plan --devices 256 --device "
        "h100)",
    ),
    "ladder": (
        "ladder:ladder",
        "train small models of several sizes, fit their loss, and forecast a larger run",
    ),
    "mixture": (
        "mixture:mixture",
        "train small models on mixtures of datasets, fit their loss, and propose a mixture",
    ),
    "run": ("run:run", "run the stages of a recipe, such as recipes/tiny_assistant.yaml"),
    "generate": ("generate:generate", "continue a text with the model of a checkpoint"),
    "chat": ("generate:chat", "talk to the model of a checkpoint"),
    "serve": ("serve:serve", "answer OpenAI's API with the model of a checkpoint"),
    "eval": (
        "evaluate:evaluate",
        "evaluate the model of a checkpoint on questions, texts or lm-eval tasks",
    ),
    "data": (
        "data:data",
        "prepare data ahead of a run (data prepare), or show it (data inspect, data show)",
    ),
    "tokenizer": (
        "tokenizer:tokenizer",
        "train a tokenizer on your data (tokenizer train), and compare it with others",
    ),
    "inspect": (
        "inspect_checkpoint:inspect_checkpoint",
        "show the contents of a checkpoint, and verify it",
    ),
    "convert": ("convert:convert", "write a checkpoint in another format (hf, meta, dcp, gguf)"),
    "doctor": ("doctor:doctor", "check the hosts of a run before it starts"),
    "download": ("download:download", "download a model from the Hugging Face Hub"),
    "push": ("push:push", "upload a model to the Hugging Face Hub, with a card about its run"),
    "report": (
        "report:report",
        "write a page about runs: curves, time, incidents, configuration (or --text)",
    ),
    "ls": ("ls:ls", "list modules, their configurations and flavors"),
    "migrate": (
        "migrate:migrate",
        "rewrite a configuration of torchtune, axolotl, TRL, LLaMA-Factory, litgpt or torchtitan",
    ),
    "new": ("new:new", "create an experiment, a training script or a recipe"),
}

_USAGE = "\n".join(
    [
        "usage: torchtitan COMMAND [options]\n\ncommands:",
        *(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items()),
        "\n`torchtitan COMMAND --help` explains a command; `torchtitan --version` prints the "
        "version.",
    ]
)


_TRAIN_COMMANDS = ("finetune", "finetune_full", "finetune_lora", "sft", "pretrain", "tune", "dpo")
_COMMANDS_ELSEWHERE = {
    **dict.fromkeys(_TRAIN_COMMANDS, "train --module M --config C; `torchtitan ls` lists them"),
    "grpo": "train --module rl --config grpo",
    "rlhf": "train --module rl --config grpo, or --module preference",
    "api": "serve",
    "evaluate": "eval",
    "export": "convert --to",
    "infer": "generate",
    "inference": "generate",
    **dict.fromkeys(("axolotl", "llamafactory_cli", "litgpt"), "migrate FILE, for its file"),
    "fetch": "new --recipes, which lists ready files",
    "lm_eval": "eval --tasks",
    "merge": "convert --merge",
    "merge_sharded_fsdp_weights": "convert --to hf",
    "merge_lora": "convert, which merges an adapter into its --base",
    "preprocess": "data",
    "quantize": "convert --to",
    "vllm_serve": "serve",
    "webchat": "serve",
}
"""Command of another library → ours."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the named subcommand and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    name = words[0] if words else "--help"
    if "--list" in words and name in ("--list", "train"):
        name, words = "ls", ["ls"]
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        with default_signals():
            code: int = getattr(importlib.import_module(f"torchtitan.cli.{module}"), function)(
                words[1:]
            )
            return code
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name == "--version":
        print(f"torchtitan {torchtitan.__version__}")
        return 0
    from torchtitan.tools.errors import suggest

    known = _COMMANDS_ELSEWHERE.get(name.replace("-", "_"))
    if name.endswith((".yml", ".yaml", ".toml")):
        known = f"train --config_file {name}, or for a file of another library migrate {name}"
    meant = f"; use torchtitan {known}" if known else suggest(name, COMMANDS)
    message = f"unknown command '{name}'{meant} (there are: {', '.join(COMMANDS)})"
    print(presentable(f"torchtitan: {message}"), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
