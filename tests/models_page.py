"""The page docs/models.md: model families, and what they support (`python -m tests.models_page >
docs/models.md`)."""

import json
import math
from collections.abc import Iterator

from tests.conftest import PROJECT
from tests.model_sizes import short_name
from torchtitan.cli.ls import SIZES, with_size
from torchtitan.models.families import families_with
from torchtitan.protocols.model import BaseModel

_FORMATS = {"hf": "Hugging Face", "meta": "Meta", "gguf": "GGUF"}

_INTRODUCTION = """# Models

<!-- python -m tests.models_page > docs/models.md -->

`MODULE=auto` finds the family of a Hugging Face folder by the `model_type` of its config.json
([pretrained models](pretrained.md)). The tests compare each family with the class of transformers that is named
here: logits and all gradients, weights and config.json in both directions, and cached generation, for random
configurations (`tests/models/test_equal_transformers.py`).

| family | model_type: class in transformers | flavors (parameters) | formats | not supported |
|---|---|---|---|---|"""

_END = """
Except for the last column, every family supports data (DDP, FSDP, HSDP), tensor, context and pipeline parallelism and
their combinations, LoRA, DoRA and QLoRA with PEFT's adapter files, Float8, quantization-aware training and dry runs.
The column also has layouts whose degree would have to divide a single head of keys.
[Parallelism](parallelism.md) has a table in which each part of these models is compared with a single process.

Models that generate images train by [flow matching](diffusion.md), and are compared with a class of diffusers
(`tests/models/test_diffusion.py`):

| family | class in diffusers | flavors (parameters) |
|---|---|---|"""

_CLASSES = """
Other types train through their class in transformers, as listed below.
"""

TABLE = PROJECT / "tests" / "transformers_matrix" / "table.md"
"""Results of `python -m tests.transformers_matrix --write-docs`, the end of the page."""


def _refused(config: BaseModel.Config) -> list[str]:
    """Return the degrees that must be 1: of layouts that the model does not support, and of those
    that divide sizes without a common divisor."""
    sizes = {"tensor": config.tensor_parallel_sizes, "context": config.context_parallel_sizes}
    indivisible = [kind for kind, of_kind in sizes.items() if math.gcd(*of_kind.values()) == 1]
    return [
        *config.unsupported_parallelisms(),
        *(f"{kind}_parallel_degree" for kind in indivisible),
    ]


def page() -> Iterator[str]:
    """Yield the lines of docs/models.md."""
    yield _INTRODUCTION
    sizes = json.loads(SIZES.read_text())
    families = list(families_with("hf"))
    for family in (one for one in families if one.FORMATS["hf"].library == "transformers"):
        name = short_name(family)
        flavors = [with_size(flavor, sizes[name].get(flavor)) for flavor in family.FLAVORS]
        types = [
            f"{name}: {architecture}"
            for name, architecture in family.FORMATS["hf"].model_types.items()
        ]
        refusals: dict[str, list[str]] = {}
        for flavor, config in family.FLAVORS.items():
            for option in _refused(config):
                refusals.setdefault(option.replace("_degree", "").replace("_", " "), []).append(
                    flavor
                )
        missing = [
            option if len(refused) == len(family.FLAVORS) else f"{option}: {', '.join(refused)}"
            for option, refused in refusals.items()
        ]
        formats = [_FORMATS.get(format, format) for format in family.FORMATS]
        cells = (
            name,
            "<br>".join(types),
            "<br>".join(flavors),
            ", ".join(formats),
            "<br>".join(missing),
        )
        yield f"| {' | '.join(cells)} |"
    yield _END
    for family in (one for one in families if one.FORMATS["hf"].library == "diffusers"):
        name = short_name(family)
        flavors = [with_size(flavor, sizes[name].get(flavor)) for flavor in family.FLAVORS]
        [class_name] = family.FORMATS["hf"].model_types
        yield f"| {name} | {class_name} | {'<br>'.join(flavors)} |"
    yield _CLASSES
    yield TABLE.read_text().rstrip()


if __name__ == "__main__":
    print("\n".join(page()))
