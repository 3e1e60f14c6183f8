"""Entry point of the command `torchtitan`."""

import sys
from collections.abc import Sequence

from torchtitan.tools.signals import default_signals

_USAGE = """usage: torchtitan COMMAND [options]

commands:
  train   train a model (torchtitan train --module llama3 --config debugmodel; --help lists every option)
  ls      list modules, their configurations and flavors
  new     start an experiment, or a training script of your own

`torchtitan COMMAND --help` explains a command."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the sub-command that the command line names; its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    command = words[0] if words else "--help"
    with default_signals():
        return _run(command, words[1:])


def _run(command: str, args: list[str]) -> int:
    # Imported on demand: `ls` needs no torch, and answers at once.
    if command == "train":
        from torchtitan.cli.train import train

        return train(args)
    if command == "ls":
        from torchtitan.cli.ls import ls

        return ls(args)
    if command == "new":
        from torchtitan.cli.new import new

        return new(args)
    if command in ("-h", "--help"):
        print(_USAGE)
        return 0
    from torchtitan.config.registry import suggest

    commands = ("train", "ls", "new")
    hint = f"{suggest(command, commands)} (there are: {', '.join(commands)})"
    print(f"torchtitan: unknown command '{command}'{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
