"""Keep packed documents apart in any class of transformers."""

import inspect
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchtitan.models.common.attention import Attention, with_kernel
from torchtitan.protocols.attention import AttentionMetadata

KERNEL = "torchtitan"
"""Name of our attention among the implementations of transformers."""

Mode = Literal["kernel", "masks", "rows"]

_current: ContextVar[tuple[AttentionMetadata, bool] | None] = ContextVar("current", default=None)
"""Documents of the current forward pass, and whether their kernels must have constant shapes."""


class Documents:
    """Takes the place of an attention mask that is causal within documents and a window. As an argument of blocks, it
    is there too when activation checkpointing recomputes them."""

    def __init__(self, attention: AttentionMetadata, *, static: bool, **properties: Any):
        self.attention, self.static = attention, static
        self._with_kernels: dict[Any, AttentionMetadata] = {}
        self.with_kernel(**properties)  # expected of all layers, so that blocks find it

    def with_kernel(self, **properties: Any) -> AttentionMetadata:
        """Return the metadata with the kernel for these arguments of `choose_kernel`, chosen once per batch."""
        key = None if self.static else tuple(properties.values())
        if key not in self._with_kernels:
            self._with_kernels[key] = with_kernel(self.attention, **properties, static=self.static)
        return self._with_kernels[key]

    def dense(self, **properties: Any) -> Tensor:
        """Return the mask as a tensor (B or 1, 1, L, L), true where a token sees another."""
        mask: Tensor = with_kernel(replace(self.attention, kernel="dense"), **properties, static=self.static).mask
        return mask


def _window(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return whether a mask of transformers is causal within at most a window, and the window."""
    parts = [mask_function]
    if mask_function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    windows = [part for part in parts if part is not causal_mask_function]
    if any(part.__qualname__ != "sliding_window_overlay.<locals>.inner_mask" for part in windows):
        return False, None
    sizes = [inspect.getclosurevars(part).nonlocals["sliding_window"] for part in windows]
    return len(windows) < len(parts), min(sizes, default=None)


def _make_mask(**options: Any) -> Tensor | Documents | None:
    """Make the mask of a model whose attention is ours, with the arguments of transformers' `sdpa_mask`."""
    attention, static = _active(options)
    is_plain, window = (False, None) if attention is None else _window(options["mask_function"])
    if attention is None or not is_plain:
        return _within_documents(sdpa_mask)(**options)
    fields = vars(options["config"])  # getattr raises for what differs between layers
    return Documents(
        attention.with_window(window),
        static=static,
        device=torch.device(options["device"]),
        dtype=options["dtype"],
        head_dim=fields.get("qk_head_dim") or fields.get("head_dim") or 64,
        capped=fields.get("attn_logit_softcapping") is not None,
    )


def _active(options: dict[str, Any]) -> tuple[AttentionMetadata | None, bool]:
    """Return the documents of the current forward pass if a mask is one of their tokens."""
    attention, static = _current.get() or (None, False)
    if attention is None or options["q_length"] != options["kv_length"]:
        return None, static
    positions_BL = attention.positions_BL
    shape = (attention.n_rows, attention.max_seqlen) if positions_BL is None else positions_BL.shape
    return (attention if shape == (options["batch_size"], options["q_length"]) else None), static


def _within_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let one of transformers' functions for masks keep the documents of the current forward pass apart."""

    def make_within(**options: Any) -> Any:
        attention, _ = _active(options)
        if attention is not None:
            options["attention_mask"] = None  # all ones, or zeros only after all that a token sees
            if attention.positions_BL is not None:
                options["mask_function"] = _remap(options["mask_function"], attention.positions_BL)
                options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make(**options)

    return make_within


def _remap(mask_function: Callable[..., Any], positions_BL: Tensor) -> Callable[..., Any]:
    documents_BL = (positions_BL == 0).cumsum(-1)

    def is_same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return documents_BL[b, q] == documents_BL[b, k]

    def at_positions(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask_function(b, h, positions_BL[b, q], positions_BL[b, k])

    return and_masks(is_same, at_positions)


_WITHOUT_EFFECT = {
    *("sliding_window", "is_causal", "position_ids"),  # the mask has them
    *("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"),
}
"""Options that classes pass to attention in vain. An unknown one may change scores, as sinks do."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Documents | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with our kernels if the mask is ours, else as PyTorch does; (B, heads, L, head_dim) → (B, L, heads,
    head_dim)."""
    unknown = [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]
    if isinstance(attention_mask, Documents) and unknown:
        raise NotImplementedError(f"attention with {unknown[0]}")
    # Latent attention has values of another width, which not all kernels support.
    width = max(query.shape[-1], value.shape[-1])
    properties = {"device": query.device, "dtype": query.dtype, "head_dim": width, "capped": softcap is not None}
    if isinstance(attention_mask, Documents) and dropout:  # the kernels have none
        attention_mask = attention_mask.dense(**properties)
    attend = Attention(scale=query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=softcap)
    if not isinstance(attention_mask, Documents) and softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if not isinstance(attention_mask, Documents):  # in generation
        if attention_mask is None:
            attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
            attention_mask = attention_mask.tril(key.shape[2] - query.shape[2])
        return attend._products(query, key, value, attn_mask=attention_mask).transpose(1, 2), None
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in padded)
    return attend(q, k, v, attention_mask.with_kernel(**properties))[..., : value.shape[-1]].contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(KERNEL, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(KERNEL, _make_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register("eager", _within_documents(eager_mask))
ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _within_documents(sdpa_mask))


@dataclass(frozen=True)
class Packing:
    """How a class gets packed documents."""

    mode: Mode
    """kernel: our attention. masks: the class's attention, with masks of documents. rows: a row per document."""

    reason: str = ""
    """Why a faster mode does not hold."""

    @property
    def implementation(self) -> str | None:
        """Attention implementation of the class; None: its default."""
        return KERNEL if self.mode == "kernel" else None

    def run(
        self,
        model: PreTrainedModel,
        tokens_BL: Tensor,
        attention: AttentionMetadata | None,
        *,
        static: bool = False,
        **options: Any,
    ) -> Any:
        """Call a class on packed tokens. In mode "rows", the results have a row per document: see `gather`.

        Args:
            attention: the documents; None: each row is one.
            static: blocks are compiled, so kernels must have constant shapes.
            options: further arguments of the class.
        """
        attention = attention or AttentionMetadata.of_rows(*tokens_BL.shape)
        inputs: dict[str, Any] = {"use_cache": False}
        positions_BL = attention.positions_BL
        if self.mode != "rows":
            if positions_BL is None:
                positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
            # With a mask, transformers does not look for documents in the positions, which would wait for the device.
            inputs |= {"position_ids": positions_BL, "attention_mask": torch.ones_like(tokens_BL)}
        elif positions_BL is not None:
            tokens_BL, inputs["attention_mask"] = _rows(tokens_BL, attention)
            attention = AttentionMetadata.of_rows(*tokens_BL.shape)
        takes = inspect.signature(model.forward).parameters
        inputs = {name: value for name, value in inputs.items() if name in takes}
        context = copy_context()
        context.run(_current.set, (attention, static))
        return context.run(model, input_ids=tokens_BL, **inputs, **options)

    def gather(self, hidden_NMD: Tensor, attention: AttentionMetadata | None) -> Tensor:
        """Return the results of a class for packed tokens, (B, L, ...), from those of `run`."""
        if self.mode != "rows" or attention is None or attention.positions_BL is None:
            return hidden_NMD
        lengths = attention.cu_seqlens.diff().long()
        row_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        place_T = torch.arange(len(row_T)) - attention.cu_seqlens.long()[:-1].repeat_interleave(lengths)
        index_T = _send(row_T * attention.max_seqlen + place_T, hidden_NMD.device)
        return hidden_NMD.flatten(0, 1)[index_T].unflatten(0, attention.positions_BL.shape)


def _rows(tokens_BL: Tensor, attention: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return a row per document, padded with the tokens that follow, and a mask that is 0 there, (N, M)."""
    boundaries, places_M = attention.cu_seqlens.long(), torch.arange(attention.max_seqlen)
    index_NM = (boundaries[:-1, None] + places_M).clamp(max=tokens_BL.numel() - 1)
    mask_NM = (places_M < boundaries.diff()[:, None]).long()
    return tokens_BL.flatten()[_send(index_NM, tokens_BL.device)], _send(mask_NM, tokens_BL.device)


def _send(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
