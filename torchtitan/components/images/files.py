"""Encoded images that rows name or contain."""

import base64
import binascii
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from torchtitan.components.data.finetuning.conversation import BrokenSample, shortened
from torchtitan.components.data.sources.rows import kind_of
from torchtitan.components.images.decoding import decoded, size_of
from torchtitan.components.images.remote import MOST_BYTES, RemoteImages
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import (
    is_file_name,
    is_stored_in,
    is_url,
    read_regular,
    regular_file,
    without_query,
)
from torchtitan.tools.redact import redact

if TYPE_CHECKING:
    from PIL import Image

_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""Starts of JPEG, PNG, GIF and WebP in base64."""

_BLANKS = re.compile(r"\s+")

PROMPT = "torchtitan.prompt"
"""Key of the prompt in `Image.info`, Pillow's dictionary of what belongs to an image. Files of some
image generators have a `prompt` of their own there."""


class ImageFile(NamedTuple):
    """Encoded image of a row."""

    path: str
    """Absolute path; empty if the row contains the image."""
    content: bytes
    """Encoded image if the row contains it, otherwise empty."""
    digest: str
    """XXH3 (128 bits, hexadecimal) of the encoded image."""
    width: int
    """Pixels of the image that `decode` returns."""
    height: int
    prompt: str = ""
    """Text that the model reads together with the image, such as a question, if its class does so;
    see `ImageForm.with_prompt`."""

    def to_json(self) -> dict[str, object]:
        """Return a value for JSON, with the content in base64."""
        return {**self._asdict(), "content": base64.b64encode(self.content).decode()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ImageFile":
        """Return the image of a `to_json` value."""
        return cls(**{**value, "content": base64.b64decode(value["content"])})

    def decode(self) -> "Image.Image":
        """Return the image in RGB, see `decoded`, with its prompt, if it has one, at `PROMPT` in
        `info`. Raise `UserError` if its file was changed or removed since its row was read."""
        content = self.content
        if self.path:
            try:
                content = read_regular(Path(self.path), most=MOST_BYTES)
            except (OSError, UserError) as error:
                raise UserError(
                    f"the image {self.path} cannot be read, but could when its row was tokenized: "
                    f"{getattr(error, 'strerror', None) or error}; restore it, {_OR_AGAIN}"
                ) from error
        if _digest(content) != self.digest:
            raise UserError(
                f"the image {self.path or 'of a row'} has changed since its row was tokenized; "
                f"restore it, {_OR_AGAIN}"
            )
        try:
            image = decoded(content)
        except BrokenSample as error:  # by another version of Pillow
            raise UserError(f"the image {self.path or 'of a row'}: {error}; replace it") from error
        if self.prompt:
            image.info[PROMPT] = self.prompt
        return image


_OR_AGAIN = "or set another --dataloader.cache_dir to tokenize the rows again"


def _digest(content: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128(content).hexdigest()


class ImageOpener:
    """Opens the images of rows.

    Args:
        folder: the data's folder, which contains all files that rows name, or None.
        image_root: folder instead of `folder`; empty: none.
        remote: fetches images behind URLs; None: such images are refused.

    Raises:
        UserError: `image_root` is not a folder.
    """

    def __init__(
        self,
        folder: Path | None,
        image_root: str = "",
        remote: RemoteImages | None = None,
    ):
        self._remote = remote
        if image_root:
            folder = Path(image_root).expanduser()
            if not folder.is_dir():
                raise UserError(
                    f"--dataloader.image_root {image_root!r} is not a folder; use the one that "
                    "contains the images that rows name"
                )
        self.folder = folder.absolute() if folder else None
        """Folder of relative paths, which no path may leave."""

    @property
    def fetches(self) -> bool:
        return self._remote is not None

    def prefetch(self, references: Iterable[object]) -> None:
        """Fetch the remote images among references at the same time; `open` reports failures."""
        if self._remote is not None:
            texts = (_text_in(reference) for reference in references)
            self._remote.prefetch({text for text in texts if text and _is_remote(text)})

    def open(self, reference: object) -> ImageFile:
        """Return the image of a row's reference: a path, `file:` or data URL, content (bytes, or
        base64 in JSON), or an object with one of these, as in a column of `datasets`
        (`{"bytes": …, "path": …}`), OpenAI's (`{"url": …}`) or Anthropic's (`{"type": "base64",
        "data": …}`) format. Raise `BrokenSample` with the reason, without the image's number."""
        if isinstance(reference, (bytes, bytearray, memoryview)):
            return _image_file("", bytes(reference))
        if isinstance(reference, str):
            return self._open_text(reference)
        if not isinstance(reference, Mapping):
            raise BrokenSample(
                f"it must be a path, a URL, bytes or an object with one of these, not "
                f"{kind_of(reference)}"
            )
        key = filled_key(reference)
        if key is None:
            keys = ", ".join(map(str, reference))
            raise BrokenSample(
                f"it has none of {', '.join(REFERENCE_KEYS)}, but {keys or 'no key'}"
            )
        value = reference[key]
        if key in ("bytes", "data") and isinstance(value, str):
            return _image_file("", _from_base64(value))
        return self.open(value)

    def _open_text(self, text: str) -> ImageFile:
        if text.startswith("data:"):
            return _image_file("", _from_data_url(text))
        if text.startswith("file:"):
            return self._open_path(_path_in_url(text))
        if is_url(text):
            return self._open_url(text)
        if text.startswith(_BASE64_STARTS) and not self._is_inside(text):
            return _image_file("", _from_base64(text))
        return self._open_path(text)

    def _open_url(self, url: str) -> ImageFile:
        if self._remote is None:
            raise BrokenSample(
                f"{shown_url(url)} is a remote URL, which only training with "
                "--dataloader.fetch_images fetches; or download it, and name the file"
            )
        try:
            path = self._remote.fetch(url)
            content = read_regular(path, most=MOST_BYTES)
            try:
                return _image_file(str(path), content)
            except BrokenSample:
                path.unlink(missing_ok=True)  # so that it is fetched again after its repair
                raise
        except BrokenSample as error:
            raise BrokenSample(f"{shown_url(url)}: {error}") from error

    def _is_inside(self, name: str) -> bool:
        return self.folder is not None and is_file_name(name) and os.path.isfile(self.folder / name)

    def name_of(self, reference: object) -> str | None:
        """Return the path in a reference; None for content and for a remote URL."""
        while isinstance(reference, Mapping):
            key = filled_key(reference)
            if key is None or key in ("bytes", "data"):
                return None
            reference = reference[key]
        if not isinstance(reference, str) or not is_file_name(reference):
            return None
        is_file_url = reference.startswith("file:")
        if reference.startswith("data:") or (is_url(reference) and not is_file_url):
            return None
        is_content = reference.startswith(_BASE64_STARTS) and not self._is_inside(reference)
        return None if is_content else reference

    def file_of(self, name: str) -> Path | None:
        """Return the file of a `name_of` result; None if `open` refuses it."""
        try:
            path = self._path_of(_path_in_url(name) if name.startswith("file:") else name)
        except BrokenSample:
            return None
        return path if os.access(path, os.R_OK) else None

    def _path_of(self, name: str) -> Path:
        """Return the path of a regular file that may be read. Raise `BrokenSample`."""
        if not is_file_name(name):
            raise BrokenSample(f"{shortened(name)} is not a path of a file")
        if self.folder is None:
            raise BrokenSample(
                f"{shortened(name)} is a path, but the data has no folder of its own; set "
                "--dataloader.image_root"
            )
        path = self.folder / name
        if not is_stored_in(self.folder, path):
            raise BrokenSample(
                f"{path} is outside the folder {self.folder}; set --dataloader.image_root to a "
                "folder that contains all images, or move it"
            )
        try:
            if not regular_file(path).exists():
                raise BrokenSample(f"{path} does not exist")
        except UserError as error:
            raise BrokenSample(str(error)) from error
        return path

    def _open_path(self, name: str) -> ImageFile:
        path = self._path_of(name)
        try:
            content = read_regular(path, most=MOST_BYTES)
        except UserError as error:
            raise BrokenSample(str(error)) from error
        except OSError as error:
            raise BrokenSample(f"{path} cannot be read: {error.strerror}") from error
        try:
            return _image_file(str(path), content)
        except BrokenSample as error:
            raise BrokenSample(f"{path}: {error}") from error


class GivenImages(ImageOpener):
    """Returns the images of a row that were opened before, in order, whatever the row has in their
    place. `open` raises `BrokenSample` after the last one."""

    def __init__(self, images: Sequence[ImageFile]):
        super().__init__(None)
        self._n_images = len(images)
        self._left = iter(images)

    def open(self, reference: object) -> ImageFile:
        image = next(self._left, None)
        if image is None:
            raise BrokenSample(f"the row has more images than the {self._n_images} given for it")
        return image


REFERENCE_KEYS = ("bytes", "data", "path", "url", "image_url", "image", "source")
"""Keys of objects with an image, the first filled one is used: `datasets` prefers bytes."""


def filled_key(reference: Mapping[str, object]) -> str | None:
    """Return the key of an object with its image; None: it has none."""
    return next((key for key in REFERENCE_KEYS if reference.get(key) not in (None, "", b"")), None)


def _text_in(reference: object) -> str | None:
    """Return the path or URL of a reference; None for content."""
    while isinstance(reference, Mapping):
        reference = reference.get(filled_key(reference) or "")
    return reference if isinstance(reference, str) else None


def _is_remote(text: str) -> bool:
    return is_url(text) and not text.startswith("file:")


def _image_file(path: str, content: bytes) -> ImageFile:
    """Return an image, whose content is kept if it has no path. Damage is found here, not when
    training uses the image."""
    return ImageFile(path, b"" if path else content, _digest(content), *size_of(content))


def shown_url(url: str) -> str:
    """Return a URL for messages, without what may be secret."""
    return shortened(redact(without_query(url)))


def _from_data_url(url: str) -> bytes:
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BrokenSample(f"a data URL must be in base64, not {shortened(header)}")
    return _from_base64(unquote(data))


def _from_base64(text: str) -> bytes:
    data = _BLANKS.sub("", text)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BrokenSample(f"its base64 is broken ({error}): {shortened(text[:100])}") from None


def _path_in_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BrokenSample(f"{shortened(url)} is not a URL ({error})") from None
    if parts.netloc not in ("", "localhost"):
        raise BrokenSample(
            f"{shortened(url)} names the host {parts.netloc!r}; write file:///absolute/path, or a "
            "relative path without file:"
        )
    return unquote(parts.path)
