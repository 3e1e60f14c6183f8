"""`torchtitan ls`: list modules, their configurations, and the sizes of their models."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torchtitan.config.registry import built_in_modules, list_module, modules_on_disk
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import without_logs
from torchtitan.tools.parser import Parser


def ls(args: Sequence[str]) -> int:
    """Print modules with their configurations and flavors, and return the exit code. Modules of other packages are
    listed from their sources, without importing them, so without the sizes of their models."""
    parser = Parser(
        prog="torchtitan ls", description="List modules, their configurations (--config) and their model flavors."
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the page docs/models.md: model families, and what they support"
    )
    if parser.parse_args(args).markdown:
        print("\n".join(_page()))
        return 0
    built_in = built_in_modules()
    for name, folder in modules_on_disk().items():
        listing = list_module(name, folder)
        print(name)
        print(f"  configs: {', '.join(listing.configs)}")
        if flavors := listing.flavors:
            has_sizes = name in built_in and any(not flavor.startswith("debugmodel") for flavor in flavors)
            with suppress(UserError), without_logs():  # an optional dependency is not installed
                flavors = _sizes(name) if has_sizes else flavors
            print(f"  flavors: {', '.join(flavors)}")
    print("Every family also has the configurations of auto, with --hf_assets_path DIR.")
    return 0


def _sizes(family: str) -> list[str]:
    """Return the flavors of a built-in family with their numbers of parameters."""
    import torch

    from torchtitan.config.registry import trusted_module

    gc.freeze()  # otherwise, garbage collection walks through all of torch with each few models
    sizes = []
    package = trusted_module(f"torchtitan.models.{family}")
    assert package is not None, "built-in modules are trusted"
    for flavor, config in package.FLAVORS.items():
        if config.vocab_size is None:
            sizes.append(flavor)
            continue
        with torch.device("meta"):
            sizes.append(f"{flavor} ({_rounded(config.build().num_parameters())})")
    return sizes


def _rounded(n_parameters: int) -> str:
    unit, letter = next((one for one in ((1e12, "T"), (1e9, "B")) if n_parameters >= 0.9995 * one[0]), (1e6, "M"))
    return f"{n_parameters / unit:.3g} {letter}"


_FORMATS = {"hf": "Hugging Face", "meta": "Meta"}

_INTRODUCTION = """# Models

<!-- torchtitan ls --markdown > docs/models.md -->

`MODULE=auto` finds the family of a Hugging Face folder by the `model_type` of its config.json
([pretrained models](pretrained.md)). The tests compare each family with the class of transformers that is named
here: logits and all gradients, weights and config.json in both directions, and cached generation, for random
configurations (`tests/models/test_equal_transformers.py`).

| family | model_type: class in transformers | flavors (parameters) | formats | not supported |
|---|---|---|---|---|"""

_END = """
Except for the last column, every family supports data (DDP, FSDP, HSDP), tensor, context and pipeline parallelism and
their combinations, LoRA, DoRA and QLoRA with PEFT's adapter files, Float8, quantization-aware training and dry runs.
[Parallelism](parallelism.md) has a table in which each part of these models is compared with a single process.

Other types train through their class in transformers, as listed below.
"""

_CLASSES = Path(__file__).parents[2] / "tests" / "transformers_matrix" / "table.md"
"""Results of `python -m tests.transformers_matrix --write-docs`, the end of the page."""


def _page() -> Iterator[str]:
    from torchtitan.models.families import families_with

    yield _INTRODUCTION
    for family in families_with("hf"):
        name = family.__name__.rpartition(".")[2]
        types = [f"{name}: {architecture}" for name, architecture in family.FORMATS["hf"].model_types.items()]
        refusals: dict[str, list[str]] = {}
        for flavor, config in family.FLAVORS.items():
            for option in config.unsupported_parallelisms():
                refusals.setdefault(option.replace("_degree", "").replace("_", " "), []).append(flavor)
        missing = [
            option if len(flavors) == len(family.FLAVORS) else f"{option}: {', '.join(flavors)}"
            for option, flavors in refusals.items()
        ]
        formats = [_FORMATS.get(format, format) for format in family.FORMATS]
        cells = (name, "<br>".join(types), "<br>".join(_sizes(name)), ", ".join(formats), "<br>".join(missing))
        yield f"| {' | '.join(cells)} |"
    yield _END
    yield _CLASSES.read_text().rstrip()
