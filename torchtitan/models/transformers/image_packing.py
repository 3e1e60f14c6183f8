"""Packed documents with images in a class of transformers, in the fastest way that a trial of a
tiny clone allows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig

from torchtitan.models.transformers.captions import caption_inputs, reads_captions, with_blank
from torchtitan.models.transformers.cross_attention import cross_attention_arguments
from torchtitan.models.transformers.description import forward_arguments
from torchtitan.models.transformers.images import image_arguments, token_mask
from torchtitan.models.transformers.packing import (
    KERNEL,
    ClassOutputs,
    ForwardPass,
    Packing,
    log_packing,
    padding_mask,
    trial_config,
)
from torchtitan.models.transformers.tiny import CLONE_TOLERANCE, TEXT_IDS, random_clone, trial
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import OF_TOKENS, ImageInputs
from torchtitan.protocols.model import effective_weight
from torchtitan.tools.device import send
from torchtitan.tools.errors import UserError, in_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DocumentRows:
    """A row for each document of packed rows, without their padding, (N, M)."""

    index_NM: Tensor
    """Place of each token in the flattened packed rows; any in the padding."""
    mask_NM: Tensor
    """0 in the padding, int64."""
    n_rows: int
    """Number of packed rows, B."""
    length: int
    """Length of packed rows, L."""

    @classmethod
    def of(cls, attention: AttentionMetadata, device: torch.device) -> "DocumentRows":
        """Return the rows for the documents of `attention`, which has positions."""
        assert attention.positions_BL is not None
        n_rows, length = attention.positions_BL.shape
        starts = attention.cu_seqlens.long()[:-1]
        lengths = attention.cu_seqlens.long().diff()
        if attention.n_tokens_B is not None:
            has_tokens = starts % length < attention.n_tokens_B[starts // length]
            has_tokens[0] |= not has_tokens.any()  # classes need at least one row
            starts, lengths = starts[has_tokens], lengths[has_tokens]
        places_M = torch.arange(int(lengths.max()))
        index_NM = (starts[:, None] + places_M).clamp(max=n_rows * length - 1)
        mask_NM = (places_M < lengths[:, None]).long()
        return cls(send(index_NM, device), send(mask_NM, device), n_rows, length)

    def take(self, x_BL: Tensor) -> Tensor:
        """Return the documents of packed integers, (N, M), with 0 in the padding."""
        return x_BL.flatten()[self.index_NM] * self.mask_NM

    def put(self, x_XNMD: Tensor, dim: int) -> Tensor:
        """Return the packed rows of documents, (..., B, L, ...), with 0 in the padding. `dim` is
        the dimension of the N rows."""
        is_token = self.mask_NM.bool().flatten()
        places_T = self.index_NM.flatten()[is_token]
        x = x_XNMD.flatten(dim, dim + 1)
        shape = *x.shape[:dim], self.n_rows * self.length, *x.shape[dim + 1 :]
        found_T = is_token.nonzero().flatten()
        packed = x.new_zeros(shape).index_copy(dim, places_T, x.index_select(dim, found_T))
        return packed.unflatten(dim, (self.n_rows, self.length))


def run_with_images(
    packing: Packing,
    model: "PreTrainedModel",
    tokens_BL: Tensor,
    attention: AttentionMetadata | None,
    images: ImageInputs,
    dtype: torch.dtype,
    *,
    static: bool = False,
    masks_padding: bool = False,
    **options: object,
) -> ClassOutputs:
    """Call a class on packed documents with their images, or, if `attention` has no positions, on
    rows of one document each; `gather_with_images` its results. See `Packing.run` for `static` and
    `masks_padding`."""
    images = with_blank(model.config, images)
    inputs: dict[str, Any] = {"input_ids": tokens_BL, **image_arguments(model, images, dtype)}
    options["use_cache"] = False
    if attention is None or attention.positions_BL is None:
        inputs["attention_mask"] = token_mask(tokens_BL, attention)
        inputs |= cross_attention_arguments(model, tokens_BL, inputs)
        n_tokens_B = None if attention is None else attention.n_tokens_B
        has_text_B = None if n_tokens_B is None else n_tokens_B > 0
        inputs = caption_inputs(model, inputs, has_text_B)
        of_rows: ClassOutputs = model(**inputs, **options)
        return of_rows
    rows = DocumentRows.of(attention, tokens_BL.device)
    if packing.mode == "rows":
        inputs |= {name: rows.take(inputs[name]) for name in _of_tokens(inputs)}
        inputs["attention_mask"] = rows.mask_NM
        inputs |= cross_attention_arguments(model, inputs["input_ids"], inputs)
        inputs = caption_inputs(model, inputs)
        of_documents: ClassOutputs = model(**inputs, **options)
        return of_documents
    if "position_ids" in forward_arguments(model):
        inputs["position_ids"] = _positions(model, inputs, attention, rows)
    # With a mask, transformers does not look for documents in the positions.
    mask_BL = padding_mask(tokens_BL, attention) if masks_padding else torch.ones_like(tokens_BL)
    configs = type(model.config), type(model.config.get_text_config(decoder=True))
    forward_pass = ForwardPass(attention, static, configs, at_places=True)
    return forward_pass.call(model, attention_mask=mask_BL, **inputs, **options)


def gather_with_images(
    packing: Packing, hidden_NMD: Tensor, attention: AttentionMetadata | None
) -> Tensor:
    """Return the results of a class for packed tokens, (B, L, ...), from those of
    `run_with_images`."""
    if packing.mode != "rows" or attention is None or attention.positions_BL is None:
        return hidden_NMD
    return DocumentRows.of(attention, hidden_NMD.device).put(hidden_NMD, dim=0)


def mask_with_images(
    packing: Packing, tokens_BL: Tensor, attention: AttentionMetadata | None
) -> Tensor:
    """Return whether each place that a class gets is a token of a document, flat, in the order of
    `run_with_images`."""
    if attention is None or attention.positions_BL is None:
        return token_mask(tokens_BL, attention).bool().flatten()
    if packing.mode == "rows":
        return DocumentRows.of(attention, tokens_BL.device).mask_NM.bool().flatten()
    return padding_mask(tokens_BL, attention).bool().flatten()


def implementation_with_images(config: PretrainedConfig, packing: Packing) -> dict[str, str] | None:
    """Return the attention implementation of a class's language model, by the name of its
    configuration; vision towers keep their own. None: the default."""
    if packing.mode != "kernel":
        return None
    text = config.get_text_config(decoder=True)
    if text is config:
        return {"": KERNEL}
    return {name: KERNEL for name in config.sub_configs if getattr(config, name, None) is text}


def _of_tokens(inputs: Mapping[str, object]) -> list[str]:
    return [name for name in inputs if name == "input_ids" or name.endswith(OF_TOKENS)]


def _positions(
    model: "PreTrainedModel",
    inputs: Mapping[str, Tensor],
    attention: AttentionMetadata,
    rows: DocumentRows,
) -> Tensor:
    """Return the positions of packed tokens, (B, L) or (axes, B, L). The class computes those of
    several axes, for each document by itself."""
    assert attention.positions_BL is not None
    assert isinstance(model, GenerationMixin)
    own = type(model)._prepare_position_ids_for_generation
    if own is GenerationMixin._prepare_position_ids_for_generation:
        return attention.positions_BL
    of_rows = {name: rows.take(inputs[name]) for name in _of_tokens(inputs)}
    known = {**inputs, **of_rows, "attention_mask": rows.mask_NM}
    positions: Tensor = model._prepare_position_ids_for_generation(of_rows["input_ids"], known)
    return rows.put(positions, dim=positions.ndim - 2)


_N_TOKENS = 6
"""Tokens of an image of the trial: one row of grids of 2 x 3."""

_DOCUMENTS = [[(20, 1)], [(9, 0), (30, 2), (12, 1)], [(11, 1), (17, 0), (24, 1)]]
"""Tokens of text and number of images of each document of the trial, in three rows. The last row
has no room for padding, and the others do."""

_ROW_LENGTH = 70


class _Features(SimpleNamespace):
    """Results of a class's `get_image_features`: it has no others."""

    def __getattr__(self, name: str) -> None:
        return None


class _Trial:
    """Documents with random features in the place of images, as the class's vision tower would give
    them: packing does not reach it.

    Args:
        is_joined: True if the class gets the features of all images in one tensor, False if in a
            tuple.
    """

    def __init__(self, config: PretrainedConfig, packing: Packing, *, is_joined: bool):
        self.packing = packing
        self.is_joined = is_joined
        self.model = random_clone(config, implementation_with_images(config, packing))
        torch.manual_seed(1)
        image_id = getattr(self.model.config, "image_token_id", None)
        if image_id is None:
            image_id = self.model.config.image_token_index
        self.documents = [
            _document(n_text, n_images, image_id) for row in _DOCUMENTS for n_text, n_images in row
        ]
        self.n_images = [n_images for row in _DOCUMENTS for _, n_images in row]
        width = effective_weight(self.model.get_input_embeddings()).shape[1]
        self.features = torch.randn(sum(self.n_images), _N_TOKENS, width)
        self.deepstack = torch.randn(sum(self.n_images), _N_TOKENS, width)
        self.image_id = image_id

    def alone(self) -> Tensor:
        """Return the logits of each document by itself, joined, (tokens, V)."""
        ends = torch.tensor(self.n_images).cumsum(0).tolist()
        logits = [
            self._run(document[None], None, slice(end - n, end))[0]
            for document, n, end in zip(self.documents, self.n_images, ends, strict=True)
        ]
        return torch.cat(logits)

    def packed(self, *, is_apart: bool = True) -> Tensor:
        """Return the logits of packed documents, in the same order. Unless documents are kept
        apart, each row is one document."""
        documents = iter(self.documents)
        tokens_BL = torch.zeros(len(_DOCUMENTS), _ROW_LENGTH, dtype=torch.long)
        positions_BL = torch.zeros_like(tokens_BL)
        n_tokens = []
        for row, members in enumerate(_DOCUMENTS):
            ids = [next(documents) for _ in members]
            positions = [torch.arange(len(one)) for one in ids]
            n_tokens.append(sum(len(one) for one in ids))
            positions.append(torch.arange(_ROW_LENGTH - n_tokens[-1]))
            positions_BL[row] = torch.cat(positions)
            tokens_BL[row, : n_tokens[-1]] = torch.cat(ids)
        n_tokens_B = torch.tensor(n_tokens)
        attention = AttentionMetadata.from_positions(positions_BL, n_tokens_B)
        if not is_apart:
            attention = AttentionMetadata.of_rows(len(_DOCUMENTS), _ROW_LENGTH, n_tokens_B)
        logits = self._run(tokens_BL, attention, slice(None))
        return logits[torch.arange(_ROW_LENGTH) < n_tokens_B[:, None]]

    def _run(self, tokens_BL: Tensor, attention: AttentionMetadata | None, images: slice) -> Tensor:
        self._show(images)
        features = self.features[images]
        arguments: dict[str, Tensor] = {}
        if len(features):
            arguments["pixel_values"] = torch.zeros(len(features), 3, 8, 8)
            if "image_grid_thw" in forward_arguments(self.model):
                size = getattr(self.model.config.vision_config, "spatial_merge_size", 1)
                grid = torch.tensor([1, 2 * size, 3 * size])
                arguments["image_grid_thw"] = grid.expand(len(features), -1)
        types_BL = (tokens_BL == self.image_id).long()
        inputs = ImageInputs(tensors=arguments, token_types_BL=types_BL)
        outputs = run_with_images(
            self.packing, self.model, tokens_BL, attention, inputs, torch.float32
        )
        logits: Tensor = gather_with_images(self.packing, outputs.logits, attention)
        return logits

    def _show(self, images: slice) -> None:
        """Make the class get the features of these images from its vision tower."""
        features, deepstack = self.features[images], self.deepstack[images]
        result = _Features(
            pooler_output=features if self.is_joined else features.unbind(),
            last_hidden_state=features,
            deepstack_features=[deepstack if self.is_joined else deepstack.unbind()],
            visual_indicator_features=self.deepstack.flatten(0, 1),  # of Ovis 2's special tokens
        )
        for module in self.model.modules():
            if hasattr(module, "get_image_features"):
                vars(module)["get_image_features"] = lambda *args, **kwargs: result


def _document(n_text: int, n_images: int, image_id: int) -> Tensor:
    """Return random text with images after equal parts of it."""
    text = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (n_text,))
    parts = text.chunk(n_images + 1)
    image = torch.full((_N_TOKENS,), image_id)
    joined = [parts[0]]
    for part in parts[1:]:
        joined += [image, part]
    return torch.cat(joined)


@trial
def choose_image_packing(config: PretrainedConfig) -> Packing:
    """Return the fastest way in which a class keeps packed documents with images apart, and log one
    line if it is not the fastest."""
    packing = _try(config)
    log_packing(config, packing, "packed document with images")
    return packing


def _try(config: PretrainedConfig) -> Packing:
    if reads_captions(config):
        return Packing("rows", "its class reads one image before each text")
    config, modes = trial_config(config)
    failures: list[str] = []
    for is_joined in (False, True):
        try:
            rows = _Trial(config, Packing("rows"), is_joined=is_joined)
            expected = rows.alone()
            break
        except Exception as error:  # classes raise various types
            failures.append(in_words(error))
    else:
        return Packing("rows", f"a tiny clone gets no images: {'; '.join(failures)}")

    if len(expected) != sum(map(len, rows.documents)):
        raise UserError(
            f"model_type {config.model_type} gives no logits for each token of a text with images, "
            "so it does not predict the next one; train a model of another type"
        )

    def change(logits: Tensor) -> float:
        return float((logits - expected).abs().max() / expected.abs().max())

    together = rows.packed(is_apart=False)
    rows.features = rows.features.flip(0)
    if min(change(together), change(rows.alone())) < 100 * CLONE_TOLERANCE:
        return Packing("rows", "no leak would be seen in a tiny clone")
    reasons: list[str] = []
    for mode in modes:
        packing = Packing(mode, "; ".join(reasons))
        try:
            difference = change(_Trial(config, packing, is_joined=is_joined).packed())
        except Exception as error:
            reasons.append(f"{mode}: {in_words(error)}")
            continue
        if difference <= CLONE_TOLERANCE:
            return packing
        reasons.append(f"{mode}: logits change by {difference:.1e}")
    return Packing("rows", "; ".join(reasons))
