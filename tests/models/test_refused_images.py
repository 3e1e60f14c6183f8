"""Types of models of images and text that conversations with images cannot train: each is refused
by name, with the reason, before its weights are read."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_images import options, write_rows
from tests.tiny_vision import bare_folder
from tests.training import train
from torchtitan.tools.errors import UserError

_DIFFUSION = {
    "text_config": {
        "model_type": "diffusion_gemma_text",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 64,
    },
    "canvas_length": 8,
}

# model_type, values of its configuration, of its processor, class of its image processor, message
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("evolla", {}, {}, "CLIPImageProcessor", "model_type 'evolla' reads no images"),
    (
        "diffusion_gemma",
        _DIFFUSION,
        {},
        "Gemma4ImageProcessor",
        "diffusion_gemma gives no logits for each token of a text with images",
    ),
]
NEEDS = {
    "torchvision": [
        ("cohere2_vision", "Cohere2VisionImageProcessor"),
        ("gemma4_unified", "Gemma4UnifiedImageProcessor"),
    ],
    "timm": [("gemma3n", "SiglipImageProcessor"), ("fast_vlm", "CLIPImageProcessor")],
}
"""Package → types whose class or image processor needs it."""


def check_refused(tmp_path: Path, folder: Path, message: str) -> None:
    rows, *_ = write_rows(tmp_path / "rows")
    chosen = options(folder, rows) | {"model__train": ["language"]}
    with pytest.raises(UserError) as caught:
        train(tmp_path / "run", **chosen)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "config", "processor", "image_processor", "message"),
    [pytest.param(*row, id=row[0]) for row in REFUSED],
)
def test_is_refused(
    model_type: str,
    config: dict[str, Any],
    processor: dict[str, Any],
    image_processor: str,
    message: str,
    tmp_path: Path,
) -> None:
    folder = bare_folder(model_type, tmp_path / "model", image_processor, config)
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | processor))
    check_refused(tmp_path, folder, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "model_type", "image_processor"),
    [(package, *row) for package, rows in NEEDS.items() for row in rows],
)
def test_a_package_is_named(
    package: str, model_type: str, image_processor: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    folder = bare_folder(model_type, tmp_path / "model", image_processor, {})
    check_refused(tmp_path, folder, package)
