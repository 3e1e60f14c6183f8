"""How packed documents stay apart in any class of transformers, found by probing a tiny clone of the model."""

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, causal_mask_function, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torchtitan.models.common.attention import Attention, with_kernel
from torchtitan.models.transformers.tiny import TEXT_IDS, tiny_config
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

KERNEL = "torchtitan"
"""Name of our attention among the implementations of transformers."""

TOLERANCE = 1e-4
"""Largest change of a logit by the other documents, relative to the largest logit: float32 rounding is far below this,
and a leak far above, as the weights of the clone are large."""

Mode = Literal["kernel", "masks", "rows"]

_documents: ContextVar[AttentionMetadata | None] = ContextVar("documents", default=None)


class Documents:
    """Takes the place of an attention mask that is causal within documents and a window. As an argument of blocks, it
    is there too when activation checkpointing recomputes them."""

    def __init__(self, attention: AttentionMetadata):
        self.attention = attention
        self._with_kernels: dict[Any, AttentionMetadata] = {}

    def with_kernel(self, **properties: Any) -> AttentionMetadata:
        """Return the metadata with the kernel for these arguments of `choose_kernel`, chosen once per batch."""
        key = tuple(properties.values())
        if key not in self._with_kernels:
            self._with_kernels[key] = with_kernel(self.attention, **properties, static=False)
        return self._with_kernels[key]

    def dense(self, device: torch.device) -> Tensor:
        """Return the mask as a tensor (B or 1, 1, L, L), true where a token sees another."""
        mask: Tensor = with_kernel(replace(self.attention, kernel="dense"), device=device).mask
        return mask


def _window(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return whether a mask of transformers is causal within at most a window, and the window."""
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", (mask_function,))
    windows = [part for part in parts if part is not causal_mask_function]
    if any(part.__qualname__ != "sliding_window_overlay.<locals>.inner_mask" for part in windows):
        return False, None
    sizes = [inspect.getclosurevars(part).nonlocals["sliding_window"] for part in windows]
    return len(windows) < len(parts), min(sizes, default=None)


def _make_mask(**options: Any) -> Tensor | Documents | None:
    """Make the mask of a model whose attention is ours, with the arguments of transformers' `sdpa_mask`."""
    attention = _active(options)
    if attention is not None:
        is_plain, window = _window(options["mask_function"])
        if is_plain:
            return Documents(attention.with_window(window))
    return _within_documents(sdpa_mask)(**options)


def _active(options: dict[str, Any]) -> AttentionMetadata | None:
    """Return the documents of the current forward pass if a mask is one of their tokens."""
    attention = _documents.get()
    if attention is None or options["q_length"] != options["kv_length"]:
        return None
    positions_BL = attention.positions_BL
    shape = (attention.n_rows, attention.max_seqlen) if positions_BL is None else positions_BL.shape
    return attention if shape == (options["batch_size"], options["q_length"]) else None


def _within_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let one of transformers' functions for masks keep the documents of the current forward pass apart."""

    def make_within(**options: Any) -> Any:
        attention = _active(options)
        if attention is not None:
            options["attention_mask"] = None  # all ones
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


@torch.compiler.disable
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
    if isinstance(attention_mask, Documents) and dropout:  # the kernels have none
        attention_mask = attention_mask.dense(query.device)
    if not isinstance(attention_mask, Documents):
        if softcap is not None:
            if attention_mask is None:
                places = query.shape[2], key.shape[2]
                attention_mask = torch.ones(places, dtype=torch.bool, device=query.device).tril(places[1] - places[0])
            products = Attention(scale=scaling, softcap=softcap)._products
            return products(query, key, value, attn_mask=attention_mask).transpose(1, 2), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    width, out_width = query.shape[-1], value.shape[-1]
    # Latent attention has values of another width, which not all kernels support.
    scaling = width**-0.5 if scaling is None else scaling
    q, k, v = (F.pad(x, (0, max(width, out_width) - x.shape[-1])).transpose(1, 2) for x in (query, key, value))
    properties = {"device": q.device, "dtype": q.dtype, "head_dim": q.shape[-1], "capped": softcap is not None}
    attend = Attention(scale=scaling, softcap=softcap)
    return attend(q, k, v, attention_mask.with_kernel(**properties))[..., :out_width].contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(KERNEL, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(KERNEL, _make_mask)
for _name, _make in {"eager": eager_mask, "sdpa": sdpa_mask}.items():
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _within_documents(_make))


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
        self, model: PreTrainedModel, tokens_BL: Tensor, attention: AttentionMetadata | None, **options: Any
    ) -> Any:
        """Call a class on packed tokens. In mode "rows", the results have a row per document: see `gather`."""
        takes = inspect.signature(model.forward).parameters
        inputs: dict[str, Any] = {"use_cache": False}
        if self.mode == "rows":
            attention = None if attention is None or attention.positions_BL is None else attention
            if attention is not None:
                tokens_BL, inputs["attention_mask"] = _rows(tokens_BL, attention)
        else:
            attention = attention or AttentionMetadata.of_rows(*tokens_BL.shape)
            positions_BL = attention.positions_BL
            if positions_BL is None:
                positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
            # With a mask, transformers does not look for documents in the positions, which would wait for the device.
            inputs |= {"position_ids": positions_BL, "attention_mask": torch.ones_like(tokens_BL)}
        inputs = {name: value for name, value in inputs.items() if name in takes}
        token = _documents.set(None if self.mode == "rows" else attention)
        try:
            return model(input_ids=tokens_BL, **inputs, **options)
        finally:
            _documents.reset(token)

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


_chosen: dict[str, Packing] = {}


def choose_packing(config: PretrainedConfig) -> Packing:
    """Return the fastest way in which a class keeps packed documents apart, and log one line if it is not the fastest.

    Raises:
        UserError: tokens see later ones, as in an encoder.
    """
    key = config.to_json_string()
    if key not in _chosen:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            _chosen[key] = _probe(config)
        if _chosen[key].mode != "kernel":
            logger.info("%s: %s", config.model_type, _chosen[key].reason)
    return _chosen[key]


def _probe(config: PretrainedConfig) -> Packing:
    try:
        tiny = tiny_config(config)
        model = build(tiny)
        _randomize(model)
        ids = torch.tensor(TEXT_IDS)
        tokens_BL = ids[torch.randint(len(ids), (2, 64))]
        documents = tokens_BL.flatten().split(_LENGTHS)
        alone = [model(input_ids=document[None]).logits for document in documents]
    except Exception as error:
        return Packing("rows", f"a tiny clone cannot be built ({_first_line(error)})")
    largest = max(float(logits.abs().max()) for logits in alone)

    def change(logits: Tensor, expected: Tensor) -> float:
        return float((logits - expected).abs().max() / largest)

    start = model(input_ids=documents[0][None, :10]).logits
    if change(start, alone[0][:, :10]) > TOLERANCE:
        raise UserError(f"model_type {config.model_type}: its tokens see later ones, so it cannot predict them")
    attention = AttentionMetadata.from_positions(torch.cat([torch.arange(n) for n in _LENGTHS]).view(2, 64))
    packed, rows = torch.cat(alone, 1), model(input_ids=tokens_BL).logits
    if change(rows.reshape(packed.shape), packed) < 100 * TOLERANCE:
        return Packing("rows", "no leak would be seen in a tiny clone")
    reasons: list[str] = []
    for mode in ("kernel", "masks", "rows"):
        packing = Packing(mode, "; ".join(reasons))
        try:
            candidate = build(tiny, packing.implementation)
            candidate.load_state_dict(model.state_dict())
            plain = change(packing.run(candidate, tokens_BL, None).logits, rows)
            logits = packing.gather(packing.run(candidate, tokens_BL, attention).logits, attention)
            leak = change(logits.reshape(packed.shape), packed)
        except Exception as error:
            reasons.append(f"{mode}: {_first_line(error)}")
            continue
        if max(plain, leak) <= TOLERANCE:
            return packing
        reasons.append(f"{mode}: " + (f"logits change by {plain:.1e}" if plain > TOLERANCE else f"leak {leak:.1e}"))
    return Packing("rows", "; ".join(reasons))


_LENGTHS = [27, 5, 1, 31, 40, 24]
"""Tokens of the documents of the probe, in two rows; some are longer than the windows and chunks of the clone."""


def build(config: PretrainedConfig, implementation: str | None = None) -> PreTrainedModel:
    """Return the class of a configuration in evaluation, float32."""
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    options = {} if implementation is None else {"attn_implementation": implementation}
    model: PreTrainedModel = auto.from_config(copy.deepcopy(config), dtype=torch.float32, **options)
    return model.eval()


def _randomize(model: nn.Module) -> None:
    """Draw weights so large that each part of the model changes its logits."""
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.normal_(std=max(parameter.shape[1:]) ** -0.5)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
