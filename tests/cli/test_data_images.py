"""`torchtitan data inspect` shows images in the place of their tokens."""

import base64
import io
import json
import re

import pytest
from PIL import Image
from rich.console import Console

from tests.models.test_caption_images import write_model
from tests.tiny_vision import vision_folder
from torchtitan.cli.data_report import Inspection, page, print_samples
from torchtitan.cli.data_samples import Document, Row, Sample, Token, with_images
from torchtitan.cli.main import main
from torchtitan.components.images.files import ImageFile, ImageOpener

PLACES = {"a": [7, 9, 7], "b": [7, 7], "c": [7, 9, 7]}
"""The ids of images by their name."""


def image(width: int, height: int) -> ImageFile:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(file, "PNG")
    return ImageOpener(None).open(file.getvalue())


def tokens(ids: list[int]) -> list[Token]:
    return [Token(i, f"<{i}>", i == 2, i == 7, place) for place, i in enumerate(ids)]


def shown(ids: list[int], names: str, *sizes: tuple[int, int]) -> list[Token]:
    images = [image(*size) for size in sizes]
    return with_images(tokens(ids), images, [PLACES[name] for name in names])


def test_images_replace_their_tokens_in_order():
    found = shown([1, 7, 9, 7, 2, 7, 7, 7, 9, 7, 3], "abc", (40, 30), (5, 6), (4000, 3000))
    assert [token.text for token in found] == [
        "<1>",
        "[image 40x30: 3 tokens]",
        "<2>",
        "[image 5x6: 2 tokens]",
        "[image 4000x3000: 3 tokens]",
        "<3>",
    ]
    assert [token.position for token in found] == [0, 1, 4, 5, 7, 10]
    assert sum(token.n_tokens for token in found) == 11
    assert [token.trained for token in found] == [False, False, True, False, False, False]


@pytest.mark.parametrize("ids", [[1, 7, 9, 7], [7, 9, 7, 2], [7, 9, 7]])
def test_an_image_may_be_at_an_end(ids):
    [picture] = [token.picture for token in shown(ids, "a", (4, 4)) if token.picture]
    assert picture.n_tokens == 3


def test_tokens_of_an_image_that_is_not_found_stay():
    assert shown([1, 7, 2, 9, 7], "a", (4, 4)) == tokens([1, 7, 2, 9, 7])
    assert shown([1, 2], "") == tokens([1, 2])


@pytest.mark.parametrize(
    ("size", "kind", "reduced"),
    [((8, 8), "png", (8, 8)), ((4000, 1000), "jpeg", (320, 80)), ((100, 640), "jpeg", (50, 320))],
)
def test_the_page_has_thumbnails_and_captions(size, kind, reduced):
    document = Document("rows.jsonl:1", shown([1, 7, 9, 7, 2], "a", size))
    samples = [Sample("rows.jsonl:1", [Row("", [document], 5, 0)])]
    text = page(Inspection(title="t", facts=[], summary=None, samples=samples))
    caption = f"image {size[0]}x{size[1]}: 3 tokens"
    [(found, content)] = re.findall(
        rf'<img src="data:image/(\w+);base64,([A-Za-z0-9+/=]+)" alt="">{caption}</span>', text
    )
    thumbnail = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (found, thumbnail.size) == (kind, reduced)
    assert thumbnail.convert("RGB").getpixel((0, 0))[0] > 250
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert "<tr><th>tokens</th><td>5</td></tr>" in text
    assert "<tr><th>images</th><td>1, with 3 tokens</td></tr>" in text


def test_the_terminal_has_captions():
    written = io.StringIO()
    document = Document("rows.jsonl:1", shown([1, 7, 9, 7, 2], "a", (640, 480)))
    console = Console(file=written, markup=False, highlight=False, width=80)
    print_samples(console, [Sample("", [Row("", [document], 5, 0)])])
    assert "<1>[image 640x480: 3 tokens]⟦<2>⟧" in written.getvalue()


@pytest.mark.slow
def test_the_images_of_a_model_are_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    folder = vision_folder("qwen3_vl", tmp_path / "model")
    for name, size in (("a.png", (640, 427)), ("b.png", (8, 8))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    answer = {"role": "assistant", "content": "Red."}
    rows = [
        {
            "messages": [{"role": "user", "content": "<image> or <image>"}, answer],
            "images": ["a.png", "b.png"],
        },
        {"messages": [{"role": "user", "content": "No <image>"}, answer]},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    options = ["--module", "auto", "--config", "sft_images", "--hf_assets_path", str(folder)]
    options += ["--dataloader.dataset", str(data), "--training.steps", "2"]
    options += ["--html", str(tmp_path / "page.html")]
    assert main(["data", "inspect", *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"<.vision_start.>\[image 640x427: 28 tokens\]<.vision_end.> or ", printed)
    assert "[image 8x8: 4 tokens]" in printed and "No <image>" in printed
    assert (tmp_path / "page.html").read_text().count("<img src=") == 2


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["trocr", "blip"])
def test_images_without_tokens_are_shown_before_their_texts(
    model_type, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    (write_model if model_type == "blip" else vision_folder)(model_type, folder)
    Image.new("RGB", (640, 427), "red").save(tmp_path / "a.png")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"text": "red", "image": "a.png"}) + "\n")
    options = ["--module", "auto", "--config", "sft_images", "--hf_assets_path", str(folder)]
    options += ["--training.seq_len", "32", "--dataloader.dataset", str(data)]
    assert main(["data", "inspect", *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\[image 640x427: 0 tokens\].*⟦red", printed)
    assert re.search(r"images +1, with 0 tokens", printed)


@pytest.mark.slow
def test_the_images_of_pairs_are_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    folder = vision_folder("qwen3_vl", tmp_path / "model")
    Image.new("RGB", (640, 427), "red").save(tmp_path / "a.png")
    row = {"prompt": "Red?", "chosen": "Yes.", "rejected": "No."}
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, [row | {"image": "a.png"}, row])))
    options = ["--module", "preference", "--config", "dpo_images", "--hf_assets_path", str(folder)]
    assert main(["data", "inspect", *options, "--dataloader.dataset", str(data)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("[image 640x427: 28 tokens]") == 2
    assert "rows.jsonl:1 rejected" in printed and "rows.jsonl:2 chosen" in printed
    assert main(["data", "prepare", str(data), "--out", str(tmp_path / "out"), *options]) == 2
    assert "data with images cannot be prepared" in capsys.readouterr().err
