"""Encoded images: where they come from, their pixels, and what is refused."""

import base64
import io
import json
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.images.decoding import decoded
from torchtitan.components.images.files import ImageFile, ImageOpener
from torchtitan.tools.errors import UserError


def photo(width: int = 12, height: int = 8, mode: str = "RGB") -> Image.Image:
    n_channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(0).integers(0, 256, (height, width, n_channels), np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(width: int, height: int, bits: int = 8, color: int = 2, pixels: bytes = b"") -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def turned(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photo(), format, exif=exif)


def palette(**options) -> bytes:
    return encoded(photo().quantize(16), **options)


OPAQUE = {
    "png": encoded(photo()),
    "jpeg": encoded(photo(), "JPEG"),
    **{f"turned {number}": turned(number) for number in range(1, 9)},
    **{f"turned tiff {number}": turned(number, "TIFF") for number in (3, 6, 7)},
    "gray": encoded(photo(mode="L")),
    "black and white": encoded(photo(mode="L").convert("1")),
    "palette": palette(),
    "cmyk jpeg": encoded(photo(mode="CMYK"), "JPEG"),
    "cmyk tiff": encoded(photo(mode="CMYK"), "TIFF"),
    "lab": encoded(photo(mode="LAB"), "TIFF"),
    "webp": encoded(photo(), "WEBP"),
    "gif": encoded(photo(), "GIF"),
    "bmp": encoded(photo(), "BMP"),
    "avif": encoded(photo(), "AVIF"),
    "jpeg 2000": encoded(photo(40, 40), "JPEG2000"),
    "ppm": encoded(photo(), "PPM"),
    "16-bit color": png(2, 1, 16, 2, b"\0" + bytes(range(1, 13))),
    "telephone": encoded(photo(), "MPO", save_all=True, append_images=[photo(4, 4)]),
}

TRANSPARENT = {
    "alpha": encoded(photo(mode="RGBA")),
    "gray alpha": encoded(photo(mode="LA")),
    "webp alpha": encoded(photo(mode="RGBA"), "WEBP", lossless=True),
    "palette with a transparent color": palette(transparency=0),
    "palette with alphas": palette(transparency=bytes(range(0, 160, 10))),
    "color key": encoded(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3)),
    "gray key": encoded(Image.new("L", (4, 4), 7), transparency=7),
    "gif": encoded(photo().quantize(16), "GIF", transparency=0),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_an_opaque_image_has_the_pixels_that_transformers_loads(name, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(OPAQUE[name])
    opened = ImageOpener(tmp_path).open("image")
    theirs = load_image(str(path)).convert("RGB")
    np.testing.assert_array_equal(np.array(opened.decode()), np.array(theirs))
    assert (opened.width, opened.height) == theirs.size
    assert opened.path == str(path) and opened.content == b""


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_transparent_image_is_blended_with_white_as_by_processors(name):
    """`load_image` drops alpha instead: colors that no viewer shows."""
    content = TRANSPARENT[name]
    theirs = convert_to_rgb(Image.open(io.BytesIO(content)), return_numpy=True)
    np.testing.assert_array_equal(np.array(decoded(content)), theirs)


def test_an_invisible_pixel_is_white():
    content = encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 0)))
    assert decoded(content).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_gray_of_16_bits_keeps_its_upper_bits_like_color(format):
    """Pillow, and so transformers, makes all values above 255 white."""
    gray = np.array([[0, 255, 256, 511, 32_767, 65_535]], np.uint16)
    image = decoded(encoded(Image.fromarray(gray), format))
    assert np.array(image)[0].tolist() == [[v, v, v] for v in (0, 0, 1, 1, 127, 255)]


def test_gray_and_color_of_16_bits_are_equal():
    values = [0, 255, 256, 40_000, 65_535]
    gray = b"\0" + b"".join(struct.pack(">H", value) for value in values)
    color = b"\0" + b"".join(struct.pack(">HHH", value, value, value) for value in values)
    images = [decoded(png(5, 1, 16, 0, gray)), decoded(png(5, 1, 16, 2, color))]
    np.testing.assert_array_equal(*map(np.array, images))


def animated(format: str) -> bytes:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "green", "blue")]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:])


BROKEN = {
    "": (b"", "it is empty"),
    "text": (b"<html>404</html>", "not an image of a known format"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image of a known format"),
    "eps, which runs a program": (encoded(photo(), "EPS"), "not an image of a known format"),
    "truncated jpeg": (
        encoded(photo(64, 64), "JPEG")[:-200],
        "cannot be decoded .image file is tr",
    ),
    "truncated png": (encoded(photo(64, 64))[:-200], "cannot be decoded"),
    "no pixels": (png(0, 5), "not an image of a known format, or is damaged"),
    "no pixels, ppm": (b"P6 0 5 255\n", "0 pixels|not an image of a known format"),
    "missing pixels": (png(50, 50), "cannot be decoded"),
    "bomb": (png(60_000, 60_000), "more than 89,478,485 pixels; reduce it"),
    "bomb of which Pillow warns": (png(10_000, 10_000), "more than 89,478,485 pixels; reduce it"),
    **{
        f"animated {format}": (animated(format), "it has 3 frames, and only one can be trained")
        for format in ("GIF", "PNG", "WEBP", "TIFF", "AVIF")
    },
    "32-bit integers": (
        encoded(Image.fromarray(np.zeros((2, 2), np.int32)), "TIFF"),
        "its pixels are 32-bit integers without a known range; convert it to 8 bits",
    ),
    "floating-point numbers": (
        encoded(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"),
        "its pixels are floating-point numbers without a known range",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_refused_with_its_reason(name, tmp_path, recwarn):
    content, reason = BROKEN[name]
    filters = list(warnings.filters)
    with pytest.raises(BrokenSample, match=reason):
        ImageOpener(None).open(content)
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(BrokenSample, match=f"{tmp_path}/x.jpg: .*({reason})"):
        ImageOpener(tmp_path).open("x.jpg")
    assert not recwarn and warnings.filters == filters


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "x.jpg", "wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(BrokenSample, match="x.jpg has 268,435,457 bytes, and may have 268,435,456"):
        ImageOpener(tmp_path).open("x.jpg")


CONTENT = encoded(photo())
BASE64 = base64.b64encode(CONTENT).decode()

CONTAINED = {
    "bytes": CONTENT,
    "bytearray": bytearray(CONTENT),
    "datasets": {"bytes": CONTENT, "path": "a.png"},
    "datasets, as JSON": {"bytes": BASE64, "path": None},
    "data URL": f"data:image/png;base64,{BASE64}",
    "data URL with parameters": f"data:image/png;charset=utf-8;base64,{BASE64}",
    "data URL, quoted": f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('=', '%3D')}",
    "data URL in lines": f"data:image/png;base64,{BASE64[:40]}\n{BASE64[40:]}",
    "OpenAI": {"url": f"data:image/png;base64,{BASE64}", "detail": "high"},
    "OpenAI, nested": {"image_url": {"url": f"data:image/png;base64,{BASE64}"}},
    "Anthropic": {"type": "base64", "media_type": "image/png", "data": BASE64},
    "base64": BASE64,
}


@pytest.mark.parametrize("name", CONTAINED)
def test_an_image_in_its_row_is_opened(name):
    opened = ImageOpener(None).open(CONTAINED[name])
    assert (opened.path, opened.content) == ("", CONTENT)
    assert (opened.width, opened.height) == (12, 8)
    np.testing.assert_array_equal(np.array(opened.decode()), np.array(photo()))
    assert ImageFile.from_json(json.loads(json.dumps(opened.to_json()))) == opened


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for path in (folder / "images/a b.png", folder / "top.png", tmp_path / "outside.png"):
        path.write_bytes(CONTENT)
    (folder / "inner.png").symlink_to("images/a b.png")
    (folder / "outer.png").symlink_to("../outside.png")
    (folder / "dangling.png").symlink_to("nothing.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "outer").symlink_to(tmp_path)
    return folder


def spelled(reference, data: Path):
    return json.loads(json.dumps(reference).replace("DATA", str(data)))


@pytest.mark.parametrize(
    "reference",
    [
        "images/a b.png",
        "./images/a b.png",
        "images/../top.png",
        "inner.png",
        "DATA/images/a b.png",
        "file://DATA/images/a%20b.png",
        "file://localhost/DATA/images/a%20b.png",
        "file:images/a%20b.png",
        {"bytes": None, "path": "images/a b.png"},
        {"url": "file://DATA/top.png"},
        {"path": "top.png"},
        {"image": {"path": "top.png"}},
    ],
)
def test_a_path_inside_the_folder_is_opened(reference, data):
    opened = ImageOpener(data).open(spelled(reference, data))
    assert opened.content == b"" and Path(opened.path).is_absolute()
    assert opened.decode().size == (12, 8)
    assert ImageFile.from_json(json.loads(json.dumps(opened.to_json()))) == opened


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("../outside.png", "is outside the folder .*; set --dataloader.image_root"),
        ("DATA/../outside.png", "is outside the folder"),
        ("outer.png", "is outside the folder"),
        ("outer/outside.png", "is outside the folder"),
        ("/etc/hostname", "/etc/hostname is outside the folder"),
        ("file:///etc/hostname", "/etc/hostname is outside the folder"),
        ("nothing.png", "nothing.png does not exist"),
        ("top.png/x", "top.png/x does not exist"),
        ("dangling.png", "dangling.png is a link to 'nothing.png', which does not exist"),
        ("loop.png", "loop.png cannot be read"),
        ("images", "images is not a regular file"),
        ("pipe.png", "pipe.png is not a regular file"),
        ("secret.png", "secret.png cannot be read: Permission denied"),
        ("", "'' is not a path of a file"),
        ("a\0b", "is not a path of a file"),
        ("\ud800.png", "is not a path of a file"),
        ("x" * 300, "is not a path of a file"),
        ("file://images/top.png", "names the host 'images'; write file:///absolute/path"),
        ("file://[x/a.png", "is not a URL "),
        (
            "https://example.com/a.png",
            "remote URL, which only training with --dataloader.fetch_images",
        ),
        ({"url": "http://example.com/a.png?key=x"}, "'http://example.com/a.png' is a remote URL"),
        ("s3://bucket/a.png", "remote URL"),
        ("https://me:word@example.com/a.png", "^'https://...@example.com/a.png' is a remote URL"),
        ("data:image/svg+xml,<svg/>", "a data URL must be in base64, not 'data:image/svg.xml'"),
        ("data:image/png;base64,???", "its base64 is broken"),
        ("data:image/png;base64,", "it is empty"),
        ({"bytes": "not base64"}, "its base64 is broken"),
        ({"bytes": None, "path": None}, "it has none of bytes, .*, but bytes, path"),
        ({}, "it has none of bytes, .*, but no key"),
        ({"type": "file", "file_id": "1"}, "but type, file_id"),
        (None, "it must be a path, a URL, bytes or an object with one of these, not a NoneType"),
        (5, "not an int"),
        (["top.png"], "not a list"),
    ],
)
def test_a_reference_that_names_no_image_is_refused(reference, reason, data):
    os.mkfifo(data / "pipe.png")
    (data / "secret.png").write_bytes(CONTENT)
    (data / "secret.png").chmod(0)
    if "secret" in str(reference) and os.access(data / "secret.png", os.R_OK):
        pytest.skip("this user may read all files")
    with pytest.raises(BrokenSample, match=reason):
        ImageOpener(data).open(spelled(reference, data) if reference else reference)


def test_without_a_folder_paths_need_an_image_root(data):
    with pytest.raises(
        BrokenSample, match="'top.png' is a path, but the data has no folder of its"
    ):
        ImageOpener(None).open("top.png")
    assert ImageOpener(None, str(data)).open("top.png").width == 12


def test_an_image_root_replaces_the_folder(data):
    opener = ImageOpener(data, str(data.parent))
    assert opener.open("outside.png").path == str(data.parent / "outside.png")
    assert opener.open(str(data / "top.png")).width == 12
    with pytest.raises(UserError, match="--dataloader.image_root 'nothing' is not a folder"):
        ImageOpener(data, "nothing")


def test_the_folder_may_be_a_link(data):
    (data.parent / "link").symlink_to(data)
    assert ImageOpener(data.parent / "link").open("images/a b.png").width == 12


@pytest.mark.parametrize("kind", ["datasets", "models"])
def test_a_snapshot_of_the_hugging_face_cache_links_to_its_blobs(kind, tmp_path):
    repository = tmp_path / f"{kind}--a--b"
    for folder in (repository / "blobs", repository / "snapshots/1/images"):
        folder.mkdir(parents=True)
    (repository / "blobs/0").write_bytes(CONTENT)
    (repository / "snapshots/1/images/x.png").symlink_to("../../../blobs/0")
    (repository / "snapshots/1/outer.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "outside.png").write_bytes(CONTENT)
    opener = ImageOpener(repository / "snapshots/1")
    assert opener.open("images/x.png").width == 12
    with pytest.raises(BrokenSample, match="outside the folder"):
        opener.open("outer.png")


def test_a_base64_text_is_a_path_if_it_names_a_file(tmp_path):
    (tmp_path / "UklGR").write_bytes(CONTENT)
    assert ImageOpener(tmp_path).open("UklGR").path == str(tmp_path / "UklGR")


def test_a_changed_or_removed_file_is_named(data):
    opened = ImageOpener(data).open("top.png")
    (data / "top.png").write_bytes(encoded(photo(12, 9)))
    with pytest.raises(UserError, match="top.png has changed since its row was tokenized; restore"):
        opened.decode()
    (data / "top.png").unlink()
    with pytest.raises(
        UserError, match="top.png cannot be read, but could when .*: No such file.*"
    ):
        opened.decode()
    (data / "top.png").mkdir()
    with pytest.raises(UserError, match="top.png is not a regular file"):
        opened.decode()


def test_decoding_leaves_the_filters_of_warnings_alone(data, monkeypatch):
    opened = ImageOpener(data).open("top.png")
    monkeypatch.setattr(warnings, "catch_warnings", None)
    assert opened.decode().size == (12, 8)


def test_exif_data_that_cannot_be_read_does_not_turn_the_image(recwarn):
    content = encoded(photo(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(content))
        theirs = ImageOps.exif_transpose(image).convert("RGB")
    opened = ImageOpener(None).open(content)
    assert not recwarn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(np.array(opened.decode()), np.array(theirs))
