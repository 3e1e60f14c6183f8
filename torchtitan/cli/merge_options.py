"""Options of `torchtitan convert` that merge several checkpoints of one model."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.tools.errors import UserError, require
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from types import ModuleType

    from torchtitan.components.weights.merge import Merge
    from torchtitan.protocols import ModelSpec
    from torchtitan.protocols.tensor_source import TensorSource

_METHODS = ("linear", "slerp", "ties")

_OF_METHODS = {
    "merge_weights": ("linear", "ties"),
    "origin": ("ties",),
    "density": ("ties",),
    "position": ("slerp",),
}
"""Option → methods that read it."""


def add_merge_options(parser: Parser) -> None:
    """Add the options to the parser of `torchtitan convert`."""
    parser.add_argument(
        "--average",
        nargs="+",
        type=Path,
        metavar="CKPT",
        help="average the weights of INPUT and of these checkpoints of the same model, in "
        "any format; the same as --merge linear --models CKPT ...",
    )
    parser.add_argument(
        "--merge",
        choices=_METHODS,
        help="merge INPUT with --models: weighted mean, spherical interpolation, or TIES",
    )
    parser.add_argument(
        "--models", nargs="+", type=Path, default=[], metavar="CKPT", help="--merge: other models"
    )
    parser.add_argument(
        "--merge_weights",
        nargs="+",
        type=float,
        metavar="W",
        help="linear, ties: weight of INPUT and of each of --models (default: 1 each)",
    )
    parser.add_argument(
        "--origin", type=Path, metavar="CKPT", help="ties: model before fine-tuning"
    )
    parser.add_argument(
        "--density",
        type=float,
        metavar="D",
        help="ties: fraction of each tensor's differences to keep, the largest ones (default: 0.2)",
    )
    parser.add_argument(
        "--position",
        type=float,
        metavar="T",
        help="slerp: position between INPUT (0) and the other model (1) (default: 0.5)",
    )


def check_merge(options: argparse.Namespace) -> None:
    """Raise `UserError` for options that do not fit together; make `--average` a linear merge."""
    if options.average:
        if options.merge or options.models:
            raise UserError("--average cannot be combined with --merge or --models")
        options.merge, options.models = "linear", options.average
    method, n_models = options.merge, 1 + len(options.models)
    for name, methods in _OF_METHODS.items():
        if getattr(options, name) is not None and method not in methods:
            raise UserError(f"--{name} has no effect without --merge {' or '.join(methods)}")
    if not method:
        if options.models:
            raise UserError("--models has no effect without --merge")
        return
    if not options.models:
        raise UserError(f"--merge {method} needs --models")
    if options.to == "peft":
        raise UserError("merges are of whole models; --to peft writes an adapter")
    weights = options.merge_weights
    if weights is not None and len(weights) != n_models:
        raise UserError(
            f"--merge_weights has {len(weights)} weights for {n_models} models (INPUT and --models)"
        )
    if weights is not None and (min(weights) < 0 or not 0 < sum(weights) < float("inf")):
        raise UserError(f"--merge_weights {weights} must be 0 or more, and not all 0")
    if method == "slerp" and n_models != 2:
        raise UserError(f"--merge slerp merges two models, not {n_models}")
    if method == "ties" and options.origin is None:
        raise UserError("--merge ties needs --origin, the model before fine-tuning")
    density, position = options.density, options.position
    require(density is None or 0 < density <= 1, "--density", density, "above 0, at most 1")
    require(position is None or 0 <= position <= 1, "--position", position, "in [0, 1]")


def merged_source(
    options: argparse.Namespace,
    spec: "ModelSpec",
    source: "TensorSource",
    family: "ModuleType | None",
) -> "TensorSource":
    """Return the merge of INPUT, whose weights are `source`, with the other models. Raise
    `UserError` if a model is of another architecture."""
    from torchtitan.components.weights.merge import MergedSource
    from torchtitan.models.pretrained import internal_source

    def open_other(path: Path) -> "TensorSource":
        other, weights = internal_source(path, family=family)
        if (other.name, _architecture(other)) != (spec.name, _architecture(spec)):
            raise UserError(
                f"{path} is another model than {options.input}: {_difference(spec, other)}; only "
                "checkpoints of one model can be merged"
            )
        return weights

    sources = {str(options.input): source}
    sources |= {
        f"{path} ({number})": open_other(path) for number, path in enumerate(options.models)
    }
    base = open_other(options.origin) if options.origin else None
    return MergedSource(sources, _method(options), base=base, dtype=options.dtype)


def _method(options: argparse.Namespace) -> "Merge":
    from torchtitan.components.weights.merge import linear, slerp, ties

    weights = options.merge_weights or [1.0] * (1 + len(options.models))
    density = 0.2 if options.density is None else options.density
    position = 0.5 if options.position is None else options.position
    methods: dict[str, Callable[[], Merge]] = {
        "linear": lambda: linear(weights),
        "slerp": lambda: slerp(position),
        "ties": lambda: ties(weights, density),
    }
    return methods[options.merge]()


def _architecture(spec: "ModelSpec") -> dict[str, object]:
    """Return the values that decide the weights and their use: for a class of transformers, its
    config.json without the ids of tokens and the use of a cache."""
    values = spec.model.to_dict()
    document = values.pop("document", {})
    kept = {
        key: value
        for key, value in document.items()
        if not key.endswith("_token_id") and key != "use_cache"
    }
    return {**values, **kept}


def _difference(spec: "ModelSpec", other: "ModelSpec") -> str:
    if spec.name != other.name:
        return f"{other.name} instead of {spec.name}"
    here, there = _architecture(spec), _architecture(other)
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return ", ".join(f"{name} {there.get(name)} instead of {here.get(name)}" for name in names)
