"""`SequenceCache`: results of a frozen model for the tokens of sequences, on disk."""

import contextlib
import io
import json
import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from torchtitan.components.data.base import Batch
from torchtitan.components.data.disk_cache import block_checksums, evenly_spaced, writable
from torchtitan.components.losses.token_result import TokenResult
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_regular
from torchtitan.tools.logging import logger

FORMAT_VERSION = 2

VERIFIED_FILES = 1024
"""Evenly spaced files of complete data to verify at the start, including the first and the last."""

_MOST_TOKENS = 1 << 22
"""More than a sequence has."""

_MOST_HEADER_BYTES = 1 << 24
"""More than the header of a file of results has, with the checksums of all blocks."""

_MOST_MARK_BYTES = 1 << 31
"""Of a mark: the names of 45 million sequences."""

_CHECKSUMS = "checksums"
_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}\.safetensors")


class _Sequence(NamedTuple):
    file: Path
    place: slice
    """Positions in the flattened batch whose results are in the file."""
    length: int
    is_labeled: Tensor
    """True for positions whose results the loss reads, (n,)."""


class SequenceCache:
    """A folder with a file for each sequence, named by a hash of its tokens, labels and images, and
    of the `setting`, JSON values that writing and reading must have in common. A sequence without
    labels, such as padding, has one of its tokens.

    A file has checksums of its name, of the names, types and shapes of its tensors, and of blocks
    of their values; all are verified whenever the file is read. A damaged one is renamed to
    `NAME.damaged`.

    Args:
        folder: existing or new folder.
        setting: see above.
        results: the tensors of a file, by name.
        verify: verify all files of complete data at the start instead of a sample.
    """

    def __init__(
        self,
        folder: Path,
        setting: object,
        *,
        results: Mapping[str, TokenResult],
        verify: bool = False,
    ):
        self.folder = folder
        self.results = results
        self.verify = verify
        self._setting = json.dumps([FORMAT_VERSION, setting]).encode()
        self._unfinished = folder / "unfinished"
        for file in self._unfinished.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > 3600:  # seconds: its run was killed
                    file.unlink()

    @property
    def bytes_per_token(self) -> int:
        """Size of the results of a token."""
        return sum(
            result.dtype.itemsize * math.prod(result.shape) for result in self.results.values()
        )

    @property
    def _most_bytes(self) -> int:
        """More than the file of a sequence has."""
        return _MOST_TOKENS * self.bytes_per_token + _MOST_HEADER_BYTES

    def mark(self, data: object) -> Path:
        """Return the file that lists the files of all sequences of `data`, JSON values, once these
        are complete."""
        return self.folder / f"{bytes_digest(self._setting + json.dumps(data).encode())}.complete"

    def is_complete(self, mark: Path) -> bool:
        """Return whether all files that a mark lists are there, and `VERIFIED_FILES` of them (all
        if `verify`) are not damaged. Raise `UserError` if a damaged file cannot be renamed."""
        with contextlib.suppress(OSError, ValueError):
            check, *names = read_regular(mark, most=_MOST_MARK_BYTES).decode().splitlines()
            if check != _check_of(names) or not all(map(_NAME.fullmatch, names)):
                logger.warning("%s is damaged; it is rewritten", mark)
                return False
            n_verified = len(names) if self.verify else VERIFIED_FILES
            verified = [
                self.folder / names[number] for number in evenly_spaced(len(names), n_verified)
            ]
            with ThreadPoolExecutor(8) as pool:
                exist = all(pool.map(Path.is_file, (self.folder / name for name in names)))
                are_whole = [*pool.map(self._is_whole, verified)]
            return exist and all(are_whole)
        return False

    def finish(self, mark: Path, names: Iterable[str]) -> None:
        """Write a mark that lists the files of complete data; a complete cache may be read-only."""
        listed = sorted(set(names))
        with contextlib.suppress(UserError):
            self._write(mark, "\n".join([_check_of(listed), *listed, ""]).encode())

    def names(self, batch: Batch) -> set[str]:
        """Return the file of each sequence in a loader's batch, relative to the folder."""
        return {
            sequence.file.relative_to(self.folder).as_posix() for sequence in self._sequences(batch)
        }

    def holds(self, batch: Batch) -> bool:
        """Return whether there is an undamaged file for each sequence of a loader's batch."""
        return all([self._is_whole(sequence.file) for sequence in self._sequences(batch)])

    def write(self, batch: Batch, results: Mapping[str, Tensor]) -> None:
        """Write tensors (B, L, ...) of a loader's batch durably. Raise `UserError` if the folder
        cannot be written, or a result that the loss needs is NaN."""
        rows = {name: result.flatten(0, 1).cpu() for name, result in results.items()}
        for sequence in self._sequences(batch):
            tensors = {name: x[sequence.place].contiguous() for name, x in rows.items()}
            if unusable := _name_with_nan(tensors, sequence.is_labeled):
                raise UserError(
                    f"{unusable} of the frozen model is NaN for a sequence of {sequence.length:,} "
                    f"tokens, so it is not written to {self.folder}; check the weights of the "
                    "model and its precision"
                )
            self._write(sequence.file, _encoded(sequence.file.name, tensors))

    def read(self, batch: Batch) -> Batch:
        """Return the tensors (B, L, ...) of a loader's batch. Raise `UserError` if a file is
        missing or damaged."""
        parts: list[tuple[dict[str, Tensor], int]] = []
        for sequence in self._sequences(batch):
            try:
                tensors = _decoded(sequence.file, self._most_bytes)
                _check_results(tensors, len(sequence.is_labeled), self.results)
                _check_usable(tensors, sequence)
            except (OSError, ValueError) as error:
                raise self._unreadable(sequence.file, error) from error
            parts.append((tensors, sequence.length))
        rows = {
            name: torch.cat(
                [part[name].expand(length, *part[name].shape[1:]) for part, length in parts]
            )
            for name in self.results
        }
        return {name: x.unflatten(0, batch["input"].shape) for name, x in rows.items()}

    def _sequences(self, batch: Batch) -> list[_Sequence]:
        columns = [batch[name] for name in ("input", "labels", "image_keys") if name in batch]
        tokens_NC = torch.stack(columns, dim=-1).flatten(0, 1)
        attention = batch.get("attention") or AttentionMetadata.of_rows(*batch["input"].shape)
        sequences, start = [], 0
        for length in attention.lengths:
            is_labeled = tokens_NC[start : start + length, 1] >= 0
            place = slice(start, start + (length if is_labeled.any() else 1))
            name = bytes_digest(self._setting + tokens_NC[place].numpy().tobytes())
            file = self.folder / name[:2] / f"{name[2:]}.safetensors"
            sequences.append(_Sequence(file, place, length, is_labeled[: place.stop - start]))
            start += length
        return sequences

    def _write(self, file: Path, content: bytes) -> None:
        with writable(file.parent), writable(self._unfinished):
            # several ranks may have the same sequence
            unfinished = self._unfinished / uuid.uuid4().hex
            with durable.new_file(unfinished) as opened:
                opened.write(content)
            durable.replace(unfinished, file)

    def _is_whole(self, file: Path) -> bool:
        """Return whether a file is there and not damaged. Rename a damaged one, with a warning."""
        try:
            tensors = _decoded(file, self._most_bytes)
            n_tokens = max((len(x) for x in tensors.values() if x.ndim), default=0)
            _check_results(tensors, n_tokens, self.results)
        except FileNotFoundError:
            return False
        except ValueError as error:
            aside = self._set_aside(file)
            logger.warning(
                "%s of the cache is damaged (%s); it was renamed to %s and is rebuilt",
                file,
                error,
                aside,
            )
            return False
        except OSError as error:
            cause = error.strerror or error
            raise UserError(f"{file} of the cache cannot be read: {cause}") from error
        return True

    def _set_aside(self, file: Path) -> str:
        aside = file.with_suffix(".damaged")
        # another rank was faster
        with writable(file.parent), contextlib.suppress(FileNotFoundError):
            file.replace(aside)
        return aside.name

    def _unreadable(self, file: Path, error: OSError | ValueError) -> UserError:
        """Return the error for a file that a step needs. Make the next start look for missing
        files."""
        problem = "is missing"
        if not isinstance(error, FileNotFoundError):
            problem = f"is damaged ({error})"
        with contextlib.suppress(OSError, UserError):
            for mark in self.folder.glob("*.complete"):
                mark.unlink(missing_ok=True)
            if isinstance(error, ValueError):
                problem += f"; it was renamed to {self._set_aside(file)}"
        return UserError(
            f"{file} of the cache {problem}; a new start computes missing results, and a run that "
            "resumes needs the global batch size with which it began"
        )


def _check_of(names: list[str]) -> str:
    return bytes_digest("\n".join(names).encode())


def _encoded(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of the file `name`."""
    metadata = {_CHECKSUMS: json.dumps(_checksums(name, tensors))}
    return safetensors.torch.save(dict(tensors), metadata=metadata)


def _decoded(file: Path, most_bytes: int) -> dict[str, Tensor]:
    """Return the tensors of a file. Raise `FileNotFoundError` or another `OSError` if it cannot be
    read, `ValueError` if it is damaged."""
    content = read_regular(file, most=most_bytes)
    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        recorded = json.loads(header["__metadata__"][_CHECKSUMS])
    except (SafetensorError, RuntimeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if recorded != _checksums(file.name, tensors):
        raise ValueError("it has a wrong checksum")
    return tensors


def _checksums(name: str, tensors: Mapping[str, Tensor]) -> list[int]:
    """Return block checksums of a file's name, its tensors' names, types and shapes, and their
    values."""
    described = [
        [key, str(tensors[key].dtype), list(tensors[key].shape)] for key in sorted(tensors)
    ]
    values = [
        tensors[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for key in sorted(tensors)
    ]
    return block_checksums(io.BytesIO(b"".join([json.dumps([name, described]).encode(), *values])))


def _check_results(
    tensors: Mapping[str, Tensor], n_tokens: int, results: Mapping[str, TokenResult]
) -> None:
    """Raise `ValueError` unless a file has a possible result for each of the tokens."""
    if tensors.keys() != results.keys():
        raise ValueError(f"it holds {', '.join(tensors) or 'nothing'}, not {', '.join(results)}")
    for name, (dtype, shape, below) in results.items():
        if (tensors[name].dtype, tensors[name].shape) != (dtype, (n_tokens, *shape)):
            raise ValueError(f"it does not hold {name} of {n_tokens:,} tokens")
        if below is not None and not bool(((tensors[name] >= 0) & (tensors[name] < below)).all()):
            raise ValueError(f"{name} has numbers that are not from 0 to {below - 1:,}")


def _check_usable(tensors: Mapping[str, Tensor], sequence: _Sequence) -> None:
    """Raise `ValueError` for NaN where the loss reads a result."""
    if unusable := _name_with_nan(tensors, sequence.is_labeled):
        raise ValueError(f"{unusable} is NaN")


def _name_with_nan(tensors: Mapping[str, Tensor], is_labeled: Tensor) -> str:
    """Return the name of a tensor that is NaN at a position that the loss reads; empty if all are
    valid."""
    return next((name for name, x in tensors.items() if bool(x[is_labeled].isnan().any())), "")
