"""Types whose processors place images themselves: Kosmos-2 and Kosmos-2.5, one before each text, and
Idefics, several in a list of texts and images. Tokens, exports, and exact resumes. Losses and gradients are compared in tests/models/test_images.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.experiments.test_preference_images import answer_labels
from tests.models.test_images import norm, options, write_rows
from tests.tiny_vision import (
    in_float32,
    reference_inputs,
    reference_processor,
    vision_folder,
    vision_model,
)
from tests.training import killed_in, read_metrics, train
from tests.vision_types import VOCABULARY
from tests.vision_types_leading import LEADING_TYPES, PLACING_TYPES
from torchtitan.components.images.encoder import encode_prompt
from torchtitan.components.images.files import ImageOpener
from torchtitan.components.images.forms.leading import LeadingTokens as LeadingForm
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.reader import ImageReader
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.transformers.cross_attention import cross_attention_arguments
from torchtitan.trainer import Trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("model_type", LEADING_TYPES)
def test_a_text_after_an_image_equals_that_of_the_processor(
    model_type: str, data: Any, tmp_path: Path
) -> None:
    """Tokens, the mask of places, and pixels."""
    folder = vision_folder(model_type, tmp_path / model_type)
    rows, _, images = data
    call = reference_processor(model_type, folder)
    expected = dict(call(text=[" A heron."], images=[images[0][0]], return_tensors="pt"))
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    processor = ImageProcessor.from_folder(folder, tokenizer)
    [rendered] = tokenizer.tokenize(["<s><image> A heron."], allow_special=True)
    file = ImageOpener(rows.parent).open("0-0.png")
    ids, found = encode_prompt(processor, tokenizer, rendered, [file])
    assert ids == expected.pop("input_ids")[0].tolist()
    mask = expected.pop("image_embeds_position_mask")
    assert torch.equal(found.more_types["image_embeds_position_mask"], mask)
    assert torch.equal(found.token_types_BL, (mask == 1).long())
    expected.pop("attention_mask")
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in expected.items())


def test_placed_images_equal_those_that_idefics_places(data: Any, tmp_path: Path) -> None:
    """Tokens, pixels and the mask of the latest images, which a text's end hides."""
    folder = vision_folder("idefics", tmp_path / "idefics")
    rows, _, images = data
    first, second = images[1]
    call = reference_processor("idefics", folder)
    [eos] = [call.tokenizer.eos_token]
    expected = call(text=[["Two:", first, second, f"birds{eos}and", first, "a cat"]])
    fake = "<fake_token_around_image>"
    text = f"<s>Two:{fake}<image>{fake}<image>{fake}birds{eos}and{fake}<image>{fake}a cat"
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    processor = ImageProcessor.from_folder(folder, tokenizer)
    [rendered] = tokenizer.tokenize([text], allow_special=True)
    files = [ImageOpener(rows.parent).open(f"1-{index}.png") for index in (0, 1, 0)]
    ids, found = encode_prompt(processor, tokenizer, rendered, files)
    assert ids == expected["input_ids"][0].tolist()
    ids_1L = torch.tensor([ids])
    model = vision_model("idefics")
    given = {**found.tensors, "image_attention_mask": found.token_types_BL}
    arguments = cross_attention_arguments(model, ids_1L, given)
    assert torch.equal(arguments["pixel_values"], expected["pixel_values"])
    assert torch.equal(arguments["image_attention_mask"], expected["image_attention_mask"])


def test_places_of_images_in_packed_rows() -> None:
    """The tokens in the places of images may also be in a text."""
    form = LeadingForm(ids=[9, 1, 2, 8], places=[-1, 1, 1, -1], name="mask", tensors=[])
    ids = np.array([[9, 1, 2, 8, 1, 2, 9, 1, 2, 8], [1, 8, 9, 1, 2, 8, 7, 7, 7, 7]])
    expected = [[-1, 1, 1, -1, 0, 0, -1, 1, 1, -1], [0, 0, -1, 1, 1, -1, 0, 0, 0, 0]]
    assert form.mask(ids).tolist() == expected
    assert form.mask(np.array([7, 9])).tolist() == [0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*LEADING_TYPES, *PLACING_TYPES])
def test_a_killed_run_continues_exactly_and_its_export_reopens(
    model_type: str, data: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    folder = vision_folder(model_type, tmp_path / model_type)
    rows, conversations, images = data
    more = {"training__steps": 3, "training__local_batch_size": 2, "checkpoint__interval": 1}
    more |= {"checkpoint__last_save_in_hf": True, "checkpoint__export_dtype": "float32"}
    chosen = options(folder, rows, **more) | {"checkpoint__enable": True}
    train(tmp_path / "straight", **chosen)
    with killed_in(Trainer, "train_step", 2):
        train(tmp_path / "killed", **chosen)
    [model] = train(tmp_path / "killed", **chosen).model_parts
    found, expected = (
        read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("killed", "straight")
    )
    assert found == expected

    export = tmp_path / "killed/checkpoint/step-3"
    inputs = in_float32(reference_inputs(model_type, export, conversations[1:2], images[1:2]))
    known = reference_inputs(model_type, folder, conversations[1:2], images[1:2])
    assert all(torch.equal(inputs[name], value) for name, value in in_float32(known).items())
    opened = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    processor = ImageProcessor.from_folder(export, PretrainedTokenizer.Config().build(path=export))
    read = ImageReader(processor).inputs(images[1:2], inputs["input_ids"])
    with torch.no_grad():
        ours = model.eval()(inputs["input_ids"], images=read)
        torch.testing.assert_close(ours, opened(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_additional_tokens_of_idefics(data: Any, tmp_path: Path) -> None:
    """The class cannot compute its own loss with them."""
    from transformers import AutoModelForImageTextToText

    folder = vision_folder("idefics", tmp_path / "idefics", additional_vocab_size=2)
    rows, conversations, images = data
    inputs = reference_inputs("idefics", folder, conversations, images)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    labels = answer_labels(folder, inputs, conversations)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(**inputs, labels=labels)
    logits = model(**inputs).logits
    assert logits.shape[-1] == VOCABULARY + 2
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    train(tmp_path / "run", **options(folder, rows))
    [(_, ours, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)
