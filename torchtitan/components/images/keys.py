"""Keys of images, for caches of what a model computes from them."""

import torch
from torch import Tensor

from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.samples import Windows
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.tools.digests import digest_of

_BITS = 63


def image_keys(processor: ImageProcessor, windows: Windows, tokens_BL: Tensor) -> Tensor:
    """Return, for each token of the samples in windows, a number that identifies all images of its
    sample and their processor; 0 without images, and in padding: int64 (B, L)."""
    keys_BL = torch.zeros_like(tokens_BL)
    for keys_L, window in zip(keys_BL, windows, strict=True):
        start = 0
        for sample in window:
            stop = start + sum(max(len(part.ids) - 1, 0) for part in sample.parts)
            keys_L[start:stop] = _key(processor, sample)
            start = stop
    return keys_BL


def _key(processor: ImageProcessor, sample: EncodedRow) -> int:
    if not sample.images:
        return 0
    digests = [image["digest"] + image.get("prompt", "") for image in sample.images]
    return int(digest_of([processor.fingerprint, digests]), 16) % 2**_BITS
