"""The processor of images against transformers' own call, for many types of models."""

import importlib.metadata
import importlib.util
import json
import sys
import threading
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny_vision import (
    VISION_TYPES,
    reference_inputs,
    reference_processor,
    text_of,
    vision_folder,
)
from torchtitan.components.images.forms.plain import warn_of_beginning
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

FAST = ("qwen3_vl", "smolvlm", "gemma3")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in VISION_TYPES if name not in FAST]
WITHOUT_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


ONE = [noise(40, 56)]
TWO = [noise(64, 48), noise(30, 70)]


def conversation(n_images: int) -> list[dict[str, Any]]:
    """A conversation with all but its last image at the beginning of a turn."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(n_images)]
    parts.insert(max(n_images - 1, 0), {"type": "text", "text": "Compare\n"})
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A dog."},
    ]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes the folder of a type once."""
    root = tmp_path_factory.mktemp("vision")
    return lru_cache(lambda model_type: vision_folder(model_type, root / model_type))


def opened(folder: Path) -> ImageProcessor:
    return ImageProcessor.from_folder(folder, PretrainedTokenizer.Config().build(path=folder))


@pytest.mark.parametrize("model_type", [*FAST, *SLOW])
def test_ids_and_pixels_equal_those_of_the_class(model_type: str, folders: Any) -> None:
    folder = folders(model_type)
    processor = opened(folder)
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    for samples in ([ONE], [TWO], [ONE, TWO], [ONE, [], TWO]):
        conversations = [conversation(len(images)) for images in samples]
        expected = reference_inputs(model_type, folder, conversations, samples)
        inputs = processor.inputs(samples)
        assert inputs.keys() == expected.keys() - OF_TEXT
        for name, tensor in inputs.items():
            wanted = expected[name]
            if len(tensor) < len(wanted):  # of SmolVLM, which has a row for each sample
                wanted = wanted[[bool(images) for images in samples]]
            assert torch.equal(tensor, wanted), name
        for row, images in enumerate(samples):
            text = text_of(folder, conversations[row])
            [ids] = tokenizer.tokenize([text], allow_special=True)
            sizes = [image.size for image in images]
            if processor.joins_text:
                replacements = iter(processor.replacements(sizes))
                first, *others = text.split(processor.token)
                whole = first + "".join(next(replacements) + other for other in others)
                [expanded] = tokenizer.tokenize([whole], allow_special=True)
            else:
                expansions = iter(processor.expansions(sizes))
                placed = [next(expansions) if i == processor.token_id else [i] for i in ids]
                expanded = sum(placed, [])
            kept = expected["attention_mask"][row] == 1
            assert expanded == expected["input_ids"][row][kept].tolist()
            for name in {"mm_token_type_ids", "token_type_ids"} & expected.keys():
                types = expected[name][row][kept].tolist()
                assert processor.token_types(np.array(expanded)).tolist() == types


def test_text_that_joins_is_found(folders: Any) -> None:
    """The line breaks around an image of Gemma 3 are in one token with one before them."""
    joining = [name for name in FAST if opened(folders(name)).joins_text]
    assert joining == ["gemma3"]


def test_digest_covers_files_and_files_are_exported(folders: Any, tmp_path: Path) -> None:
    processor = opened(folders("qwen3_vl"))
    assert sorted(processor.files) == ["preprocessor_config.json", "processor_config.json"]
    folder = vision_folder("qwen3_vl", tmp_path)
    assert opened(folder).fingerprint == processor.fingerprint
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0, 0, 0]}))
    assert opened(folder).fingerprint != processor.fingerprint


def test_another_pillow_gives_another_digest(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pixels may differ: findings/pillow_resizes_vertically_first.sh."""
    processor = opened(folders("qwen3_vl"))
    version = importlib.metadata.version
    others = {"pillow": "12.2.0"}
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: others.get(name) or version(name)
    )
    assert opened(folders("qwen3_vl")).fingerprint != processor.fingerprint


@pytest.mark.parametrize(
    ("torchvision", "message"),
    [
        (None, "image_back_end torchvision: torchvision is not installed; install the version"),
        pytest.param(
            ModuleType("torchvision"),
            "Qwen2VLImageProcessorPil is computed with pillow only",
            marks=WITHOUT_TORCHVISION,
        ),
    ],
)
def test_a_back_end_that_is_absent_is_refused(
    folders: Any,
    monkeypatch: pytest.MonkeyPatch,
    torchvision: ModuleType | None,
    message: str,
) -> None:
    """The module is one that transformers does not take for installed."""
    folder = folders("qwen3_vl")
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    with pytest.raises(UserError, match=message):
        ImageProcessor.from_folder(folder, tokenizer, "torchvision")
    chosen = ImageProcessor.from_folder(folder, tokenizer, "pillow")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert opened(folder).fingerprint == chosen.fingerprint


def test_a_torchvision_of_another_torch_is_named(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("qwen3_vl")
    module = tmp_path / "torchvision.py"
    module.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(UserError, match=r"torchvision::nms does not exist.*uninstall it"):
        opened(folder)


def test_class_of_the_model_type_is_the_default(folders: Any, tmp_path: Path) -> None:
    """Older folders name no class of the processor."""
    folder = vision_folder("qwen3_vl", tmp_path)
    (folder / "processor_config.json").unlink()
    sizes = [(64, 48)]
    assert opened(folder).expansions(sizes) == opened(folders("qwen3_vl")).expansions(sizes)


def test_folder_that_transformers_saves_is_the_same(folders: Any, tmp_path: Path) -> None:
    """The newest folders have both configurations in processor_config.json."""
    reference_processor("gemma3", folders("gemma3")).save_pretrained(tmp_path)
    saved, processor = opened(tmp_path), opened(folders("gemma3"))
    assert list(saved.files) == ["processor_config.json"]
    assert saved.expansions([(9, 9)]) == processor.expansions([(9, 9)])
    assert torch.equal(*(each.inputs([TWO])["pixel_values"] for each in (saved, processor)))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("processor_config.json", None, "has no processor_config.json or preprocessor_config.json"),
        ("processor_config.json", {"processor_class": "os.system"}, "which transformers does not"),
        pytest.param(
            "preprocessor_config.json",
            {"image_processor_type": "Llama4ImageProcessor"},
            "torchvision",
            marks=WITHOUT_TORCHVISION,
        ),
        ("preprocessor_config.json", {"merge_size": "two"}, "Qwen3VLProcessor"),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<no>"}}, "'<no>'"),
    ],
)
def test_wrong_folder_is_refused(
    name: str, changes: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    folder = vision_folder("qwen3_vl", tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    path = folder / name
    if changes is None:
        path.unlink()
        (folder / "preprocessor_config.json").unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        ImageProcessor.from_folder(folder, tokenizer)


def test_refused_images_are_named(folders: Any) -> None:
    processor = opened(folders("qwen3_vl"))
    with pytest.raises(UserError, match="refuses images of 4000 x 2 pixels.*aspect ratio"):
        processor.expansions([(4000, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["emu3", "mllama"])
def test_a_token_before_each_text_is_warned_of_once(
    model_type: str, folders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders(model_type)
    warn_of_beginning.cache_clear()
    for _ in range(2):
        ImageProcessor.from_folder(folder, PretrainedTokenizer.Config().build(path=folder))
    assert caplog.text.count("begins each text with") == 1


def test_threads_keep_their_texts(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts count the tokens of images while another thread reads a batch."""
    folder = folders("qwen3_vl")
    processor = ImageProcessor.from_folder(folder, PretrainedTokenizer.Config().build(path=folder))
    expected = processor.replacements([(64, 48)])
    opened = processor.form.opened
    call, is_first = opened.call, [True]

    def call_beside_another(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        if is_first and is_first.pop():
            other = threading.Thread(target=processor.inputs, args=([TWO],))
            other.start()
            other.join()
        return outputs

    monkeypatch.setattr(opened, "call", call_beside_another)
    processor.form._cached.cache_clear()
    assert processor.replacements([(64, 48)]) == expected
