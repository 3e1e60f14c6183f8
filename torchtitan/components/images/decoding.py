"""Pixels of encoded images: decoded with Pillow, within limits, and without formats that run
programs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.sources.rows import first_line
from torchtitan.components.images.remote import MOST_BYTES
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""Formats of Pillow. Others are seldom images of training data, and some run programs: EPS runs
Ghostscript."""

_WITH_PREVIEWS = "MPO"
"""JPEG of cameras and telephones. The first picture is the photograph; others are previews, depths
or gains."""

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations in EXIF data that exchange width and height."""

_SIXTEEN_BIT_GRAY = ("I;16", "I;16L", "I;16B", "I;16N")
_WITHOUT_RANGE = {"I": "32-bit integers", "F": "floating-point numbers"}
"""Modes whose values have no known range."""


def decoded(content: bytes) -> "Image.Image":
    """Return an encoded image in RGB, turned as its EXIF data says.

    Pixels with alpha are blended with white, as by the processors of transformers if they receive
    such an image; its function `load_image`, which processors use for paths, drops alpha instead,
    and so shows colors that no viewer does. Gray values of 16 bits keep their upper 8 bits, as
    Pillow does for colors of 16 bits; transformers makes all above 255 white. CMYK is converted as
    Pillow does, without color profiles.

    Raise `BrokenSample` with the reason for other content, and for an image that is damaged, is
    too large, or is one of several in its file.
    """
    with _opened(content) as image:
        return _to_rgb(_upright(image))


def size_of(content: bytes) -> tuple[int, int]:
    """Return width and height of the image that `decoded` returns. Raise `BrokenSample` as it does,
    also for damage to pixels: JPEG is decoded to an eighth of its size, which reads all of the file
    in a third of the time. Call it in one thread at a time, since it changes the process's filters
    of warnings meanwhile."""
    with _bombs_as_errors(), _opened(content) as image:
        width, height = image.size
        # Pillow turns the size of a TIFF, and its pixels, by itself.
        turns = image.format != "TIFF" and image.getexif().get(_ORIENTATION) in _TURNED
        image.draft(image.mode, (1, 1))
        _to_rgb(_upright(image))
    return (height, width) if turns else (width, height)


@contextmanager
def _opened(content: bytes) -> "Iterator[Image.Image]":
    """Open an encoded image, whose pixels are not decoded before they are needed. Raise
    `BrokenSample` with the reason if this fails, or the block fails to decode it."""
    if not content:
        raise BrokenSample("it is empty")
    if len(content) > MOST_BYTES:
        raise BrokenSample(
            f"it has {len(content):,} bytes, and may have {MOST_BYTES:,} at most; reduce it"
        )
    pillow = _pillow()
    with _reasons(pillow):
        image = pillow.open(BytesIO(content), formats=_FORMATS)
        if 0 in image.size:
            raise BrokenSample("it has 0 pixels")
        n_frames = getattr(image, "n_frames", 1)
        if n_frames > 1 and image.format != _WITH_PREVIEWS:
            raise BrokenSample(
                f"it has {n_frames} frames, and only one can be trained; save one as an image"
            )
        yield image


@contextmanager
def _bombs_as_errors() -> Iterator[None]:
    """Turn Pillow's warning about too many pixels into an error, and ignore other warnings, such as
    for unknown EXIF data. Not for `decoded`, since any change of filters makes Python repeat the
    warnings of all modules, which it shows once otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", _pillow().DecompressionBombWarning)
        yield


@contextmanager
def _reasons(pillow: ModuleType) -> Iterator[None]:
    """Turn errors of Pillow into `BrokenSample`."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except BrokenSample:
        raise
    except UnidentifiedImageError:
        raise BrokenSample(
            f"it is not an image of a known format, or is damaged ({', '.join(_FORMATS)})"
        ) from None
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise BrokenSample(
            f"it has more than {pillow.MAX_IMAGE_PIXELS:,} pixels; reduce it ({first_line(error)})"
        ) from None
    except Exception as error:  # damage may cause any error in Pillow
        raise BrokenSample(f"it cannot be decoded ({first_line(error)})") from error


def _upright(image: "Image.Image") -> "Image.Image":
    from PIL import ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    return image


def _to_rgb(image: "Image.Image") -> "Image.Image":
    if image.mode in _WITHOUT_RANGE:
        raise BrokenSample(
            f"its pixels are {_WITHOUT_RANGE[image.mode]} without a known range; convert it to 8 "
            "bits"
        )
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    if image.mode in _SIXTEEN_BIT_GRAY:
        if has_alpha:
            raise BrokenSample("it has 16-bit gray values with alpha; convert it to 8 bits")
        image = _upper_bits(image)
    if not has_alpha:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = _pillow().new("RGBA", image.size, "white")
    return _pillow().alpha_composite(white, image).convert("RGB")


def _upper_bits(image: "Image.Image") -> "Image.Image":
    import numpy as np

    return _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "images need the package Pillow (pip install 'torchtitan[vision]', or EXTRA=vision "
            "./run_train.sh)"
        ) from error
    return Image
