"""Options and exit codes shared by subcommands, and the model of a checkpoint that some of them
load."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.tools.errors import RunFailure, UserError, of_wrong_path
from torchtitan.tools.logging import init_logger, print_error

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

    from torchtitan.components.generation import Sampling
    from torchtitan.components.tokenizer import Tokenizer


class OpenedModel(NamedTuple):
    """A loaded model, its tokenizer and folders."""

    model: "nn.Module"
    tokenizer: "Tokenizer"
    folders: tuple[Path, ...]
    """Searched in order for a chat template and generation_config.json: the model's folder, then
    the tokenizer's."""
    context: int
    """Maximum tokens in the attention context."""


def add_chat_template_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat_template",
        default="",
        metavar="NAME|FILE",
        help="chat template: chatml, llama3, mistral, alpaca, or a Jinja file (default: the "
        "checkpoint's)",
    )


def add_model_options(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the options that `open_model` reads. `more`: other values of `--checkpoint`."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="PATH",
        help="checkpoint of a run (folder step-N), or a model in Hugging Face or Meta format"
        + more,
    )
    add_base_option(group, "--checkpoint")
    add_module_option(group)
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the tokenizer (default: the checkpoint; its stop tokens and chat template "
        "are always used)",
    )
    group.add_argument(
        "--device",
        choices=["cpu", "cuda", "mps"],
        help="device to use (default: the GPU, if available)",
    )
    group.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="type of the weights and the computation (default: bfloat16 on CUDA if it is fast "
        "there, otherwise the "
        "type of the stored weights)",
    )


def add_base_option(group: "argparse._ActionsContainer", checkpoint: str) -> None:
    """Add `--base`, for the checkpoint that the argument `checkpoint` names."""
    group.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help=f"folder of the base model if {checkpoint} contains only trained weights "
        "(--checkpoint.save_trainable_only; default: the base model of the run)",
    )


def add_module_option(group: "argparse._ActionsContainer") -> None:
    """Add `--module`, which `import_given_package` reads."""
    group.add_argument(
        "--module",
        metavar="MODULE",
        help="package of the model's family or converters, if neither built in nor installed",
    )


def import_given_package(options: argparse.Namespace) -> "ModuleType | None":
    """Return the package that `--module` names, if any. Raise `UserError` if it cannot be
    imported."""
    from torchtitan.config.registry import import_package

    return import_package(options.module) if options.module else None


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add `--max_new_tokens`, `--stop`, and the options that `sampling_of` reads."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max_new_tokens", type=int, default=200, metavar="N", help="maximum tokens (default: 200)"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="randomness: less below 1, more above 1; 0 (default): always the most probable token",
    )
    group.add_argument(
        "--top_k", type=int, metavar="K", help="sample from the K most probable tokens"
    )
    group.add_argument(
        "--top_p",
        type=float,
        metavar="P",
        help="sample from the most probable tokens with a total probability of P",
    )
    group.add_argument(
        "--min_p",
        type=float,
        metavar="P",
        help="sample from the tokens with at least P times the largest probability",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )


def sampling_of(options: argparse.Namespace) -> "Sampling":
    """Return the sampling options. Raise `UserError` for an unusable value."""
    from torchtitan.components.generation import Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )
    sampling.validate()
    return sampling


def open_model(options: argparse.Namespace) -> OpenedModel:
    """Load the model that the options name, which the command has checked (`check_checkpoint`).
    Raise `UserError` if it is not a model."""
    import torch

    from torchtitan.components.tokenizer import PretrainedTokenizer
    from torchtitan.models.pretrained import load_model
    from torchtitan.tools.device import device_type

    device = torch.device(options.device or device_type())
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but no GPU is available")
    is_fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = options.dtype or ("bfloat16" if is_fast else None)
    dtype = getattr(torch, chosen) if chosen else None
    family = import_given_package(options)
    loaded = load_model(
        options.checkpoint, device=device, dtype=dtype, base=options.base, family=family
    )
    if loaded.spec.model.scores:
        raise UserError(
            f"{options.checkpoint} is a reward model, which predicts no text; choose another model"
        )
    folder: Path = options.tokenizer or loaded.tokenizer_path
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    vocabulary = loaded.spec.model.vocab_size
    if vocabulary is not None and tokenizer.vocab_size > vocabulary:
        raise UserError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but the model only "
            f"{vocabulary}; set --tokenizer to the model's tokenizer"
        )
    folders = tuple(dict.fromkeys((loaded.tokenizer_path, folder)))
    return OpenedModel(loaded.model, tokenizer, folders, loaded.spec.model.max_seq_len)


def run_command(
    command: str, run: Callable[[], int | None], *, checkpoint: Path | None = None, option: str = ""
) -> int:
    """Call `run` and return its exit code. Print the message of a user's mistake (2) or a failure
    (3). `checkpoint`, the value of `option`, must be a checkpoint: another folder is refused before
    torch is imported."""
    init_logger()
    try:
        if checkpoint is not None:
            from torchtitan.components.checkpoint.formats import check_checkpoint

            check_checkpoint(checkpoint, option)
        return run() or 0
    except (UserError, RunFailure, OSError, ValueError) as raised:
        error = of_wrong_path(raised)
        if not isinstance(error, (UserError, RunFailure)):
            raise
        print_error(command, error)
        return 2 if isinstance(error, UserError) else 3
