"""Ranks with and without images reduce the gradients of the same weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny_vision import ALL_VISION_TYPES, parts_in, vision_folder
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.distributed import initialize_weights
from torchtitan.models.transformers.model import TransformersModel

UNLIKE_OTHERS = (
    "janus",  # an aligner for images that it draws
    "hunyuan_vl",  # a separator of several images that it never reads
    "granite4_vision",  # more projectors than layers that get features
    "granite_docling",  # features of layers, which their method does not return
    "ernie4_5_vl_moe",  # experts for the tokens of images
    "mllama",  # layers for images
    "idefics",  # layers that read images also without any
    "kosmos-2",  # no method for features, and none without images
    "llama4",  # a projector after the method for features
)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_vl"]
    + [pytest.param(x, marks=pytest.mark.slow) for x in UNLIKE_OTHERS if x in ALL_VISION_TYPES],
)
def test_the_same_weights_have_gradients(model_type: str, tmp_path: Path) -> None:
    folder = vision_folder(model_type, tmp_path / model_type)
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    processor = ImageProcessor.from_folder(folder, tokenizer)
    document = json.loads((folder / "config.json").read_text())
    config = TransformersModel.Config.of(document)
    config.reads_images = True
    config.train = parts_in(folder)
    model: Any = config.build()
    initialize_weights(model, 0)

    def trained(images: list[Image.Image]) -> set[str]:
        expansions = processor.expansions([image.size for image in images])
        [text] = tokenizer.tokenize(["What is it?"], allow_special=True)
        ids_BL = torch.tensor([[*(i for ids in expansions for i in ids), *text]])
        model.zero_grad(set_to_none=True)
        logits = model(ids_BL, images=ImageReader(processor).inputs([images], ids_BL))
        logits.sum().backward()
        return {name for name, one in model.named_parameters() if one.grad is not None}

    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    with_image = trained([Image.fromarray(noise)])
    assert trained([]) == with_image
    assert any("vis" in name for name in with_image)
