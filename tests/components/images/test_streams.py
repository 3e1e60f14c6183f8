"""Streamed texts with images: against the class of transformers on the same documents, and exact
resumption."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.components.images.test_remote import Server
from tests.models.test_images import options
from tests.tiny_vision import reference_processor, vision_folder
from tests.training import read_metrics, train
from torchtitan.components.data.sources.source import HubDataset, register_dataset
from torchtitan.components.images import remote
from torchtitan.components.images.streams import ImageStreamDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

datasets = pytest.importorskip("datasets")

SEQ_LEN = 96
SIZES = [(40, 56), None, (64, 48), (30, 70), None, (20, 90), (56, 56)]
"""Size of the image of each document, if it has one."""


def image_of(number: int) -> Image.Image | None:
    size = SIZES[number % len(SIZES)]
    if size is None:
        return None
    values = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def text_of(number: int) -> str:
    return f"number {number} is " + "good " * (number % 4)


def register(folder: Path, name: str, rows: list[dict[str, Any]], n_files: int = 2) -> str:
    """Write rows to parquet files, with a column of images as `datasets` stores them, and register
    them as a dataset to stream."""
    folder.mkdir()
    features = datasets.Features({"caption": datasets.Value("string"), "image": datasets.Image()})
    for number in range(n_files):
        part = datasets.Dataset.from_list(rows[number::n_files], features=features)
        part.to_parquet(folder / f"train-{number:05d}-of-{n_files:05d}.parquet")
    register_dataset(name, HubDataset(path=str(folder)))
    return name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder("qwen3_vl", tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [{"caption": text_of(number), "image": image_of(number)} for number in range(21)]
    return register(tmp_path_factory.mktemp("stream") / "data", "image-stream-test", rows)


def config_of(dataset: str, **more: Any) -> ImageStreamDataLoader.Config:
    values = {"columns": ["text=caption"], "shuffle_buffer": 5, **more}
    config = ImageStreamDataLoader.Config(dataset=[dataset], **values)
    config.validate()
    return config


def build(config: ImageStreamDataLoader.Config, model: Path, **runtime: Any) -> Any:
    tokenizer = PretrainedTokenizer.Config().build(path=str(model))
    return config.build(
        tokenizer=tokenizer, **{"seq_len": SEQ_LEN, "local_batch_size": 2, **runtime}
    )


def documents_in(batches: list[Any]) -> Counter[tuple[int, ...]]:
    """Return the input tokens of all documents, without padding."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        bounds = batch["attention"].cu_seqlens.tolist()
        flat, labels = batch["input"].flatten(), batch["labels"].flatten()
        for first, last in zip(bounds, bounds[1:], strict=False):
            if (labels[first:last] != -100).any():
                found[tuple(flat[first:last].tolist())] += 1
    return found


def expected_document(model: Path, number: int) -> tuple[int, ...]:
    """Return the tokens of a document by transformers' processor, with the end of a text after it,
    which is predicted only."""
    call = reference_processor("qwen3_vl", model)
    image = image_of(number)
    text = ("<|image_pad|>" if image else "") + text_of(number)
    inputs = call(text=[text], images=[[image]] if image else None)
    return tuple(inputs["input_ids"][0])


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1)])
def test_every_document_once_per_epoch(dataset: str, model: Path, ranks: int, workers: int) -> None:
    batches: list[Any] = []
    n_images = 0
    for rank in range(ranks):
        config = config_of(dataset, num_workers=workers)
        loader = build(config, model, dp_rank=rank, dp_world_size=ranks, epochs=1)
        while True:
            batch = next(loader, None)
            if batch is None or loader.exhausted:
                break
            batches.append(batch)
            n_images += batch["images"].n_images
        loader.close()
    expected = Counter(expected_document(model, number) for number in range(21))
    assert documents_in(batches) == expected
    assert n_images == sum(SIZES[number % len(SIZES)] is not None for number in range(21))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_resumption_is_exact(dataset: str, model: Path, workers: int) -> None:
    def lists(batch: Any) -> list[Any]:
        pixels = batch["images"].tensors.get("pixel_values", torch.zeros(0))
        names = ("input", "labels", "documents")
        return [*(batch[name].tolist() for name in names), pixels.sum().item()]

    config = config_of(dataset, num_workers=workers)
    whole = build(config, model, epochs=2)
    states, batches = [whole.state_dict()], []
    for batch in whole:
        batches.append(lists(batch))
        states.append(whole.state_dict())
    whole.close()
    for place in (0, 1, len(batches) // 2, len(batches) - 1):
        again = build(config, model, epochs=2)
        again.load_state_dict(states[place])
        assert [lists(batch) for batch in again] == batches[place:]
        again.close()
    assert len(batches) > 4


def test_streams_without_weights_are_read_once_per_epoch(
    dataset: str, model: Path, tmp_path: Path
) -> None:
    rows = [{"caption": f"other {number}", "image": None} for number in range(9)]
    other = register(tmp_path / "data", "image-stream-once", rows)
    config = ImageStreamDataLoader.Config(
        dataset=[dataset, other], columns=["text=caption"], shuffle_buffer=5
    )
    config.validate()
    whole = build(config, model, epochs=2)
    states, batches = [whole.state_dict()], []
    for batch in whole:
        batches.append(batch)
        states.append(whole.state_dict())
    counts = sorted(documents_in(batches).values())
    alone = [build(config_of(name), model, epochs=1) for name in (dataset, other)]
    once = [documents_in(list(loader)) for loader in alone]
    assert documents_in(batches) == Counter(
        {document: 2 * count for found in once for document, count in found.items()}
    )
    assert sum(counts) == 2 * 30
    again, place = build(config, model, epochs=2), 2 * len(batches) // 3  # in the second epoch
    again.load_state_dict(states[place])
    rest = [batch["input"].tolist() for batch in again]
    assert rest == [batch["input"].tolist() for batch in batches[place:]]


def test_weights_of_streams_can_change(dataset: str, model: Path, tmp_path: Path) -> None:
    rows = [{"caption": f"other {number}", "image": None} for number in range(21)]
    other = register(tmp_path / "data", "image-stream-other", rows)
    values = {"columns": ["text=caption"], "shuffle_buffer": 5}
    config = ImageStreamDataLoader.Config(dataset=[dataset, other], weights=[1.0, 1.0], **values)
    loader = build(config, model)
    loader.set_weights([0.0, 1.0])
    sets = [loader.datasets_of(next(loader)).unique().tolist() for _ in range(4)]
    loader.close()
    assert sets == [[1]] * 4


@pytest.mark.slow
def test_loss_equals_that_of_the_class(dataset: str, model: Path, tmp_path: Path) -> None:
    """The mean over the tokens of all documents, except those of images; in float32."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    more = {
        "config": "pretrain_images",
        "dataloader__dataset": [dataset],
        "dataloader__columns": ["text=caption"],
        "dataloader__shuffle_buffer": 32,
        "training__epochs": 1,
        "training__seq_len": 1024,
        "training__local_batch_size": 1,
    }
    packed = {key: value for key, value in options(model, tmp_path).items() if "packing" not in key}
    train(tmp_path / "run", **packed | more)
    [(_, loss)] = read_metrics(tmp_path / "run", "loss")
    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    call, total, n_labels = reference_processor("qwen3_vl", model), 0.0, 0
    for number in range(21):
        image = image_of(number)
        text = ("<|image_pad|>" if image else "") + text_of(number)
        inputs = call(text=[text], images=[[image]] if image else None, return_tensors="pt")
        extra = {"input_ids": end, "attention_mask": 1, "mm_token_type_ids": 0}
        inputs = {
            name: torch.cat((value, torch.full((1, 1), extra[name])), 1) if name in extra else value
            for name, value in inputs.items()
        }
        is_image = inputs["input_ids"] == reference.config.image_token_id
        labels = inputs["input_ids"].masked_fill(is_image, -100)
        n = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(reference(**inputs, labels=labels).loss) * n
        n_labels += n
    assert loss == pytest.approx(total / n_labels, rel=1e-5)


def bytes_of(number: int) -> bytes:
    buffer = io.BytesIO()
    image = image_of(number)
    assert image is not None
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_bad_rows_are_named_or_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"caption": "a", "image": {"bytes": b"no image", "path": None}},
        {"caption": "b " * 400, "image": {"bytes": bytes_of(0), "path": None}},
        {"caption": "c " * 400, "image": {"bytes": bytes_of(0), "path": None}},
        {"caption": "whole", "image": {"bytes": bytes_of(0), "path": None}},
    ]
    name = register(tmp_path / "data", "image-stream-broken", rows, n_files=1)
    with pytest.raises(UserError, match=f"dataset '{name}': image 1: .*dataloader.broken drop"):
        list(build(config_of(name), model, epochs=1))
    with caplog.at_level("WARNING"):
        batches = list(build(config_of(name, broken="drop"), model, epochs=1))
    assert sum(documents_in(batches).values()) == 1
    # At the second one, and of all at the end of the epoch.
    for counts in ("1 broken, 1 too long", "1 broken, 2 too long"):
        assert f"documents dropped so far by reader 1 of 1: {counts}" in caplog.text
    bad = register(tmp_path / "bad", "image-stream-all-broken", rows[:3], n_files=1)
    with pytest.raises(UserError, match="all documents were dropped"):
        list(build(config_of(bad, broken="drop"), model, epochs=1))


def test_other_data_is_refused(model: Path, tmp_path: Path, dataset: str) -> None:
    local = tmp_path / "rows.jsonl"
    local.write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="train on local texts with images with --config sft_imag"):
        config_of(str(local)).sources()
    folder = tmp_path / "chats"
    folder.mkdir()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    datasets.Dataset.from_list([{"messages": turns}]).to_parquet(folder / "train.parquet")
    register_dataset("image-stream-chats", HubDataset(path=str(folder)))
    with pytest.raises(
        UserError, match="has conversations, .*--config sft_images --dataloader.stream all"
    ):
        list(build(config_of("image-stream-chats", columns=[]), model, epochs=1))


def test_runs_that_fetch_images_train_on_other_data(model: Path, dataset: str) -> None:
    loaders = [build(config_of(dataset, fetch_images=fetch), model) for fetch in (False, True)]
    assert loaders[0].state_dict()["data"] != loaders[1].state_dict()["data"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_images_behind_urls_are_fetched_once(
    workers: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with the option; the pixels equal the file's, also in the second epoch."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    images = {f"{number}.png": [(200, bytes_of(number))] for number in (0, 2)}
    server = Server({**images, "absent.png": [(404, b"no")]})
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"caption": name, "image": server.url(name)} for name in [*images, "absent.png"]]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    name = f"image-stream-urls-{workers}"
    register_dataset(name, HubDataset(path=str(folder)))
    values = {"cache_dir": str(tmp_path / "cache"), "num_workers": workers, "shuffle": False}
    with pytest.raises(UserError, match="image 1: .*/0.png' is a remote URL.*fetch_images"):
        list(build(config_of(name, **values), model, epochs=1))
    values |= {"fetch_images": True}
    with pytest.raises(UserError, match="image 1: .*/absent.png'?: .*HTTP status 404"):
        list(build(config_of(name, **values), model, epochs=1))
    batches = list(build(config_of(name, **values, broken="drop"), model, epochs=2))
    server.close()
    assert server.requests == {"0.png": 1, "2.png": 1, "absent.png": 3}
    call = reference_processor("qwen3_vl", model)
    once = call(text=["<|image_pad|>" * 2], images=[[image_of(0), image_of(2)]])["pixel_values"]
    found = torch.cat([batch["images"].tensors["pixel_values"] for batch in batches])
    assert torch.equal(found, torch.as_tensor(once).float().repeat(2, 1))
