"""Token ids of many texts as arrays, from the library gigatoken if its ids equal the ids of
`Tokenizer.tokenize`."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from torchtitan.components.tokenizer.interface import Tokenizer
from torchtitan.components.tokenizer.pretrained import PretrainedTokenizer
from torchtitan.components.tokenizer.probes import probe_texts
from torchtitan.components.tokenizer.tiktoken_model import Tiktoken, convert_ranks
from torchtitan.components.tokenizer.tokenizer_json import (
    HuggingFace,
    replace_surrogates,
    suppress_native_errors,
)
from torchtitan.tools.logging import logger

Array = np.ndarray

WORTH_OPENING = {HuggingFace: 1 << 19, Tiktoken: 1 << 24}
"""Characters from which gigatoken saves more time than opening it takes: 0.1 to 0.4 s, and 4 s for
files of ranks, which are converted, and which tiktoken encodes faster than `tokenizers` does."""

WORTH_THREADS = 1 << 25
"""Characters from which batches are encoded in threads. gigatoken then imports awkward, which takes
as long as this many characters in one thread."""

BATCH_CHARACTERS = 1 << 23
"""Characters after which a sample is compared again."""
SAMPLED_TEXTS = 4
SAMPLED_CHARACTERS = 2048
"""Texts of a sample, and characters of each. The tokenizer takes about a tenth of the time for them
that gigatoken takes for `BATCH_CHARACTERS`."""

REOPENED_CHARACTERS = 1 << 27
"""Characters after which gigatoken is opened again, since it remembers all words that it has seen:
about 1 byte per character of usual text, and 10 to 20 of random words."""

_N_VOCABULARY = 2000


class TokenArrays(NamedTuple):
    """Token ids of consecutive texts."""

    ids: Array
    """Ids of all texts, uint32 (n,)."""
    lengths: Array
    """Number of ids of each text, int64 (n_texts,)."""

    def of_texts(self) -> list[Array]:
        """Return the ids of each text, uint32 (n,)."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


class DifferentIds(Exception):
    """gigatoken has other ids than `Tokenizer.tokenize`. Its earlier ids of the same data may also
    be wrong."""

    @property
    def warning(self) -> str:
        """Beginning of the warning by which a caller continues without gigatoken."""
        return f"gigatoken has {self}: text is encoded by the tokenizer's own library from now on"


class ArrayEncoder:
    """Encodes texts like `Tokenizer.tokenize`, but much faster.

    gigatoken is opened when the texts so far are worth it (see `WORTH_OPENING`), and compared with
    the tokenizer: then on texts of the vocabulary, several scripts and code, and on a sample of
    every batch of `BATCH_CHARACTERS`. It parses special and added tokens within a text. If they are
    ordinary text, the texts in which it finds one are encoded by the tokenizer, as are the texts
    that `Tiktoken` divides. Tokenizers that gigatoken refuses, or whose ids it changes, are used as
    they are. A pickled copy opens gigatoken again; forked processes share it.

    Args:
        tokenizer: tokenizer with the right ids.
        allow_special: recognize special tokens in the texts.
    """

    def __init__(self, tokenizer: Tokenizer, *, allow_special: bool = False):
        self.tokenizer = tokenizer
        self._allow_special = allow_special
        self._backend = tokenizer.backend if isinstance(tokenizer, PretrainedTokenizer) else None
        self._fast: Any = None
        """gigatoken's tokenizer, while it is in use."""
        self._load: Callable[[], object] | None = None
        """Opens another one with the same ids."""
        self._is_added: Array = np.zeros(tokenizer.vocab_size, bool)
        """Mask of the ids of special and added tokens, (vocab_size,)."""
        self._n_characters = 0
        self._n_unsampled = BATCH_CHARACTERS
        self._n_remembered = 0
        self._is_closed = False

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_fast": None, "_load": None}

    @property
    def is_fast(self) -> bool:
        """True if gigatoken is in use."""
        return self._fast is not None

    def close(self) -> None:
        """Use the tokenizer itself from now on."""
        self._fast = None
        self._load = None
        self._is_closed = True

    def sample_next(self) -> None:
        """Compare a sample of the next batch, whatever its size."""
        self._n_unsampled = BATCH_CHARACTERS

    def expect(self, n_characters: int) -> None:
        """Open gigatoken if that is worth it for this many characters more."""
        self._n_characters += n_characters
        if self._is_closed or self._fast is not None:
            return
        if self._n_characters < _worth_opening(self._backend):
            return
        if self._backend is not None:
            self._open(self._backend)
            return
        self.close()
        logger.info(
            f"text is encoded by {type(self.tokenizer).__name__} itself, since gigatoken cannot "
            "read a tokenizer of another class"
        )

    def encode(self, texts: Sequence[str]) -> TokenArrays:
        """Return the ids of texts. Raise `DifferentIds`, after which gigatoken is no longer
        used."""
        n_characters = sum(map(len, texts))
        self.expect(n_characters)
        if self._fast is None or not texts:
            return self._encode_slowly(texts)
        self._n_unsampled += n_characters
        self._n_remembered += n_characters
        try:
            if self._n_remembered > REOPENED_CHARACTERS:
                self._reopen()
            if self._n_unsampled >= BATCH_CHARACTERS:
                self._compare(_sample(texts))
                self._n_unsampled = 0
            return self._encode_fast(texts)
        except DifferentIds:
            self.close()
            raise

    def encode_documents(
        self, texts: Sequence[str], prefix: Sequence[int], suffix: Sequence[int]
    ) -> list[Array]:
        """Return the ids of `Tokenizer.encode_documents`, int64 (n,) for each text. Raise
        `DifferentIds` like `encode`.

        Args:
            texts: documents.
            prefix: ids that the tokenizer puts before a document, unless it begins with them.
            suffix: the same for the end.
        """
        kind = type(self.tokenizer)
        if (kind.encode_documents, kind.encode_batch) != (
            Tokenizer.encode_documents,
            Tokenizer.encode_batch,
        ):
            return [np.array(ids, np.int64) for ids in self.tokenizer.encode_documents(texts)]
        return [
            _with_ends(ids.astype(np.int64), [*prefix], [*suffix])
            for ids in self.encode(texts).of_texts()
        ]

    def _encode_slowly(self, texts: Sequence[str]) -> TokenArrays:
        batch = self.tokenizer.tokenize(texts, allow_special=self._allow_special)
        lengths = np.fromiter(map(len, batch), np.int64, len(batch))
        n_ids = int(lengths.sum())
        return TokenArrays(np.fromiter(chain.from_iterable(batch), np.uint32, n_ids), lengths)

    def _encode_fast(self, texts: Sequence[str]) -> TokenArrays:
        found = self._parse(texts)
        is_literal = self._is_added[found.ids] & (not self._allow_special)
        added = np.flatnonzero(is_literal)
        divided = self._divided(texts)
        if not len(added) and not divided:
            return found
        ends = np.cumsum(found.lengths)
        with_added = np.searchsorted(ends, added, side="right").tolist()
        numbers = sorted({*with_added, *divided})
        slow = self._encode_slowly([texts[number] for number in numbers])
        pieces, end = [], 0
        for number, ids in zip(numbers, slow.of_texts(), strict=True):
            stop = int(ends[number])
            pieces += [found.ids[end : stop - int(found.lengths[number])], ids]
            end = stop
        lengths = found.lengths.copy()
        lengths[numbers] = slow.lengths
        return TokenArrays(np.concatenate([*pieces, found.ids[end:]]), lengths)

    def _divided(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of the texts that the tokenizer divides, unlike gigatoken."""
        backend = self._backend
        if not isinstance(backend, Tiktoken):
            return []
        return [number for number, text in enumerate(texts) if backend.is_divided(text)]

    def _parse(self, texts: Sequence[str]) -> TokenArrays:
        """Return gigatoken's ids, with special and added tokens recognized in the texts."""
        try:
            contents = [text.encode() for text in texts]
        except UnicodeEncodeError:
            contents = [replace_surrogates(text).encode() for text in texts]
        with _as_different_ids():
            ids, lengths = self._parse_contents(contents)
        if ids.dtype != np.uint32 or len(lengths) != len(texts):
            raise DifferentIds(f"{len(lengths):,} lists of {ids.dtype} for {len(texts):,} texts")
        if len(ids) and ids.max() >= len(self._is_added):
            raise DifferentIds(f"the id {ids.max()} in a vocabulary of {len(self._is_added):,}")
        return TokenArrays(ids, lengths)

    def _parse_contents(self, contents: list[bytes]) -> TokenArrays:
        # The variable means one thread per process, as for `tokenizers`. gigatoken itself notices
        # forked processes, which must not use the threads of their parent.
        is_serial = os.environ.get("TOKENIZERS_PARALLELISM") == "false"
        if is_serial or self._n_characters < WORTH_THREADS:
            # As fast as a batch per processor second, and without importing awkward.
            arrays = [self._fast.encode(content) for content in contents]
            return TokenArrays(
                np.concatenate(arrays), np.fromiter(map(len, arrays), np.int64, len(arrays))
            )
        rows = self._fast.encode_batch(contents)
        offsets = np.asarray(rows.layout.offsets.data, np.int64)
        return TokenArrays(
            np.asarray(rows.layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)
        )

    def _compare(self, texts: Sequence[str]) -> None:
        fast, slow = self._encode_fast(texts), self._encode_slowly(texts)
        if np.array_equal(fast.lengths, slow.lengths) and np.array_equal(fast.ids, slow.ids):
            return
        raise DifferentIds(f"other ids for {self._first_different(texts)!r}")

    def _first_different(self, texts: Sequence[str]) -> str:
        """Return the beginning of the first text with other ids, or of the first text if they
        differ only together."""
        for text in texts:
            if self._encode_fast([text]).ids.tolist() != self._encode_slowly([text]).ids.tolist():
                return text[:60]
        return texts[0][:60]

    def _open(self, backend: HuggingFace | Tiktoken) -> None:
        """Open gigatoken, unless it is missing, or refuses or changes the tokenizer."""
        try:
            if isinstance(backend, HuggingFace) and (setting := backend.setting_beyond_strings()):
                raise DifferentIds(f"no {setting}")
            self._n_remembered = 0
            path = backend.file.path if isinstance(backend, Tiktoken) else backend.path
            with _as_different_ids(), suppress_native_errors(path):
                self._load, self._fast = _open_backend(backend)
            self._find_added(backend.added_tokens())
            step = max(1, len(self._is_added) // _N_VOCABULARY)
            vocabulary = [self.tokenizer.decode([i]) for i in range(0, len(self._is_added), step)]
            self._compare(probe_texts([], vocabulary))
        except DifferentIds as error:
            self.close()
            logger.info(
                f"text is encoded by the tokenizer's own library, since gigatoken has {error}"
            )

    def _reopen(self) -> None:
        assert self._load is not None
        self._fast = None  # not two at a time
        with _as_different_ids():
            self._fast = self._load()
        self._n_remembered = 0

    def _find_added(self, added: Mapping[str, int]) -> None:
        """Set the ids of special and added tokens: texts with them are encoded by the tokenizer if
        they are ordinary text. Raise `DifferentIds` for a token that gigatoken does not find within
        a text, unless the tokenizer also treats it as ordinary text; and for one that it finds
        otherwise, if special tokens are recognized."""
        self._is_added[[*added.values()]] = True
        names = [name for name in added if name]
        if not names:
            return
        if self._allow_special:
            self._compare([f"a{name}b {name} c\n{name}\n{name}{name}" for name in names])
            return
        found = self._parse([f"a{name}b" for name in names])
        counts = np.diff(
            np.cumsum(self._is_added[found.ids])[np.cumsum(found.lengths) - 1], prepend=0
        )
        for number in np.flatnonzero(counts == 0).tolist():
            self._compare(
                [f"a{names[number]}b", names[number], f" {names[number]} {names[number]}"]
            )


def _worth_opening(backend: HuggingFace | Tiktoken | None) -> int:
    return WORTH_OPENING[HuggingFace if backend is None else type(backend)]


def _open_backend(backend: HuggingFace | Tiktoken) -> tuple[Callable[[], object], object]:
    """Return a function that opens a backend with gigatoken, and its first result. Raise an error
    of any kind if gigatoken cannot open it."""
    from gigatoken import Tokenizer as Fast

    if isinstance(backend, Tiktoken):
        load = partial(Fast.from_json, convert_ranks(backend.file).to_str())
        return load, load()
    load = partial(Fast.from_json, backend.content)
    try:
        return load, load()
    except RuntimeError:
        if backend.path.suffix == ".json":
            raise
        # It refuses how `convert_sentencepiece` writes the dummy prefix, but reads the model
        # itself.
        load = partial(Fast.from_sentencepiece, backend.path)
        return load, load()


@contextlib.contextmanager
def _as_different_ids() -> Iterator[None]:
    """Convert any error of gigatoken, also a panic of its code, to `DifferentIds`."""
    try:
        yield
    except (DifferentIds, MemoryError):
        raise
    except BaseException as error:
        # A panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = error.__cause__ or error
        raise DifferentIds(
            f"an error: {str(cause).partition(chr(10))[0] or type(cause).__name__}"
        ) from error


def _sample(texts: Sequence[str]) -> list[str]:
    """Return some of the texts, long ones cut."""
    sampled = texts[:: max(1, len(texts) // SAMPLED_TEXTS)][:SAMPLED_TEXTS]
    starts = [max(0, len(text) - SAMPLED_CHARACTERS) // 2 for text in sampled]
    return [
        text[start : start + SAMPLED_CHARACTERS]
        for text, start in zip(sampled, starts, strict=True)
    ]


def _with_ends(ids: Array, prefix: list[int], suffix: list[int]) -> Array:
    before = [] if ids[: len(prefix)].tolist() == prefix else prefix
    body = ids if before else ids[len(prefix) :]
    after = [] if body[len(body) - len(suffix) :].tolist() == suffix else suffix
    return np.concatenate([np.array(before, np.int64), ids, np.array(after, np.int64)])
