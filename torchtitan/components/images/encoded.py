"""Captions and images as the states of frozen encoders, computed once into the disk cache.

The rows of a bucket are encoded in shards, each a folder of the cache with checksums, which is
written completely or not at all. So an interrupted run continues with the next shard. Ranks begin
with different shards; ranks of one host, or of several with a common cache, share the work.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from torchtitan.components.data.disk_cache import map_array, open_or_build
from torchtitan.components.data.sources.source import Source
from torchtitan.components.images.captioned import Bucket, CaptionedImages
from torchtitan.components.images.encoders import EncoderFolder, Encoders
from torchtitan.tools.digests import cache_root, file_digest
from torchtitan.tools.durable import new_file

_VERSION = 1
ROWS = 256
"""Rows of a shard."""
_AT_ONCE = 8
"""Rows that encoders compute at once."""

_STORED = {torch.float32: "float32", torch.bfloat16: "uint16"}
"""NumPy's type of the stored bits."""

Value = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shard:
    """States of consecutive rows, by name."""

    arrays: dict[str, np.ndarray]
    dtype: torch.dtype

    def row(self, index: int) -> Value:
        """Return a row's states, float32."""
        rows = {name: torch.from_numpy(np.array(x[index])) for name, x in self.arrays.items()}
        return {name: bits.view(self.dtype).float().numpy() for name, bits in rows.items()}


def encode(
    sources: Sequence[Source],
    sets: Sequence[CaptionedImages],
    folder: EncoderFolder,
    *,
    rank: int = 0,
    n_ranks: int = 1,
    cache_dir: str = "",
    verify: bool = False,
) -> list[list[list[Shard]]]:
    """Return the shards of each bucket of each dataset; encode shards that are not in the cache."""
    root = cache_root(cache_dir)
    identity = folder.identity(partial(file_digest, root))
    shards = list(_shards(sets))
    first = rank * len(shards) // n_ranks
    results: dict[tuple[int, int, int], Shard] = {}
    load = functools.cache(lambda: Encoders(folder))  # only if something is missing
    shapes = functools.cache(folder.shapes)
    for place in (*range(first, len(shards)), *range(first)):
        number, bucket, start = place_of = shards[place]
        images = sets[number].buckets[bucket]
        rows = range(start, min(start + ROWS, len(images)))
        results[place_of] = open_or_build(
            "encoded_images",
            # Without its files, which would be checked for every shard: images are in the cache.
            sources[number].with_parts([]),
            key=lambda _: [sets[number].key, bucket, start, len(rows), identity, _VERSION],
            read=partial(_read, shapes(images.pixels.shape[1:]), folder.dtype, len(rows)),
            write=partial(_write, images, rows, load),
            cache_dir=cache_dir,
            verify=verify,
        )
    return [
        [
            [results[number, bucket, start] for start in range(0, len(images), ROWS)]
            for bucket, images in enumerate(of_set.buckets)
        ]
        for number, of_set in enumerate(sets)
    ]


def _shards(sets: Sequence[CaptionedImages]) -> Iterator[tuple[int, int, int]]:
    for number, of_set in enumerate(sets):
        for bucket, images in enumerate(of_set.buckets):
            yield from ((number, bucket, start) for start in range(0, len(images), ROWS))


def _write(images: Bucket, rows: range, load: Callable[[], Encoders], folder: Path) -> str:
    encode_rows = load()
    with ExitStack() as stack:
        files: dict[str, object] = {}
        for first in range(rows.start, rows.stop, _AT_ONCE):
            some = slice(first, min(first + _AT_ONCE, rows.stop))
            states = encode_rows(images.captions[some], images.pixels[some])
            for name, x in states.items():
                if name not in files:
                    files[name] = stack.enter_context(new_file(folder / name))
                bits = x.cpu().contiguous().view(getattr(torch, _STORED[x.dtype]))
                files[name].write(bits.numpy().tobytes())  # type: ignore[attr-defined]
    encode_rows.report()
    return f"{len(rows)} images and captions"


def _read(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, n_rows: int, folder: Path
) -> Shard:
    arrays = {}
    for name, shape in shapes.items():
        size = n_rows * int(np.prod(shape))
        file = map_array(folder / name, _STORED[dtype], size)
        arrays[name] = file.reshape(n_rows, *shape)
    return Shard(arrays, dtype)
