"""Types of models that read images and cannot be trained on conversations with them: each is
refused by name, with a reason, when its data loader opens its processor: before the model is
built."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests import tiny_vision
from tests.models.test_images import options, write_rows
from tests.tiny_vision import vision_folder
from tests.training import train
from tests.vision_types import llava
from torchtitan.components.images.forms.plain import warn_of_beginning
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

REFUSED = [
    (
        "instructblipvideo",
        "InstructBlipVideoProcessor",
        "BlipImageProcessor",
        "reads no images; its parts are video_processor, tokenizer, qformer_tokenizer",
    ),
]
WITH_TORCHVISION = [
    ("inkling2", "Inkling2Processor", "Inkling2ImageProcessor"),
    ("inkling_mm_model", "InklingProcessor", "InklingImageProcessor"),
    ("kimi_k25", "Kimi_K25Processor", "Kimi_K25ImageProcessor"),
    ("lfm2_vl", "Lfm2VlProcessor", "Lfm2VlImageProcessor"),
    ("llama4", "Llama4Processor", "Llama4ImageProcessor"),
    ("minicpm_ocr", "MiniCPMOcrProcessor", "MiniCPMOcrImageProcessor"),
    ("minimax_m3_vl", "MiniMaxM3VLProcessor", "MiniMaxM3VLImageProcessor"),
    ("molmo2", "Molmo2Processor", "Molmo2ImageProcessor"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that has a token for images."""
    folder = vision_folder("llava", tmp_path_factory.mktemp("source"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["bos_token"] = "<pad>"
    settings["extra_special_tokens"] |= {"boi_token": "<|im_start|>", "eoi_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_folder(
    source: Path, folder: Path, model_type: str, processor: str, image_processor: str
) -> None:
    from transformers import AutoConfig

    shutil.copytree(source, folder, dirs_exist_ok=True)
    AutoConfig.for_model(model_type).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor}))
    pixels = {"image_processor_type": image_processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))


@pytest.mark.parametrize(("model_type", "processor", "image_processor", "reason"), REFUSED)
def test_type_is_refused(
    model_type: str, processor: str, image_processor: str, reason: str, source: Path, tmp_path: Path
) -> None:
    write_folder(source, tmp_path, model_type, processor, image_processor)
    with pytest.raises(UserError, match=f"{processor} {reason}"):
        ImageProcessor.from_folder(tmp_path, PretrainedTokenizer.Config().build(path=tmp_path))


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
@pytest.mark.parametrize(("model_type", "processor", "image_processor"), WITH_TORCHVISION)
def test_type_without_a_back_end_is_refused(
    model_type: str, processor: str, image_processor: str, source: Path, tmp_path: Path
) -> None:
    reason = f"{processor} processes images with torchvision only, which is not installed"
    write_folder(source, tmp_path, model_type, processor, image_processor)
    with pytest.raises(UserError, match=reason):
        ImageProcessor.from_folder(tmp_path, PretrainedTokenizer.Config().build(path=tmp_path))


def test_type_that_reads_text_only_is_refused(source: Path, tmp_path: Path) -> None:
    """transformers lists it among the types that read images."""
    write_folder(
        source, tmp_path / "model", "mistral4", "PixtralProcessor", "PixtralImageProcessor"
    )
    rows, *_ = write_rows(tmp_path / "rows")
    with pytest.raises(UserError, match="model_type 'mistral4' reads no images"):
        train(tmp_path / "run", **options(tmp_path / "model", rows))


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_a_processor_that_adds_a_token_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_beginning.cache_clear()
    names = ("im_patch", "im_col", "im_start", "low_res_im_start", "im_end", "im_low")
    tokens = {f"<{name}>": f"<{name}>" for name in (*names, "frame_start", "frame_end")}
    tokens |= {"image_token": "<|image|>", "video_token": "<|video|>"}
    kind = llava("Molmo2Processor", "Molmo2ImageProcessor")
    ids = {"image_token_index": "<|image|>"}
    molmo = replace(kind, tokens=tokens, ids=ids, placeholder="<|image|>", pixels={}, arguments={})
    with mock.patch.dict(tiny_vision._TYPES, {"llava": molmo}):
        folder = vision_folder("llava", tmp_path)
    ImageProcessor.from_folder(folder, PretrainedTokenizer.Config().build(path=folder))
    assert "Molmo2Processor begins each text with '<|im_end|>'" in caplog.text
