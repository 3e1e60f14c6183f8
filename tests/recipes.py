"""The recipes of the table in `torchtitan/cli/recipes.py` as files, and the memory that they need.

python -m tests.recipes     # writes recipes/MODEL/METHOD.yaml and the table of docs/recipes.md
"""

import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import PROJECT
from torchtitan.cli.recipes import METHODS, MODELS, RECIPES, Model, recipe_text
from torchtitan.components.peft import QLoRA
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run.fitting import with_mode
from torchtitan.dry_run.report import reports_of, reserved_bytes
from torchtitan.trainer import Trainer

FOLDER = PROJECT / "recipes"
PAGE = PROJECT / "docs/recipes.md"
BEGIN, END = "<!-- recipes:begin -->\n", "<!-- recipes:end -->\n"


def files() -> dict[Path, str]:
    """Return the files of all recipes, and their texts."""
    paths = {recipe: FOLDER / f"{recipe}.yaml" for recipe in RECIPES}
    return {
        path: recipe_text(recipe, path.relative_to(PROJECT).as_posix())
        for recipe, path in paths.items()
    }


def table() -> str:
    """Return the table of cards by model and method."""
    rows = [["", *METHODS], ["---"] * (1 + len(METHODS))]
    for name, model in MODELS.items():
        rows.append([f"`{name}`", *(model.cards.get(method, "") for method in METHODS)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """Return docs/recipes.md with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def configuration(recipe: str, folder: Path) -> Trainer.Config:
    """Return the configuration of a recipe's text. The model's config.json, without the hub, is the
    one that its family writes."""
    text = recipe_text(recipe, "recipe.yaml")
    document = yaml.safe_load(text)
    write_description(MODELS[recipe.split("/")[0]], folder)
    file = folder / "recipe.yaml"
    file.write_text(text.replace(document["hf_assets_path"], str(folder)))
    config: Trainer.Config = ConfigManager().parse_args(["--config_file", str(file)]).config
    return config


def write_description(model: Model, folder: Path) -> None:
    package = importlib.import_module(f"torchtitan.models.{model.family}")
    description = package.FORMATS["hf"].to_external(package.FLAVORS[model.flavor])
    (folder / "config.json").write_text(json.dumps(description))


def least_gib(config: Trainer.Config, n_cards: int) -> float:
    """Return the memory that a card reserves at least, GiB, with all activations recomputed: the
    peak in dry runs of few layers, and the difference of these for each further layer."""
    model: Any = config.model_spec.model
    config = _as_published(config)
    few, more = _PERIODS.get(config.model_spec.name, (2, 3))

    def peak(n_layers: int) -> int:
        spec = dataclasses.replace(config.model_spec, model=model.with_layers(n_layers))
        small = dataclasses.replace(with_mode(config, "full"), model_spec=spec)
        return max(report.peak_bytes for report in reports_of(small, n_cards))

    first = peak(few)
    of_layer = (peak(more) - first) / (more - few)
    return reserved_bytes(first + of_layer * (model.n_layers - few), config.compile) / 2**30


def sampling_gib(config: Trainer.Config) -> float:
    """Return the memory of all answers that a card writes at once, GiB: their keys and values in 2
    bytes, with windows that they fill, and the logits of their next tokens in float32, which
    drawing copies twice."""
    model: Any = config.model_spec.model
    rollout: Any = config.rollout  # type: ignore[attr-defined]
    width = model.n_layers * model.n_kv_heads * (model.head_dim or model.dim // model.n_heads)
    of_cache = 2 * 2 * width * config.training.seq_len
    of_logits = 3 * 4 * model.vocab_size
    return rollout.max_rows * (of_cache + of_logits) / 2**30


def _as_published(config: Trainer.Config) -> Trainer.Config:
    """Return a configuration whose QLoRA keeps the bits of the published weights. A run finds these
    in the files of the weights, which are absent here."""
    forms = FORMS.get(config.model_spec.name, [])
    converters = [
        dataclasses.replace(one, forms=forms) if isinstance(one, QLoRA.Config) else one
        for one in config.model_converters
    ]
    checkpoint = dataclasses.replace(config.checkpoint, initial_load_path="")
    return dataclasses.replace(config, model_converters=converters, checkpoint=checkpoint)


FORMS = {
    "gpt_oss": [f"layers.*.moe.experts.{name}=e2m1:32:e8m0:bfloat16:0" for name in ("w13", "w2")]
}
"""Family → layers that its published weights hold in few bits, here MXFP4, and the form."""

_PERIODS = {"qwen3_5": (4, 8)}
"""Numbers of layers in the dry runs of families whose layers have weights of several sizes."""


def main() -> None:
    """Write the files and the table."""
    for name in MODELS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
