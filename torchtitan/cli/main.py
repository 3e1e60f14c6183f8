"""Entry point of the command `torchtitan`."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torchtitan
from torchtitan.tools.logging import visible
from torchtitan.tools.process import default_signals


class _Command(NamedTuple):
    function: str  # "module:name"; imported on demand, since `ls`, for one, needs no torch and answers at once
    summary: str


_COMMANDS = {
    "train": _Command(
        "train:train", "train a model (torchtitan train --module llama3 --config debugmodel; --help lists every option)"
    ),
    "generate": _Command("generate:generate", "continue a text with the model of a checkpoint"),
    "chat": _Command("chat:chat", "talk to the model of a checkpoint"),
    "eval": _Command("evaluate:evaluate", "measure the model of a checkpoint on questions, on a text, or by lm-eval"),
    "data": _Command("data:data", "look at what a configuration trains on (data inspect), or a step did (data show)"),
    "inspect": _Command(
        "inspect_checkpoint:inspect_checkpoint", "say what a checkpoint holds, and whether it is whole"
    ),
    "convert": _Command("convert:convert", "write a checkpoint in another format (hf, meta, dcp)"),
    "download": _Command("download:download", "fetch a model's files from the Hugging Face hub"),
    "ls": _Command("ls:ls", "list modules, their configurations and flavors"),
    "new": _Command("new:new", "start an experiment, or a training script of your own"),
}

_USAGE = "\n".join(
    [
        "usage: torchtitan COMMAND [options]\n\ncommands:",
        *(f"  {name:<10}{command.summary}" for name, command in _COMMANDS.items()),
        "\n`torchtitan COMMAND --help` explains a command, `torchtitan --version` says which version this is.",
    ]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the sub-command that the command line names; its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    name = words[0] if words else "--help"
    if "--list" in words and name in ("--list", "train"):
        name, words = "ls", ["ls"]
    with default_signals():
        if name in _COMMANDS:
            return _function(_COMMANDS[name])(words[1:])
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name == "--version":
        print(f"torchtitan {torchtitan.__version__}")
        return 0
    from torchtitan.config.registry import suggest

    message = f"unknown command '{name}'{suggest(name, _COMMANDS)} (there are: {', '.join(_COMMANDS)})"
    print(visible(f"torchtitan: {message}"), file=sys.stderr)
    return 2


def _function(command: _Command) -> Callable[[Sequence[str]], int]:
    module, _, name = command.function.partition(":")
    function: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"torchtitan.cli.{module}"), name)
    return function


if __name__ == "__main__":
    sys.exit(main())
