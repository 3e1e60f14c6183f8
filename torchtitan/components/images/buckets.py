"""The order of images of several sizes: all images of a global batch have one."""

import bisect
import itertools
from collections.abc import Sequence

from torchtitan.components.data.pretraining.order import permute


class BucketOrder:
    """Global order of the images of several buckets, computed for any place in it.

    In each epoch, every image has one place. The images of a bucket are permuted, and cut into
    global batches; the last one ends with padding. The batches of all buckets are permuted.

    Args:
        sizes: images of each bucket; 0 for an empty one.
        batch_size: images of a global batch, over all ranks.
        shuffle: permute images and batches; False: keep the order of the data, bucket by bucket.
        seed: random seed of the permutations.
    """

    def __init__(self, sizes: Sequence[int], batch_size: int, *, shuffle: bool, seed: int):
        self._sizes, self._batch_size = sizes, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._ends = list(itertools.accumulate(-(-size // batch_size) for size in sizes))
        self.places_of_epoch = self._ends[-1] * batch_size
        """Images of an epoch, with padding."""

    def image(self, place: int) -> tuple[int, int | None]:
        """Return the bucket of a place in the global order, and its image; None: padding."""
        epoch, within = divmod(place, self.places_of_epoch)
        batch, offset = divmod(within, self._batch_size)
        if self._shuffle:
            batch = permute(batch, self._ends[-1], self._seed, epoch)
        bucket = bisect.bisect_right(self._ends, batch)
        first = self._ends[bucket - 1] if bucket else 0
        index = (batch - first) * self._batch_size + offset
        if index >= self._sizes[bucket]:
            return bucket, None
        if self._shuffle:
            index = permute(index, self._sizes[bucket], self._seed, epoch, bucket)
        return bucket, index
