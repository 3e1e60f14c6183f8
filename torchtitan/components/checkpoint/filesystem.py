"""Checkpoint folders on a disk or in any fsspec store (s3://, gs://, memory://, …)."""

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.files import MOST_JSON_BYTES, is_url, open_regular
from torchtitan.tools.logging import logger
from torchtitan.tools.redact import HIDDEN, hide_credentials_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

DCP_METADATA = ".metadata"
"""File that torch.distributed.checkpoint (DCP) writes last."""

_INDIRECT = ("reference:", "generic:")
"""Schemes of fsspec whose files name other files to read, anywhere; `::` chains them with a
store."""

_LASTING = (FileNotFoundError, PermissionError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING_STATUS = (408, 425, 429)
"""Answers of a server that is asked too early or too often."""

UNFINISHED = ".partial"
"""Suffix of a folder that is being written or removed."""

UNPUBLISHED = ".tmp"
"""Suffix of a marker that is not valid until it is renamed."""


class StoreError(OSError, UserError):
    """A store that does not answer, or refuses. Code that continues after an `OSError` catches
    this error; uncaught, it is a message of one line."""

    @classmethod
    def of(cls, url: str, error: BaseException) -> "StoreError":
        remedy = "check the URL, the network, and the store's credentials in the environment"
        return cls(f"{url} cannot be reached, or refuses access: {cause_of(error)}; {remedy}")


def cause_of(error: BaseException) -> str:
    """Return in one line why a store's library failed. fsspec's HTTP store raises
    `FileNotFoundError` for any cause."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return cause_of(error.__cause__)
    # of aiohttp, whose message has the whole URL
    if (status := getattr(error, "status", None)) is not None:
        return f"the server answers {status} {getattr(error, 'message', '')}".rstrip()
    return in_words(error)


def read_document(folder: "Folder", name: str) -> bytes:
    """Return the content of a file that is read as a whole, such as JSON. Raise `OSError` if it
    cannot be read, and `UserError` for more bytes than such a file may have."""
    with folder.open(name) as file:
        content = file.read(MOST_JSON_BYTES + 1)
    if len(content) > MOST_JSON_BYTES:
        raise UserError(f"{folder}/{name} has more than {MOST_JSON_BYTES:,} bytes")
    return content


def is_lasting(error: BaseException) -> bool:
    """Return whether the same request fails again: no such file or host, no permission, a full
    disk, or no regular file."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in _PASSING_STATUS
    is_unknown_host = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
    if is_unknown_host or isinstance(error, OSError) and error.errno in _FULL:
        return True
    cause = error.__cause__
    if isinstance(cause, UserError) and not isinstance(cause, StoreError):  # see `LocalFolder.open`
        return True
    # Only servers of HTTP and the system say more than the store's own error. The causes of other
    # stores' errors are exceptions of their libraries.
    is_telling = isinstance(cause, OSError) or isinstance(getattr(cause, "status", None), int)
    return is_lasting(cause) if cause and is_telling else type(error) in _LASTING


def check_access(url: str, store: "AbstractFileSystem", path: str) -> None:
    """Raise `StoreError` if a store does not answer, or refuses access to a path, which may be
    missing. fsspec's HTTP store lists nothing then."""
    try:
        store.info(path)
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            raise StoreError.of(url, error) from error
    except Exception as error:
        raise StoreError.of(url, error) from error


def folder_at(path: "AnyFolder") -> "Folder":
    """Return the folder at a path or URL, existing or not. Raise `UserError` if no installed
    library opens the URL."""
    if isinstance(path, Folder):
        return path
    text = os.fspath(path)
    if not is_url(text) or text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")))
    return RemoteFolder(text.rstrip("/"))


@contextlib.contextmanager
def errors_logged(message: str) -> Iterator[None]:
    """Log an `OSError` inside the block as a warning that begins with `message`, and continue after
    the block."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", message, error)


def resolve_folder(dump_folder: str, folder: str) -> "Folder":
    """Return `folder` inside `dump_folder`; a URL or an absolute path is used as is."""
    return folder_at(folder) if is_url(folder) else LocalFolder(Path(dump_folder) / folder)


@dataclasses.dataclass(frozen=True)
class LocalFolder:
    """Folder on a disk, with the operations that checkpoints need; also an `os.PathLike`."""

    path: Path

    can_rename: ClassVar[bool] = True
    """True if folders can be renamed atomically."""

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> "LocalFolder":
        return LocalFolder(self.path.parent)

    def exists(self) -> bool:
        return self.path.is_dir()

    def folders(self) -> list[str]:
        """Return the names of the subfolders; none if the folder does not exist."""
        return (
            [entry.name for entry in self.path.iterdir() if entry.is_dir()] if self.exists() else []
        )

    def files(self) -> dict[str, int]:
        """Return relative name → bytes of every file in the folder and its subfolders."""
        files = (path for path in sorted(self.path.rglob("*")) if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def has_file(self, name: str) -> bool:
        return (self.path / name).is_file()

    def open(self, name: str) -> io.BufferedIOBase:
        """Open the file `name` for reading. Errors while it is open are `OSError`s."""
        try:
            return open_regular(self.path / name)
        except UserError as error:  # for example a pipe; reading it would block
            if isinstance(error.__cause__, FileNotFoundError):
                raise FileNotFoundError(str(error)) from error
            raise OSError(str(error)) from error

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop` or the end of the file."""
        with self.open(name) as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, name: str, content: bytes) -> None:
        """Write the file `name` atomically and durably."""
        durable.write(self.path / name, content)

    def create(self) -> None:
        """Create the folder and its parents."""
        durable.make_folder(self.path)

    def remove(self, first: str) -> None:
        """Remove the folder. If interrupted, the folder has been renamed, or the file `first`
        removed."""
        shutil.rmtree(self.path if self.name.endswith(UNFINISHED) else self._set_aside())

    def sync(self, name: str) -> None:
        """Flush the file `name`, written by other code, to the disk."""
        durable.sync(self.path / name)

    def publish(self, name: str, marker: str, content: bytes) -> "LocalFolder":
        """Rename the folder to `name`, replacing any folder of that name; the file `marker` appears
        last."""
        # Written before the rename, so that a full disk raises an error before a checkpoint is
        # replaced.
        self.write(f"{marker}{UNPUBLISHED}", content)
        for folder in [path for path in self.path.rglob("*") if path.is_dir()]:
            durable.sync_folder(folder)
        final = self.parent / name
        replaced = final._set_aside() if final.exists() else None
        try:
            self.path.rename(final.path)
            (final.path / f"{marker}{UNPUBLISHED}").replace(final.path / marker)
        except BaseException:
            if final.exists():
                final.path.rename(self.path)
            if replaced:
                replaced.rename(final.path)
            raise
        # The checkpoint is complete. If this sync fails, a power failure may still lose it, so the
        # save counts as failed, and no older checkpoint is removed.
        for changed in (final, final.parent):
            durable.sync_folder(changed.path)
        if replaced:
            with errors_logged(
                f"{final} is saved, but the checkpoint it replaces could not be removed"
            ):
                shutil.rmtree(replaced)
        return final

    def _set_aside(self) -> Path:
        """Rename the folder to its name during removal, in case the removal is interrupted; return
        the new path."""
        aside = self.path.with_name(f"{self.name}.removed{UNFINISHED}")
        if aside.exists():
            shutil.rmtree(aside)
        self.path.rename(aside)
        return aside

    @contextlib.contextmanager
    def fill(self) -> Iterator[Path]:
        """Yield a local folder. When the block ends, its contents are in this folder."""
        yield self.path


@dataclasses.dataclass(frozen=True)
class RemoteFolder:
    """Like `LocalFolder`, but at a URL. It cannot be renamed, so only its marker shows whether it
    is complete."""

    url: str

    can_rename: ClassVar[bool] = False

    def __post_init__(self) -> None:
        open_store(self.url)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemoteFolder":
        return RemoteFolder(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        with self._store() as (store, root):
            return store.isdir(root)

    def folders(self) -> list[str]:
        with self._store() as (store, root):
            entries = store.ls(root, detail=True) if store.isdir(root) else []
            return [
                entry["name"].rstrip("/").rpartition("/")[2]
                for entry in entries
                if entry["type"] == "directory"
            ]

    def files(self) -> dict[str, int]:
        with self._store() as (store, root):
            files = store.find(root, detail=True)
            # HTTP lists none
            unknown = {path for path, entry in files.items() if entry.get("size") is None}
            sizes = {
                path: store.size(path) if path in unknown else files[path]["size"]
                for path in sorted(files)
            }
            return {path.removeprefix(root).lstrip("/"): size for path, size in sizes.items()}

    def has_file(self, name: str) -> bool:
        with self._store() as (store, root):
            return store.isfile(f"{root}/{name}")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[io.BufferedIOBase]:
        with self._store() as (store, root), store.open(f"{root}/{name}", "rb") as file:
            yield file

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._store() as (store, root):
            content: bytes = store.cat_file(f"{root}/{name}", start=start, end=stop)
            return content

    def write(self, name: str, content: bytes) -> None:
        with self._store() as (store, root):
            store.pipe_file(f"{root}/{name}", content)

    def write_new(self, name: str, content: bytes) -> None:
        """Write the file `name`. Raise `FileExistsError` if it exists. In stores without
        conditional writes, fsspec looks for the file first, and another process may write it in
        between."""
        with self._store() as (store, root):
            store.pipe_file(f"{root}/{name}", content, mode="create")

    def create(self) -> None:
        with self._store() as (store, root):
            store.makedirs(root, exist_ok=True)

    def remove(self, first: str) -> None:
        with self._store() as (store, root):
            if store.isfile(f"{root}/{first}"):
                store.rm_file(f"{root}/{first}")
            store.rm(root, recursive=True)

    def sync(self, name: str) -> None:
        """Do nothing: files in a store are durable as soon as they are visible."""

    def publish(self, name: str, marker: str, content: bytes) -> "RemoteFolder":
        assert name == self.name
        self.write(marker, content)
        return self

    @contextlib.contextmanager
    def fill(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
            for name in LocalFolder(Path(temporary)).files():
                self.write(name, (Path(temporary) / name).read_bytes())

    @contextlib.contextmanager
    def _store(self) -> Iterator[tuple["AbstractFileSystem", str]]:
        """Yield fsspec's file system and the folder's path in it. The cache is cleared, since other
        processes change the store. Errors of the store's library become `StoreError`s, except for
        what a caller may expect."""
        try:
            store, root = open_store(self.url)
            store.invalidate_cache()
            yield store, root
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except Exception as error:
            raise StoreError.of(self.url, error) from error


def open_store(url: str) -> tuple["AbstractFileSystem", str]:
    """Return fsspec's file system and the path in it, for a URL or a local path. Raise `UserError`
    if no installed library opens the URL, or the store does not answer."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    if not is_url(url):  # `::` in a path would mean a chain of stores
        return LocalFileSystem(), url
    if f"://{HIDDEN}@" in url:
        raise UserError(
            f"{url} lacks its credentials, which files of a run never contain; set them in the "
            "environment of the store's library, or repeat the option"
        )
    hide_credentials_of(url)
    if "::" in url or url.startswith(_INDIRECT):
        raise UserError(
            f"{url} names a store that reads other files, or runs templates in them; name the "
            "files' URL"
        )
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be opened with the installed libraries: {error}") from error
    except Exception as error:  # some stores connect here
        raise StoreError.of(url, error) from error


Folder = LocalFolder | RemoteFolder

AnyFolder = str | os.PathLike[str] | Folder
