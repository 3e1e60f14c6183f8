"""Batches of conversations with images."""

import base64
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.test_images import options, write_rows
from tests.tiny_vision import reference_processor, vision_folder
from tests.training import tiny_config
from torchtitan.components.checkpoint.identity import RunIdentity
from torchtitan.components.data.finetuning import row_batches
from torchtitan.components.images.loader import ImageDataLoader
from torchtitan.components.images.preference import ImagePreferenceDataLoader
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.images.rows_loader import processor_of
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.tools.errors import UserError

PLACEHOLDER = "<image>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder("smolvlm", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return PretrainedTokenizer.Config().build(path=model)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    path, *_ = write_rows(tmp_path / "data")
    return path


def build(rows: Path, tokenizer: Tokenizer, seq_len: int = 1024, **fields: Any) -> ImageDataLoader:
    config = ImageDataLoader.Config(dataset=[str(rows)], **fields)
    loader: ImageDataLoader = config.build(
        tokenizer=tokenizer, seq_len=seq_len, local_batch_size=2, seed=1
    )
    return loader


def content(batch: dict[str, Any]) -> list[torch.Tensor]:
    images = batch["images"]
    tensors = [images.tensors[name] for name in sorted(images.tensors)]
    return [batch["input"], batch["labels"], images.token_types_BL, *tensors]


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    for one, other in zip(content(first), content(second), strict=True):
        assert torch.equal(one, other)


def append(rows: Path, question: Any) -> None:
    answer = {"role": "assistant", "content": "yes"}
    row = {"messages": [{"role": "user", "content": question}, answer]}
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_rows_end_with_the_longest_sample(rows: Path, tokenizer: Tokenizer) -> None:
    loader = build(rows, tokenizer, packing="none")
    assert loader.packing_efficiency is None
    lengths = loader.samples.positions[0]
    for _ in range(3):
        batch = next(loader)
        numbers = batch["documents"][:, 0].tolist()
        assert batch["input"].shape == (2, lengths[numbers].max())
        assert batch["attention"].n_tokens_B is None or (
            batch["attention"].n_tokens_B.tolist() == lengths[numbers].tolist()
        )


def test_image_tokens_are_inputs_and_no_labels(rows: Path, tokenizer: Tokenizer) -> None:
    batch = next(build(rows, tokenizer))
    is_image = batch["images"].token_types_BL.bool()
    assert is_image.any()
    assert (batch["labels"][:, :-1][is_image[:, 1:]] == -100).all()


@pytest.mark.parametrize("packing", ["ffd", "multipack"])
def test_packed_windows_have_the_images_of_their_samples(
    rows: Path, tokenizer: Tokenizer, packing: str
) -> None:
    """Each document of a window has the tokens and pixels that its sample has in a row alone."""
    alone, packed = (
        build(rows, tokenizer, seq_len=200, packing=name) for name in ("none", packing)
    )
    assert packed.packing_efficiency > 0.7
    n_documents = 0
    for batch in (next(packed), next(packed)):
        lengths = batch["attention"].lengths
        tokens = batch["input"].flatten().split(lengths)
        labels = batch["labels"].flatten().split(lengths)
        types = batch["images"].token_types_BL.flatten().split(lengths)
        places = iter(zip(tokens, labels, types, strict=True))
        pixels = []
        for numbers in batch["documents"].tolist():
            members = [number for number in numbers if number >= 0]
            n_documents += len(members)
            for number in members:
                single = alone.batch_of([alone.sample_name(number)])
                ids, label, type_ids = next(places)
                assert torch.equal(ids, single["input"][0])
                assert torch.equal(label, single["labels"][0])
                assert torch.equal(type_ids, single["images"].token_types_BL[0])
                if single["images"].tensors:
                    pixels.append(single["images"].tensors["pixel_values"][0])
            if sum(alone.samples.positions[0][members]) < 200:
                assert (next(places)[1] == -100).all()  # padding
        found = batch["images"].tensors["pixel_values"]
        found = [part[part.flatten(1).any(1)] for part in found]  # without images of padding
        assert all(torch.equal(one, other) for one, other in zip(found, pixels, strict=True))
    assert n_documents > 4


@pytest.mark.parametrize("packing", ["ffd", "none"])
def test_the_position_is_exact(rows: Path, tokenizer: Tokenizer, packing: str) -> None:
    loader = build(rows, tokenizer, seq_len=200, packing=packing)
    next(loader)
    state = loader.state_dict()
    expected = [next(loader) for _ in range(3)]
    resumed = build(rows, tokenizer, seq_len=200, packing=packing)
    resumed.load_state_dict(state)
    for batch in expected:
        assert_equal(next(resumed), batch)


def test_workers_make_the_same_batches(rows: Path, tokenizer: Tokenizer) -> None:
    alone, shared = build(rows, tokenizer), build(rows, tokenizer, num_workers=1)
    try:
        for _ in range(2):
            assert_equal(next(shared), next(alone))
    finally:
        shared.close()


def test_an_image_that_changed_is_named(rows: Path, tokenizer: Tokenizer) -> None:
    loader = build(rows, tokenizer)
    for path in rows.parent.glob("*.png"):
        with Image.open(path) as image:
            size = image.size
        Image.new("RGB", size, "red").save(path)
    with pytest.raises(UserError, match=r"[0-9]-[0-9]\.png.*changed"):
        for _ in range(2):
            next(loader)


def test_another_image_is_other_data(rows: Path, tokenizer: Tokenizer, monkeypatch: Any) -> None:
    state = build(rows, tokenizer).state_dict()
    Image.new("RGB", (40, 56), "red").save(rows.parent / "0-0.png")
    monkeypatch.setenv("TORCHTITAN_CACHE", str(rows.parent / "other"))
    assert build(rows, tokenizer).state_dict()["data"] != state["data"]


@pytest.mark.parametrize("too_long", ["drop", "truncate_left", "truncate_right"])
def test_images_are_not_cut(rows: Path, tokenizer: Tokenizer, too_long: str) -> None:
    whole = build(rows, tokenizer)
    lengths = whole.samples.positions[0]
    limit = int(np.sort(lengths)[-2])
    loader = build(rows, tokenizer, seq_len=limit, too_long=too_long)
    assert loader.samples.positions[0].tolist() == [n for n in lengths.tolist() if n <= limit]
    assert loader.samples.sets[0].report.dropped["too_long"].count == 1


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (f"What is {PLACEHOLDER}?", "1 placeholders for images, and the row has 0"),
        ([{"type": "image", "image": "none.png"}, {"type": "text", "text": "?"}], "image 1"),
    ],
)
def test_unusable_rows_are_dropped_with_the_reason(
    rows: Path, tokenizer: Tokenizer, question: Any, reason: str
) -> None:
    append(rows, question)
    report = build(rows, tokenizer, broken="drop").samples.sets[0].report
    assert report.rows == 5
    assert report.kept == 4
    assert reason in "\n".join(report.lines())


def test_an_image_that_the_processor_refuses_breaks_its_row(
    rows: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expansions = ImageProcessor.expansions

    def refusing(self: ImageProcessor, sizes: Any) -> Any:
        if (64, 48) in sizes:
            raise UserError("it refuses images of 64 x 48 pixels")
        return expansions(self, sizes)

    monkeypatch.setattr(ImageProcessor, "expansions", refusing)
    report = build(rows, tokenizer, broken="drop").samples.sets[0].report
    assert report.kept == 3
    assert "rows.jsonl:2: it refuses images of 64 x 48 pixels" in "\n".join(report.lines())


def test_tokens_of_images_in_a_text_break_its_row(
    rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Gemma 3's placeholder is another token than those that stand for an image."""
    folder = vision_folder("gemma3", tmp_path_factory.mktemp("gemma3"))
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    processor = processor_of(tokenizer)
    [token] = set(range(tokenizer.vocab_size)) & set(processor.form.image_ids) - {
        processor.token_id
    }
    append(rows, f"What is {tokenizer.decode([token])}?")
    report = build(rows, tokenizer, broken="drop").samples.sets[0].report
    assert report.kept == 4
    assert "tokens that stand for parts of images" in "\n".join(report.lines())


def test_images_are_not_trained_with_all_turns(rows: Path, tokenizer: Tokenizer) -> None:
    loader = build(rows, tokenizer, train_on="all")
    assert loader.samples.sets[0].report.kept == 4
    for _ in range(2):
        batch = next(loader)
        is_image = batch["images"].token_types_BL.bool()
        assert (batch["labels"][:, :-1][is_image[:, 1:]] == -100).all()


@pytest.mark.parametrize(
    "kind", [ImageDataLoader, ImagePreferenceDataLoader, ImagePromptDataLoader]
)
def test_a_run_does_not_resume_with_another_back_end(
    rows: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def identity(back_end: str) -> dict[str, Any]:
        config = kind.Config(dataset=[str(rows)], image_back_end=back_end)
        return config.identity()  # type: ignore[no-any-return]

    monkeypatch.setitem(sys.modules, "torchvision", None)
    before = identity("auto")
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    assert RunIdentity(identity("pillow"), {"steps": 1}).describe_differences(before) == []
    for back_end in ("auto", "torchvision"):
        found = RunIdentity(identity(back_end), {"steps": 1}).describe_differences(before)
        assert found == ["dataloader.image_back_end was pillow and is torchvision"]


def test_all_parts_of_a_loader_compute_with_the_chosen_back_end(
    rows: Path, tokenizer: Tokenizer
) -> None:
    processor_of.cache_clear()
    next(build(rows, tokenizer, image_back_end="pillow"))
    processor_of(tokenizer, "pillow")
    assert processor_of.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallelism__pipeline_parallel_degree": 2}, "it reads images"),
        ({"model__train": ["vision", "vision"]}, "name at least one part, and each once"),
        (
            {"model__train": ["vision"], "config": "sft"},
            "--model.train vision: this configuration trains on text",
        ),
    ],
)
def test_what_images_exclude_is_refused(
    tmp_path: Path, model: Path, rows: Path, fields: dict[str, Any], message: str
) -> None:
    config = tiny_config(tmp_path, **options(model, rows, **fields))
    with pytest.raises(UserError, match=message):
        config.check(world_size=2)


def test_a_model_of_text_is_refused(tmp_path: Path, stories: Path, rows: Path) -> None:
    with pytest.raises(UserError, match=r"reads no images; use --config sft or lora"):
        tiny_config(tmp_path, **options(stories, rows)).check(world_size=1)


def test_data_with_images_is_not_prepared(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.cli.data import data

    words = ["prepare", str(rows), "--out", str(tmp_path / "out"), "--module", "auto"]
    assert data([*words, "--config", "sft_images", "--hf_assets_path", str(model)]) == 2
    assert "data with images cannot be prepared" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rows_with_large_images_are_tokenized_in_small_batches(
    rows: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = base64.b64encode((rows.parent / "1-0.png").read_bytes()).decode()
    for _ in range(3):
        append(rows, [{"type": "image", "image": f"data:image/png;base64,{content}"}])
    config = ImageDataLoader.Config(dataset=[str(rows)])
    [(source, format)] = config.rows()
    encoder = config.encoder(tokenizer, config.find_template(tokenizer))
    monkeypatch.setattr(row_batches, "BATCH_BYTES", 1)
    batches = row_batches.BatchEncoder(format, encoder, config.filters()).batches(
        source.rows(lambda n_bytes: None)
    )
    sizes = [len(batch) for batch in batches]
    assert sizes[1:] == [1, 1] and sizes[0] > 1


def test_texts_with_images_have_the_tokens_of_the_processor(
    rows: Path, model: Path, tokenizer: Tokenizer
) -> None:
    """As documents of pre-training: all tokens but those of images are trained."""
    texts = ["A cat and <image>, or <image> a dog.", "<image>\nTwo cats", "dogs <image>"]
    images = [["1-0.png", "1-1.png"], ["0-0.png"], ["3-0.png"]]
    path = rows.parent / "texts.jsonl"
    lines = [{"text": text, "images": names} for text, names in zip(texts, images, strict=True)]
    special = {"text": f"cats {tokenizer.decode([tokenizer.eos_id])} <image>", "image": "0-0.png"}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, special]))
    loader = build(path, tokenizer, broken="drop")
    report = loader.samples.sets[0].report
    assert report.kept == 3
    assert "its text has special tokens" in "\n".join(report.lines())

    processor = reference_processor("smolvlm", model)
    for number, (text, names) in enumerate(zip(texts, images, strict=True)):
        opened = [Image.open(rows.parent / name).convert("RGB") for name in names]
        written = text.replace("<image>", processor.image_token)
        expected = processor(text=[written], images=[opened], return_tensors="np")
        [ids] = expected["input_ids"].tolist()
        sample = loader.samples.sets[0].sample(number).parts[0]
        found = sample.ids.tolist()
        found = found[found[0] == tokenizer.bos_id :]
        ids = ids[ids[0] == tokenizer.bos_id :]
        assert found == [*ids, tokenizer.eos_id]
        trained = sample.ids[sample.trained].tolist()
        words = tokenizer.tokenize(text.split("<image>"), allow_special=False)
        assert trained == [*itertools.chain(*words), tokenizer.eos_id]
    assert next(loader)["images"].n_images > 0
