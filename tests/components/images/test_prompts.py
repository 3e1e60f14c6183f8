"""Prompts with images."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_images import write_rows
from tests.tiny_vision import vision_folder
from torchtitan.cli.data_samples import samples_of
from torchtitan.components.data.finetuning.prompts import prompts_in
from torchtitan.components.images.encoder import encode_prompt
from torchtitan.components.images.files import ImageFile
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.images.rows_loader import processor_of
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.tools.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = vision_folder("smolvlm", tmp_path_factory.mktemp("model"))
    return PretrainedTokenizer.Config().build(path=folder)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of prompts, with 1, 2, 0 and 2 images."""
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    path, *_ = write_rows(tmp_path / "data")
    conversations = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    prompts = [
        {"messages": messages[:-1], "answer": str(number)}
        for number, messages in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return path


def build(rows: Path, tokenizer: Tokenizer, seq_len: int = 1024, **fields: Any) -> Any:
    config = ImagePromptDataLoader.Config(dataset=[str(rows)], **fields)
    return config.build(tokenizer=tokenizer, seq_len=seq_len, local_batch_size=2, seed=1)


def test_prompts_have_the_tokens_of_their_images(rows: Path, tokenizer: Tokenizer) -> None:
    """As in generation from images."""
    loader = build(rows, tokenizer)
    processor = processor_of(tokenizer)
    prompts = prompts_in(next(loader)) + prompts_in(next(loader))
    assert sorted(len(prompt.images) for prompt in prompts) == [0, 1, 2, 2]
    for prompt in filter(lambda prompt: prompt.images, prompts):
        images = [ImageFile.from_json(image) for image in prompt.images]
        content = prompt.row["messages"][-1]["content"]
        parts = [{"type": "image"} if part["type"] == "image" else part for part in content]
        text = loader.template.render(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        rendered = tokenizer.tokenize([text], allow_special=True)[0]
        expected, _ = encode_prompt(processor, tokenizer, rendered, images)
        assert prompt.ids == expected
        reader = loader.image_reader()
        reader.check(prompt.ids, images)
        with pytest.raises(UserError, match="tokens of images"):
            reader.check([*prompt.ids, processor.token_id], images)


def test_all_parts_of_a_loader_compute_with_the_chosen_back_end(
    rows: Path, tokenizer: Tokenizer
) -> None:
    processor_of.cache_clear()
    loader = build(rows, tokenizer, image_back_end="pillow")
    loader.image_reader(), loader.answer_batch_maker()
    processor_of(tokenizer, "pillow")
    assert processor_of.cache_info().currsize == 1


def test_the_position_is_exact(rows: Path, tokenizer: Tokenizer) -> None:
    loader = build(rows, tokenizer)
    next(loader)
    state = loader.state_dict()
    expected = prompts_in(next(loader))
    again = build(rows, tokenizer)
    again.load_state_dict(state)
    assert prompts_in(next(again)) == expected


def test_long_prompts_are_not_cut(rows: Path, tokenizer: Tokenizer) -> None:
    loader = build(rows, tokenizer, seq_len=40, too_long="truncate_left")
    (data,) = loader.samples.sets
    dropped = data.report.dropped["too_long"]
    assert dropped.count == 3
    assert "a sample with images is not cut" in str(dropped.examples)


def test_a_prompt_without_its_placeholder_is_refused(rows: Path, tokenizer: Tokenizer) -> None:
    with rows.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "a <image>"}]}) + "\n")
    with pytest.raises(UserError, match="rows.jsonl:5: the prompt has 1 placeholders for 0 images"):
        build(rows, tokenizer)


def test_samples_show_images(rows: Path, tokenizer: Tokenizer) -> None:
    loader = build(rows, tokenizer)
    samples = samples_of(next(loader), loader, tokenizer) + samples_of(
        next(loader), loader, tokenizer
    )
    shown = {
        sample.answer: sum(
            token.picture is not None
            for row in sample.rows
            for document in row.documents
            for token in document.tokens
        )
        for sample in samples
    }
    assert shown == {"0": 1, "1": 2, "2": 0, "3": 2}
