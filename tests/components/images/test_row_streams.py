"""Streamed rows of fine-tuning with images: the samples and pixels of copied data, and exact
resumption."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components.data.finetuning.test_streams import (
    check_resumption,
    hub,  # noqa: F401
    read_all,
)
from tests.components.images.test_remote import Server
from tests.components.images.test_streams import bytes_of, image_of
from tests.tiny_vision import vision_folder
from torchtitan.components.data.finetuning.streams import RowStreamDataLoader
from torchtitan.components.images.loader import ImageDataLoader
from torchtitan.components.images.preference import (
    ImageAnswerDataLoader,
    ImagePreferenceDataLoader,
    ImageRewardDataLoader,
)
from torchtitan.components.images.prompts import ImagePromptDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.tools.errors import UserError

datasets = pytest.importorskip("datasets")

LOADERS = [
    ImageDataLoader,
    ImagePreferenceDataLoader,
    ImageAnswerDataLoader,
    ImageRewardDataLoader,
    ImagePromptDataLoader,
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = vision_folder("smolvlm", tmp_path_factory.mktemp("model"))
    return PretrainedTokenizer.Config().build(path=str(folder))


def row_of(kind: Any, number: int) -> dict[str, Any]:
    """Return a row with one image, or none."""
    ask, say = f"What is number {number}?", "cats and dogs "[: 4 + number % 9]
    text = {"prompt": ask, "chosen": say, "rejected": "I do not know"}
    if kind is ImageDataLoader:
        text = {"prompt": ask, "completion": say}
    return {**text, "image": image_of(number)}


def write_images(folder: Path, kind: Any, count: int = 11) -> None:
    """Write rows to two parquet files, with images as `datasets` stores them."""
    folder.mkdir()
    rows = [row_of(kind, number) for number in range(count)]
    columns = {name: datasets.Value("string") for name in rows[0]}
    features = datasets.Features({**columns, "image": datasets.Image()})
    for number in range(2):
        part = datasets.Dataset.from_list(rows[number::2], features=features)
        part.to_parquet(folder / f"train-{number:05d}-of-00002.parquet")


def build(config: Any, tokenizer: Tokenizer, **runtime: Any) -> Any:
    return config.build(tokenizer=tokenizer, **{"seq_len": 512, "local_batch_size": 1, **runtime})


def content(batch: Any) -> list[Any]:
    """Return tokens, labels and pixels, or prompts and the images of each."""
    if "prompts" in batch:
        return [batch["prompts"], batch["prompt_images"], batch["documents"].tolist()]
    names = ("input", "labels", "sequences", "margins", "mismatched_labels", "documents")
    pixels = (batch[name].tensors for name in ("images", "mismatched_images") if name in batch)
    sums = [[value.double().sum().item() for value in one.values()] for one in pixels]
    return [[batch[name].tolist() for name in names if name in batch], sums]


@pytest.mark.parametrize("kind", LOADERS)
def test_streams_have_the_samples_of_copies(
    hub: Path,  # noqa: F811
    tmp_path: Path,
    tokenizer: Tokenizer,
    kind: Any,
) -> None:
    """One in each window, so that a window has the same padding in both."""
    write_images(hub / "photos", kind)
    options = {"dataset": ["hub/photos"], "cache_dir": str(tmp_path)}
    if kind is not ImagePromptDataLoader:
        options |= {"packing": "none"}
    found = []
    for streamed in ({}, {"stream": "all", "shuffle_buffer": 4}):
        loader = build(kind.Config(**options, **streamed), tokenizer, epochs=1)
        assert isinstance(loader, RowStreamDataLoader) == bool(streamed)
        windows: Counter[str] = Counter()
        for batch in read_all(loader):
            del batch["documents"]
            windows[json.dumps(content({**batch, "documents": torch.zeros(0)}))] += 1
        found.append(windows)
    assert found[0] == found[1]
    assert found[0].total() == 11


@pytest.mark.parametrize(
    "kind", [ImageDataLoader, ImagePreferenceDataLoader, ImagePromptDataLoader]
)
def test_resumption_is_exact(
    hub: Path,  # noqa: F811
    tmp_path: Path,
    tokenizer: Tokenizer,
    kind: Any,
) -> None:
    """Of two streams without weights; windows are packed."""
    for name in ("photos", "more"):
        write_images(hub / name, kind, count=5)
    config = kind.Config(dataset=["hub/photos", "hub/more"], stream="all", shuffle_buffer=2)
    config.cache_dir = str(tmp_path)
    batches = check_resumption(
        config, lambda config, **options: build(config, tokenizer, **options), content
    )
    assert len(set(map(json.dumps, batches))) > 5


def test_prompts_of_streams_are_answered_with_their_images(
    hub: Path,  # noqa: F811
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    write_images(hub / "photos", ImagePromptDataLoader)
    options = {"dataset": ["hub/photos"], "cache_dir": str(tmp_path)}
    for streamed in ("none", "all"):
        loader = build(ImagePromptDataLoader.Config(**options, stream=streamed), tokenizer)
        assert loader.image_reader().image_ids and not loader.packs_answers
        assert loader.answer_batch_maker() is not None


def test_paths_and_urls_follow_the_rules_of_copies(
    hub: Path,  # noqa: F811
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path is relative to `image_root`; a URL is fetched once, with the option; broken rows are
    counted."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server({"0.png": [(200, bytes_of(0))]})
    (photos := tmp_path / "photos").mkdir()
    (photos / "2.png").write_bytes(bytes_of(2))
    (hub / "named").mkdir()
    references = [server.url("0.png"), "2.png", "absent.png"]
    rows = [{"prompt": "What?", "completion": "It.", "image": one} for one in references]
    (hub / "named/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dataset": ["hub/named"], "stream": "all", "cache_dir": str(tmp_path)}
    config = ImageDataLoader.Config(**options, packing="none", image_root=str(photos))
    with pytest.raises(UserError, match="row 1: .*is a remote URL.*fetch_images"):
        next(build(config, tokenizer))
    config.fetch_images = True
    with pytest.raises(UserError, match="hub/named, row 3: image 1: .*absent.png"):
        next(build(config, tokenizer))
    config.broken = "drop"
    batches = read_all(build(config, tokenizer, epochs=2))
    server.close()
    assert server.requests == {"0.png": 1}
    pixels = Counter(sum(content(batch)[1][0]) for batch in batches)
    assert sorted(pixels.values()) == [2, 2]  # each of two images in each of two epochs
