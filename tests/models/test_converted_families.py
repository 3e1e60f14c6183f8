"""Float8, quantization-aware training and adapters with the debug model of every family."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.test_small_families import ANY_CLASS, DENOISERS, FAMILIES
from tests.training import ABSENT, read_metrics, train
from torchtitan.components.peft import LoRA, QLoRA
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.components.quantization.qat import QAT

CONVERTERS = {
    "float8": Float8LinearConverter.Config(emulate=True, min_features=16),
    "qat": QAT.Config(start_step=1, group_size=32),
    "dora": LoRA.Config(dora=True),
    "qlora": QLoRA.Config(),
}


OTHER_DESIGNS = {f"gemma4_{name}_debugmodel": "gemma4" for name in ("small", "moe")}
"""Configuration of another design than the family's debug model → family."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [*sorted(set(FAMILIES) - {*DENOISERS}), ANY_CLASS, *OTHER_DESIGNS]
)
def test_every_converter_trains(family: str, tmp_path: Path) -> None:
    """Losses are finite and change; each converter changes them in another way."""
    sizes: dict[str, Any] = {"model__dim": 256, "model__ffn_dim": 768, "model__n_layers": 4}
    if family == ANY_CLASS:
        sizes = {"config": "transformers_debugmodel_dense", **dict.fromkeys(sizes, ABSENT)}
    if family == "kimi_linear":
        sizes["model__linear_head_dim"] = 64  # 4-bit weights need a multiple
    if family in OTHER_DESIGNS:
        if "small" in family:
            # 4-bit weights need a multiple, as in published models
            sizes["model__hidden_size_per_layer_input"] = 64
        sizes, family = {**sizes, "config": family}, OTHER_DESIGNS[family]
    final = set()
    for name, converter in CONVERTERS.items():
        train(
            tmp_path / name,
            converter,
            module=family,
            **sizes,
            optimizer__lr=1e-2,
            training__steps=3,
        )
        losses = [loss for _, loss in read_metrics(tmp_path / name, "loss")]
        assert all(0 < loss < 20 for loss in losses) and len(set(losses)) == 3, (name, losses)
        final.add(losses[-1])
    assert len(final) == len(CONVERTERS)
