"""Types of models, from M to V, that do not train on conversations with images, and what some of
the others need."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3VLProcessor

from tests.models.test_images import options, write_rows
from tests.tiny_vision import vision_folder, vision_model
from tests.training import train
from tests.vision_types_m_to_v import OF_TORCHVISION, TYPES_M_TO_V
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.transformers.images import feature_arguments
from torchtitan.tools.errors import UserError

WITHOUT_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is not None, reason="torchvision is installed"
)
WITHOUT_TIMM = pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")

ENCODER_DECODERS = ("pp_formulanet", "udop")
"""Types that read images in an encoder, and do not train here."""


def changed(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        *(
            (name, f"{name} is an encoder-decoder; only decoders train here")
            for name in ENCODER_DECODERS
        ),
        ("pi0", "PI0Config has no hidden_size, so it is not a language model"),  # but of actions
        pytest.param("perception_lm", "requires the timm library", marks=WITHOUT_TIMM),
    ],
)
def test_classes_that_are_no_decoders_are_refused(
    model_type: str, message: str, tmp_path: Path
) -> None:
    """By their config.json alone, before a processor or weights are read."""
    rows, *_ = write_rows(tmp_path / "rows")
    folder = vision_folder("llava", tmp_path / "model")
    values = AutoConfig.for_model(model_type).to_dict()
    (folder / "config.json").write_text(json.dumps(values, default=str))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"^config.json: .*{message}"):
        train(tmp_path / "run", **options(folder, rows))


@pytest.mark.parametrize(
    ("processor", "image_processor", "message"),
    [
        (
            "ShieldGemma2Processor",
            "Gemma3ImageProcessor",
            "ShieldGemma2Processor asks questions of its own about each image",
        ),
        *(
            pytest.param(
                TYPES_M_TO_V[name].processor,
                TYPES_M_TO_V[name].image_processor,
                f"{TYPES_M_TO_V[name].processor} processes images with torchvision only, which is "
                "not installed; install the version that belongs to torch",
                marks=WITHOUT_TORCHVISION,
            )
            for name in OF_TORCHVISION
        ),
    ],
)
def test_processors_that_do_not_fit_are_refused(
    processor: str, image_processor: str, message: str, tmp_path: Path
) -> None:
    folder = vision_folder("llava", tmp_path)
    changed(folder / "tokenizer_config.json", {"bos_token": "<|im_start|>"})
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor}))
    pixels = {"image_processor_type": image_processor, "image_seq_length": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    with pytest.raises(UserError, match=message):
        ImageProcessor.from_folder(folder, PretrainedTokenizer.Config().build(path=folder))


def test_processor_that_returns_no_offsets(tmp_path: Path, monkeypatch: Any) -> None:
    """What is written for images is known although the processor does not return it, such as
    Nemotron's."""
    folder = vision_folder("qwen3_vl", tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    sizes = [(64, 48), (30, 70)]
    expected = ImageProcessor.from_folder(folder, tokenizer).replacements(sizes)
    own = Qwen3VLProcessor.__call__

    def without_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = own(self, *args, **kwargs)
        outputs.pop("text_replacement_offsets", None)
        return outputs

    monkeypatch.setattr(Qwen3VLProcessor, "__call__", without_offsets)
    processor = ImageProcessor.from_folder(folder, tokenizer)
    assert processor.replacements(sizes) == expected
    assert len(set(map(len, expected))) == 2


def test_tokens_of_an_image_that_the_template_writes(tmp_path: Path) -> None:
    """config.json may name the token as either name of the class, and leaves out its defaults; a
    checkpoint of a run has no config.json."""
    folder = vision_folder("pp_chart2table", tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    processor = ImageProcessor.from_folder(folder, tokenizer)
    image_id = processor.token_id
    assert processor.n_placeholders(np.array([1, *[image_id] * 8, 2, *[image_id] * 4])) == 3
    for ids in ([image_id] * 5, [image_id, 1, image_id, image_id, image_id]):
        with pytest.raises(UserError, match=f"writes {ids.count(image_id)} tokens <imgpad>"):
            processor.n_placeholders(np.array(ids))
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["image_token_id"] = values.pop("image_token_index")
    del values["image_seq_length"]
    file.write_text(json.dumps(values))
    of_default = ImageProcessor.from_folder(folder, tokenizer)
    assert (of_default.token_id, of_default.n_written) == (image_id, 576)
    assert of_default.fingerprint != processor.fingerprint  # of the lengths of samples
    file.unlink()
    with pytest.raises(UserError, match="has no config.json, which names the tokens of an image"):
        ImageProcessor.from_folder(folder, tokenizer)


def test_a_class_that_takes_lists_gets_lists() -> None:
    """Unlimited-OCR divides its tiles by lists of numbers, and fails with tensors."""
    owner = vision_model("unlimited_ocr").eval().model
    torch.manual_seed(0)
    counts, grids = [2, 0, 4], [[2, 1], [1, 1], [2, 2]]
    pixels = torch.randn(3, 3, 64, 64), torch.randn(6, 3, 32, 32)
    tensors = dict(zip(("pixel_values", "pixel_values_local"), pixels, strict=True)) | {
        "num_local_patches": torch.tensor(counts),
        "patches_grid": torch.tensor(grids),
    }
    arguments = feature_arguments(owner.get_image_features, tensors, torch.float32)
    with torch.no_grad():
        expected = owner.get_image_features(*pixels, counts, grids, return_dict=True)
        found = owner.get_image_features(**arguments, return_dict=True)
    assert len(found.pooler_output) == 3
    for mine, theirs in zip(found.pooler_output, expected.pooler_output, strict=True):
        assert torch.equal(mine, theirs)
