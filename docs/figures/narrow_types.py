"""Runs, table and figure of docs/quantization.md:

    python docs/figures/narrow_types.py train FOLDER TEXT SEED [MODEL/TYPE ...]
    python docs/figures/narrow_types.py draw FOLDER [FOLDER ...]

`train` trains a small Llama and a small mixture of experts on nine tenths of a text file, in each
type with the same seed, and validates them on the rest. `draw` prints the table of the runs in the
folders, one for each seed, and writes the figure of the first.
"""

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from run_curves import draw, points
from torch import Tensor

from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.narrow import MXFP8, NVFP4
from torchtitan.components.quantization.narrow_products import MXFP8Products, NVFP4Products
from torchtitan.config.configurable import builds
from torchtitan.models import llama3, qwen3_moe
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.recipes import small_run
from torchtitan.trainer import Trainer

STEPS = 300
SIZES = {"dim": 64, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 192}
EXPERTS = MoEConfig(n_experts=4, top_k=2, ffn_dim=96)
MODELS = {
    "Llama": (llama3.model_registry, {}),
    "experts": (qwen3_moe.model_registry, {"head_dim": 32, "moe": EXPERTS}),
}
LAST = r"layers\.2\."
TYPES = {
    "float32": [],
    "bfloat16": [],
    "float8": [Float8LinearConverter.Config(recipe="rowwise", emulate=True, min_features=16)],
    "MXFP8": [MXFP8.Config(emulate=True, min_features=32)],
    "NVFP4": [NVFP4.Config(emulate=True, min_features=16, exclude=[LAST])],
    "NVFP4, last block too": [NVFP4.Config(emulate=True, min_features=16)],
    "MXFP8, head too": [MXFP8.Config(emulate=True, min_features=32)],
    "NVFP4, head too": [NVFP4.Config(emulate=True, min_features=16, exclude=[LAST])],
}
HEADS = {"MXFP8": MXFP8Products(), "NVFP4": NVFP4Products()}


class NarrowHead(CrossEntropyLoss):
    """Cross entropy of logits from a narrow product, which no converter makes."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """Cross entropy."""

        type: Literal["MXFP8", "NVFP4"] = "MXFP8"
        """Of the product."""

        @builds(lambda: NarrowHead)
        def build(self) -> Any:
            """Build the loss."""

    def __call__(
        self, hidden_BLD: Tensor, weight_VD: Tensor | None, labels_BL: Tensor, **options: Any
    ) -> Tensor:
        products = HEADS[self.config.type]
        logits_NV = products.multiply(hidden_BLD.flatten(0, 1), weight_VD)
        return super().__call__(logits_NV.view(*labels_BL.shape, -1), None, labels_BL, **options)


def configuration(model: str, kind: str, folder: Path, seed: int) -> Trainer.Config:
    """Return the configuration of a run."""
    registry, sizes = MODELS[model]
    spec = registry("debugmodel")
    config = small_run(
        dataclasses.replace(spec, model=dataclasses.replace(spec.model, **SIZES, **sizes))
    )
    config.dump_folder = str(folder / model / kind)
    config.debug.seed = seed
    training, validator = config.training, config.validator
    training.steps, training.seq_len, training.local_batch_size = STEPS, 64, 4
    training.mixed_precision_param = "bfloat16" if kind == "bfloat16" else "float32"
    config.dataloader = PretrainDataLoader.Config(dataset=[str(folder / "train.txt")])
    validator.dataset, validator.freq, validator.steps = [str(folder / "held_out.txt")], 150, 20
    config.metrics.log_freq = 1
    config.model_converters = TYPES[kind]
    if "head" in kind:
        config.loss = NarrowHead.Config(type=kind.split(",")[0])
    return config


def train(folder: Path, text: Path, seed: int, chosen: list[str]) -> None:
    """Train every model in every type, or the chosen ones."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = text.read_text()
    cut = len(whole) * 9 // 10
    (folder / "train.txt").write_text(whole[:cut])
    (folder / "held_out.txt").write_text(whole[cut:])
    for model in MODELS:
        for kind in TYPES:
            if chosen and f"{model}/{kind}" not in chosen:
                continue
            config = configuration(model, kind, folder, seed)
            config.check(1)
            trainer = config.build()
            trainer.train()
            trainer.close()


def cells(run: Path, reference: Path) -> list[str]:
    """Return the mean loss of a complete run over the last 50 steps, the difference from a
    reference run, and the last validation loss; dashes for another run."""
    if not (run / "metrics.jsonl").exists() or len(points(run, "loss")) < STEPS:
        return ["-"] * 3
    own, base = (
        mean(x for step, x in points(each, "loss") if step > STEPS - 50)
        for each in (run, reference)
    )
    last_validation = points(run, "validation_loss")[-1][1]
    return [f"{own:.4f}", f"{100 * (own / base - 1):+.2f} %", f"{last_validation:.4f}"]


def show(folders: list[Path]) -> None:
    """Print the table, with three columns for each folder, and draw the first folder's runs."""
    panels = []
    for model in MODELS:
        lines = []
        for kind in TYPES:
            runs = [folder / model / kind for folder in folders]
            parts = [cells(run, run.with_name("bfloat16")) for run in runs]
            print(f"| {model} | {kind} | {' | '.join(itertools.chain(*parts))} |")
            if kind in ("bfloat16", "MXFP8", "NVFP4"):
                lines.append((kind, points(runs[0], "loss")))
        panels.append((f"training loss: {model}", lines))
    (Path(__file__).parent / "narrow_types.svg").write_text(draw(panels))


def main(action: str, *words: str) -> None:
    if action == "train":
        folder, text, seed, *chosen = words
        train(Path(folder), Path(text), int(seed), chosen)
    else:
        show([Path(folder) for folder in words])


if __name__ == "__main__":
    main(*sys.argv[1:])
