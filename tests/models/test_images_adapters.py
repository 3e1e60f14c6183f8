"""Adapters trained on images: their files in peft, and 4-bit weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_images import options, reference, write_rows
from tests.tiny_vision import reference_inputs, vision_folder
from tests.training import ABSENT, read_metrics, train
from tests.vision_types_leading import LEADING_TYPES
from torchtitan.components.images.encoder import encode_prompt
from torchtitan.components.images.files import ImageOpener
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.quantization.nf4 import pack, unpack
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Sizes of a language model whose weights may have 4 bits."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    return write_rows(tmp_path_factory.mktemp("rows"))


def adapter_options(folder: Path, rows: Path, **more: Any) -> dict[str, Any]:
    return options(folder, rows) | {
        "config": "lora_images",
        "training__steps": 2,
        "optimizer__lr": 1e-2,
        "lr_scheduler__warmup_steps": 0,
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "checkpoint__export_dtype": "float32",
        **more,
    }


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_vl",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("gemma3", "internvl", "idefics", *LEADING_TYPES)
        ),
    ],
)
def test_adapters_open_in_peft_with_the_same_logits(
    model_type: str, data: Any, tmp_path: Path
) -> None:
    """Adapters are in all parts; a prompt has two images."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    folder = vision_folder(model_type, tmp_path / "model")
    rows, conversations, images = data
    model = train(tmp_path, **adapter_options(folder, rows)).model_parts[0].eval()
    export = tmp_path / "checkpoint/step-2"
    inputs = reference_inputs(model_type, folder, [conversations[1][:1]], [images[1]])
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = base(**inputs).logits
        opened = PeftModel.from_pretrained(base, export / "adapter").eval()
        theirs = opened(**inputs).logits
    names = opened.targeted_module_names
    is_language = {bool(re.search(r"language|text_model|model\.layers", name)) for name in names}
    assert is_language == {True, False}
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    processor = ImageProcessor.from_folder(folder, tokenizer)
    opener = ImageOpener(rows.parent)
    files = [opener.open(f"1-{index}.png") for index in range(2)]
    text = json.loads(rows.read_text().splitlines()[1])["messages"][0]["content"][-1]["text"]
    rendered = tokenizer.tokenize([rendered_prompt(folder, text, len(files))], allow_special=True)
    ids, read = encode_prompt(processor, tokenizer, rendered[0], files)
    assert ids == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        ours = model(torch.tensor([ids]), images=read)
    assert not torch.allclose(theirs, plain, atol=1e-2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def rendered_prompt(folder: Path, text: str, n_images: int) -> str:
    from tests.tiny_vision import text_of

    parts = [{"type": "image"} for _ in range(n_images)]
    return text_of(folder, [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("smolvlm", WIDE),
        pytest.param("kosmos-2", WIDE | {"ffn_dim": 128}, marks=pytest.mark.slow),
    ],
)
def test_only_the_language_model_has_4_bits(
    model_type: str, text: dict[str, int], data: Any, tmp_path: Path
) -> None:
    """The first loss is that of the class, whose layers in the decoder's blocks are rounded."""
    from transformers import AutoModelForImageTextToText

    folder = vision_folder(model_type, tmp_path / "model", **text)
    rows, conversations, images = data
    rounded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    exact, _ = reference(model_type, folder, conversations, images, with_gradients=False)
    round_layers(rounded)
    expected_folder = vision_folder(model_type, tmp_path / "rounded", **text)
    rounded.save_pretrained(expected_folder)
    loss, _ = reference(model_type, expected_folder, conversations, images, with_gradients=False)
    chosen = adapter_options(folder, rows, config="qlora_images") | {"model__train": ABSENT}
    model = train(tmp_path, **chosen).model_parts[0]
    first, second = (value for _, value in read_metrics(tmp_path, "loss"))
    assert first == pytest.approx(loss, rel=1e-5)
    assert abs(exact / loss - 1) > 1e-3
    assert second < first
    packed = {
        name for name, parameter in model.named_parameters() if not parameter.is_floating_point()
    }
    assert packed and all("text_model." in name for name in packed)


def round_layers(model: Any) -> None:
    """Round the linear layers in the decoder's blocks of a class to 4 bits."""
    for name, layer in model.get_decoder().named_modules():
        if isinstance(layer, torch.nn.Linear) and "layers." in name:
            layer.weight.data = unpack(*pack(layer.weight.data), torch.float32)


def test_a_vision_tower_that_cannot_have_4_bits_is_named(data: Any, tmp_path: Path) -> None:
    folder = vision_folder("smolvlm", tmp_path / "model", **WIDE)
    chosen = adapter_options(folder, data[0], config="qlora_images")
    with pytest.raises(UserError, match=r"vision_model\S+ cannot have an adapter: NF4 needs a mul"):
        train(tmp_path, **chosen)
