"""Images with labels: what is read, left out and refused, and their order."""

import io
import json
import logging
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan.components.images.labeled_loader import LabeledImageDataLoader
from torchtitan.tools.errors import UserError

Image = pytest.importorskip("PIL.Image")


def png(value: int, size: tuple[int, int] = (4, 4)) -> bytes:
    content = io.BytesIO()
    Image.new("L", size, value).save(content, "PNG")
    return content.getvalue()


def write_folder(folder: Path, n: int = 10) -> Path:
    """Write n gray images, the k-th of the gray value k, in folders of two classes."""
    for k in range(n):
        path = folder / ("odd" if k % 2 else "even") / f"{k:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(k))
    return folder


def config(dataset: Path | str, cache: Path, **options: Any) -> LabeledImageDataLoader.Config:
    chosen = {"image_size": 4, "channels": 1, **options}
    return LabeledImageDataLoader.Config(dataset=[str(dataset)], cache_dir=str(cache), **chosen)


def values(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return the gray value of each image of a batch."""
    return ((batch["pixels"][:, 0, 0, 0] + 1) * 127.5).round().long().tolist()


def test_folder_of_classes_is_read(tmp_path):
    loader = config(write_folder(tmp_path / "data"), tmp_path, shuffle=False).build(
        local_batch_size=10
    )
    batch = next(loader)
    assert loader.classes == ("even", "odd")
    assert values(batch) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert batch["classes"].tolist() == [0] * 5 + [1] * 5
    assert loader.document_names(batch["documents"][5]) == ["odd/001.png"]
    assert batch["pixels"].dtype == torch.float32


def test_folder_may_be_relative_to_the_working_folder(tmp_path, monkeypatch):
    write_folder(tmp_path / "data", 2)
    monkeypatch.chdir(tmp_path)
    loader = config("data", tmp_path, shuffle=False).build(local_batch_size=2)
    assert values(next(loader)) == [0, 1]


def test_hidden_folders_and_images_are_left_out(tmp_path):
    folder = write_folder(tmp_path / "data", 2)
    for name in (".thumbnails/a.png", "odd/._001.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(png(0))
    loader = config(folder, tmp_path, shuffle=False).build(local_batch_size=2)
    assert loader.classes == ("even", "odd") and values(next(loader)) == [0, 1]


def test_a_folder_has_the_columns_of_the_rows_beside_it(tmp_path):
    folder = write_folder(tmp_path / "images", 2)
    lines = [
        {"photo": f"images/{name}", "kind": Path(name).parent.name}
        for name in ("odd/001.png", "even/000.png")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    columns = {"image_column": "photo", "label_column": "kind", "shuffle": False}
    datasets = config(folder, tmp_path / "cache", **columns)
    datasets.dataset.append(str(tmp_path / "rows.jsonl"))
    assert values(next(datasets.build(local_batch_size=4))) == [0, 1, 1, 0]


def test_rows_name_images_by_path_or_content(tmp_path):
    pandas = pytest.importorskip("pandas")
    folder = write_folder(tmp_path / "images")
    lines = [{"image": f"images/even/{k:03}.png", "label": 9 - k} for k in (0, 2, 8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = [
        {"image": {"bytes": (folder / f"even/{k:03}.png").read_bytes()}, "label": 9 - k}
        for k in (0, 2, 8)
    ]
    pandas.DataFrame(table).to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        loader = config(tmp_path / name, tmp_path / "cache", shuffle=False).build(
            local_batch_size=3
        )
        batch = next(loader)
        assert loader.classes == ("1", "7", "9")
        assert values(batch) == [0, 2, 8]
        assert batch["classes"].tolist() == [2, 1, 0]


@pytest.mark.parametrize("kind", ["cls", "json"])
def test_webdataset_has_labels_beside_images(tmp_path, kind):
    """webdataset's own examples have labels in `.cls`, without any text."""
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        for k in (0, 2, 8):
            label = b"%d\n" if kind == "cls" else b'{"label": %d}'
            for name, content in (("png", png(k)), (kind, label % (9 - k))):
                member = tarfile.TarInfo(f"shard/{k:03}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    data = config(tmp_path / "rows.tar", tmp_path / "cache", shuffle=False)
    loader = data.build(local_batch_size=3)
    batch = next(loader)
    assert loader.classes == ("1", "7", "9")
    assert values(batch) == [0, 2, 8]
    assert batch["classes"].tolist() == [2, 1, 0]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_another_image_under_the_name_in_a_row_is_noticed(tmp_path, form):
    datasets = pytest.importorskip("datasets")
    folder = write_folder(tmp_path / "images", 3)
    names = [f"{'odd' if k % 2 else 'even'}/{k:03}.png" for k in range(3)]
    table = datasets.Dataset.from_dict({"image": names, "label": names})
    rows = folder / f"rows.{form}"
    {"jsonl": table.to_json, "parquet": table.to_parquet}[form](str(rows))

    def read() -> tuple[list[int], dict[str, Any]]:
        chosen = config(rows, tmp_path / "cache", shuffle=False)
        return values(next(chosen.build(local_batch_size=3))), chosen.identity()

    before, identity = read()
    assert (before, identity) == read()
    path = folder / "odd/001.png"
    status = path.stat()
    path.write_bytes(png(200))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after, changed = read()
    assert (before, after) == ([0, 1, 2], [0, 200, 2])
    assert identity != changed  # so that a run on the old image is not resumed


def test_an_image_that_is_repaired_is_used(tmp_path):
    folder = write_folder(tmp_path / "images", 3)
    names = [f"{'odd' if k % 2 else 'even'}/{k:03}.png" for k in range(3)]
    lines = [json.dumps({"image": name, "label": name}) for name in names]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "odd/001.png").rename(tmp_path / "moved")
    options = {"shuffle": False, "broken": "drop"}
    chosen = config(folder / "rows.jsonl", tmp_path / "cache", **options)
    assert values(next(chosen.build(local_batch_size=2))) == [0, 2]
    (tmp_path / "moved").rename(folder / "odd/001.png")
    assert values(next(chosen.build(local_batch_size=3))) == [0, 1, 2]


def test_large_images_are_scaled_and_cut_and_small_ones_are_counted(tmp_path, caplog):
    folder = write_folder(tmp_path / "data", 2)
    pixels = np.zeros((16, 8), np.uint8)
    pixels[4:12] = 200  # the middle square
    Image.fromarray(pixels).save(folder / "odd" / "tall.png")
    (folder / "odd" / "small.png").write_bytes(png(0, (3, 9)))
    with caplog.at_level(logging.WARNING):
        loader = config(folder, tmp_path, shuffle=False).build(local_batch_size=3)
    *others, scaled = values(next(loader))
    # The filter reads a few rows beyond the square that is cut out, which are black.
    assert (others, scaled) == ([0, 1], pytest.approx(200, abs=20))
    assert "1 images are smaller than 4 x 4 pixels: odd/small.png: 3 x 9 pixels" in caplog.text


def test_image_that_cannot_be_read_is_refused_or_counted(tmp_path, caplog):
    folder = write_folder(tmp_path / "data", 2)
    (folder / "odd" / "bad.png").write_bytes(png(0)[:40])
    with pytest.raises(UserError, match=r"odd/bad.png: .*--dataloader.broken drop"):
        config(folder, tmp_path).build(local_batch_size=1)
    with caplog.at_level(logging.WARNING):
        loader = config(folder, tmp_path, broken="drop").build(local_batch_size=1)
    assert loader.document_names(torch.tensor([0, 1])) == ["even/000.png", "odd/001.png"]
    assert "1 images cannot be read: odd/bad.png" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["even"]}, "the label 'odd' is none of the 1 classes even"),
        ({"image_size": 5}, "no image to train on: 10 are smaller than 5 x 5 pixels"),
    ],
)
def test_unusable_data_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        config(write_folder(tmp_path / "data"), tmp_path, **options).build(local_batch_size=1)


def test_row_without_label_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "text": "a"}')
    with pytest.raises(UserError, match="it has no 'label', but image, text"):
        config(tmp_path / "rows.jsonl", tmp_path).build(local_batch_size=1)


def test_an_empty_label_is_not_taken_from_another_column(tmp_path):
    row = {"image": "a.png", "label": None, "cls": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="it has no 'label', but image, label, cls"):
        config(tmp_path / "rows.jsonl", tmp_path).build(local_batch_size=1)


def test_each_epoch_has_every_image_once_in_another_order(tmp_path):
    data = config(write_folder(tmp_path / "data"), tmp_path)
    loader = data.build(local_batch_size=5, seed=3, epochs=2)
    read = [value for batch in loader for value in values(batch)]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))
    assert read[:10] != read[10:]


def test_padding_fills_the_last_batch(tmp_path):
    data = config(write_folder(tmp_path / "data"), tmp_path, shuffle=False)
    loaders = [
        data.build(local_batch_size=3, dp_rank=rank, dp_world_size=2, epochs=1) for rank in (0, 1)
    ]
    batches = [list(loader) for loader in loaders]
    weights = [[batch["weights"].tolist() for batch in of_rank] for of_rank in batches]
    assert weights == [[[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 0, 0]]]


def test_ranks_and_resumed_runs_read_the_same_images_with_the_same_noise(tmp_path):
    data = config(write_folder(tmp_path / "data"), tmp_path)
    alone = data.build(local_batch_size=4, seed=7)
    first, second = next(alone), next(alone)
    ranks = [
        data.build(local_batch_size=2, dp_rank=rank, dp_world_size=2, seed=7) for rank in (0, 1)
    ]
    halves = [next(loader) for loader in ranks]
    state = ranks[0].state_dict()
    for name, whole in first.items():
        assert torch.equal(torch.cat([half[name] for half in halves]), whole), name
    resumed = data.build(local_batch_size=4, seed=7)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    for name, value in next(resumed).items():
        assert torch.equal(value, second[name]), name


def test_changed_data_restarts_reading(tmp_path, caplog):
    folder = write_folder(tmp_path / "data")
    loader = config(folder, tmp_path).build(local_batch_size=2)
    next(loader)
    state = loader.state_dict()
    (folder / "odd" / "001.png").write_bytes(png(99))
    changed = config(folder, tmp_path).build(local_batch_size=2)
    changed.load_state_dict(state)
    assert changed.state_dict()["place"] == 0
    assert "reading starts at the beginning" in caplog.text


def test_blank_batch_has_the_shapes_of_a_batch(tmp_path):
    """A dry run trains on blank batches."""
    data = config(write_folder(tmp_path / "data"), tmp_path)
    batch, blank = next(data.build(local_batch_size=3)), data.blank_batch(3, 1)
    assert {name: (x.shape, x.dtype) for name, x in blank.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items() if name != "documents"
    }
