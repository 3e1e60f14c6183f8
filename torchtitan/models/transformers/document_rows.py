"""Packed documents with images in a row for each, as a class gets them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.device import send

Pack = Callable[[Tensor], Tensor]
"""Puts what a class returns for rows of documents, (N, M, D), into the places of the packed tokens,
(B, L, D); padding gets 0."""


def document_rows(
    tokens_BL: Tensor, attention: AttentionMetadata | None, images: ImageInputs
) -> tuple[Tensor, AttentionMetadata | None, ImageInputs, Pack]:
    """Return tokens, attention and images with a row for each document, (N, M), and a function that
    packs the results; the arguments, if each row is one document. The images are in the order of
    the documents in both."""
    if attention is None or attention.positions_BL is None:
        return tokens_BL, attention, images, _unchanged
    starts_N, lengths_N = _documents(attention)
    places_M = torch.arange(int(lengths_N.max()))
    mask_NM = places_M < lengths_N[:, None]
    places_NM = (starts_N[:, None] + places_M).where(mask_NM, 0)
    index_NM, mask_NM = (send(x, tokens_BL.device) for x in (places_NM, mask_NM))

    def rows(values_BL: Tensor) -> Tensor:
        # Padding must not have the tokens of images.
        return values_BL.flatten()[index_NM].where(mask_NM, 0)

    def pack(results_NMD: Tensor) -> Tensor:
        results_TD = results_NMD.new_zeros(tokens_BL.numel(), results_NMD.shape[-1])
        packed_TD = results_TD.index_copy(0, index_NM[mask_NM], results_NMD[mask_NM])
        return packed_TD.unflatten(0, tokens_BL.shape)

    of_rows = AttentionMetadata.of_rows(len(lengths_N), len(places_M), lengths_N)
    return (
        rows(tokens_BL),
        of_rows,
        replace(images, token_types_BL=rows(images.token_types_BL)),
        pack,
    )


def _documents(attention: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return the first place of each document in the flattened tokens, and its length, without
    padding if there is anything else."""
    starts_N, lengths_N = attention.cu_seqlens[:-1].long(), attention.cu_seqlens.diff().long()
    if attention.n_tokens_B is None:
        return starts_N, lengths_N
    length = int(attention.cu_seqlens[-1]) // attention.n_rows
    is_padding_N = starts_N % length >= attention.n_tokens_B[starts_N // length]
    if bool(is_padding_N.all()):
        return starts_N, lengths_N
    return starts_N[~is_padding_N], lengths_N[~is_padding_N]


def _unchanged(results: Tensor) -> Tensor:
    return results
