"""Keep packed documents apart in any class of transformers, in the fastest way that a trial of a
tiny clone allows."""

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
)

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchtitan.models.common.attention import Attention, with_kernel
from torchtitan.models.transformers.description import missing_kernels
from torchtitan.models.transformers.tiny import (
    CLONE_TOLERANCE,
    TEXT_IDS,
    random_clone,
    text_inputs,
    trial,
)
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.device import send
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNEL = "torchtitan"  # the name of our attention among transformers' names

Mode = Literal["kernel", "masks", "rows"]

# Functions that transformers builds share the code of their builder.
_JOINED_MASKS = masking_utils.and_masks()
_WINDOW_MASK = masking_utils.sliding_window_overlay(1)


class KernelProperties(TypedDict):
    """What the choice of a kernel depends on besides the batch, see `choose_kernel`."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    capped: bool


Index = Tensor | int
"""An index of a mask function: of the row, the head, the query or the key."""

MaskT = TypeVar("MaskT")


class MaskOptions(TypedDict, total=False):
    """The arguments of transformers' mask functions, such as `sdpa_mask`, that are read here."""

    batch_size: Required[int]
    q_length: Required[int]
    kv_length: Required[int]
    mask_function: Required[FunctionType]
    config: Required[PretrainedConfig]
    device: Required[torch.device | str]
    dtype: Required[torch.dtype]
    attention_mask: Tensor | None
    allow_is_causal_skip: bool
    allow_is_bidirectional_skip: bool


class ClassOutputs(Protocol):
    """Results of a class. Some have more fields, such as `aux_loss` and caches."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def router_logits(self) -> tuple[Tensor, ...] | None: ...


@dataclass(frozen=True)
class ForwardPass:
    """The inputs of a forward pass that its masks depend on."""

    attention: AttentionMetadata
    """Documents of the tokens."""
    static: bool = False
    """True if kernels must have constant shapes, for compiled blocks."""
    configs: tuple[type, ...] | None = None
    """Types of the configurations whose masks are for tokens, since a vision tower has masks of its
    own; None: all."""
    attend: nn.Module | None = None
    """Module that computes our attention, such as with the keys of other ranks."""
    at_places: bool = False
    """True if masks depend on places in the row, as masks of images do, and not on positions in
    documents only."""

    def call(self, model: "PreTrainedModel", **inputs: object) -> ClassOutputs:
        """Call a class in this pass."""
        context = copy_context()
        context.run(_current.set, self)
        outputs: ClassOutputs = context.run(model, **inputs)
        return outputs


_current: ContextVar[ForwardPass | None] = ContextVar("current", default=None)


class Documents:
    """Replaces a mask that is causal within documents and a window. It is an argument of blocks, so
    that they also get it when activation checkpointing recomputes them."""

    def __init__(
        self,
        attention: AttentionMetadata,
        *,
        static: bool,
        attend: nn.Module | None = None,
        **properties: Unpack[KernelProperties],
    ):
        self.attention, self.static = attention, static
        self.attend = attend
        self._with_kernels: dict[object, AttentionMetadata] = {}
        self.with_kernel(**properties)  # expected of all layers, so that blocks find it

    def with_kernel(self, **properties: Unpack[KernelProperties]) -> AttentionMetadata:
        """Return the metadata with the kernel for these arguments of `choose_kernel`, chosen once
        per batch."""
        key = None if self.static else tuple(properties.values())
        if key not in self._with_kernels:
            self._with_kernels[key] = with_kernel(self.attention, **properties, static=self.static)
        return self._with_kernels[key]


def _window(mask_function: FunctionType) -> tuple[bool, int | None]:
    """Return whether a mask of transformers is causal within at most a window, and the window."""
    parts = [mask_function]
    if mask_function.__code__ is _JOINED_MASKS.__code__:
        parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    windows = [part for part in parts if part is not masking_utils.causal_mask_function]
    if any(part.__code__ is not _WINDOW_MASK.__code__ for part in windows):
        return False, None
    sizes = [inspect.getclosurevars(part).nonlocals["sliding_window"] for part in windows]
    return len(windows) < len(parts), min(sizes, default=None)


def _make_mask(**options: Unpack[MaskOptions]) -> Tensor | Documents | None:
    """Make the mask of a model whose attention is ours, with the arguments of transformers'
    `sdpa_mask`."""
    current, (is_plain, window) = _active(options), _window(options["mask_function"])
    if current is None or not is_plain:
        return _within_documents(masking_utils.sdpa_mask)(**options)
    fields = vars(options["config"])  # getattr raises for what differs between layers
    return Documents(
        current.attention.with_window(window),
        static=current.static,
        attend=current.attend,
        device=torch.device(options["device"]),
        dtype=options["dtype"],
        head_dim=fields.get("qk_head_dim") or fields.get("head_dim") or 64,
        capped=fields.get("attn_logit_softcapping") is not None,
    )


def _active(options: MaskOptions) -> ForwardPass | None:
    """Return the current forward pass if a mask is one of the tokens of its documents."""
    current = _current.get()
    if current is None or options["q_length"] != options["kv_length"]:
        return None
    if current.configs is not None and type(options["config"]) not in current.configs:
        return None
    attention = current.attention
    whole = attention.n_rows, attention.max_seqlen
    shape = whole if attention.positions_BL is None else attention.positions_BL.shape
    return current if shape == (options["batch_size"], options["q_length"]) else None


def _within_documents(make: Callable[..., MaskT]) -> Callable[..., MaskT]:
    """Make one of transformers' mask functions keep the documents of the current forward pass
    apart."""

    def make_within(**options: Unpack[MaskOptions]) -> MaskT:
        if (current := _active(options)) is not None:
            options["attention_mask"] = None  # all ones, or zeros only after all that a token sees
            if (positions_BL := current.attention.positions_BL) is not None:
                options["mask_function"] = _remap(
                    options["mask_function"], positions_BL, at_places=current.at_places
                )
                options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make(**options)

    return make_within


def _remap(mask_function: FunctionType, positions_BL: Tensor, *, at_places: bool) -> FunctionType:
    documents_BL = (positions_BL == 0).cumsum(-1)

    def is_same(b: Index, h: Index, q: Index, k: Index) -> Tensor:
        return documents_BL[b, q] == documents_BL[b, k]

    def at_positions(b: Index, h: Index, q: Index, k: Index) -> Tensor:
        seen: Tensor = mask_function(b, h, positions_BL[b, q], positions_BL[b, k])
        return seen

    joined = masking_utils.and_masks(is_same, mask_function if at_places else at_positions)
    assert isinstance(joined, FunctionType)
    return joined


_WITHOUT_EFFECT = {
    *("sliding_window", "is_causal", "position_ids"),  # the mask has them
    *(
        "use_cache",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    ),
}
"""Options of attention without an effect. An unknown one may change scores, as sinks do."""


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
    """Attend with our kernels if the mask is ours, else as PyTorch does; (B, heads, L, head_dim) →
    (B, L, heads, head_dim)."""
    attend = Attention(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=softcap
    )
    if isinstance(attention_mask, Documents):
        if unknown := [
            name for name, x in options.items() if x is not None and name not in _WITHOUT_EFFECT
        ]:
            raise NotImplementedError(f"attention with {unknown[0]}")
        # Latent attention has values of another width, which not all kernels support.
        width = max(query.shape[-1], value.shape[-1])
        properties = KernelProperties(
            device=query.device,
            dtype=query.dtype,
            head_dim=width,
            capped=softcap is not None,
        )
        inputs: tuple[Tensor, ...] = (query, key, value)
        products: Callable[..., Tensor] = attend
        if dropout:
            if softcap is not None:
                raise NotImplementedError("attention with dropout and a soft cap")
            dense = replace(attention_mask.attention, kernel="dense")  # kernels have no dropout
            metadata = with_kernel(dense, **properties, static=attention_mask.static)
            products = partial(
                _with_dropout, module=module, dropout=dropout, scaling=scaling, **options
            )
        else:
            padded = (
                x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in inputs
            )
            inputs = tuple(padded)
            metadata = attention_mask.with_kernel(**properties)
        arguments = (*(x.transpose(1, 2) for x in inputs), metadata)
        if attention_mask.attend is None:
            result = products(*arguments)
        else:
            result = attention_mask.attend(*arguments, products=products)
        return result[..., : value.shape[-1]].contiguous(), None
    mask, options = attention_mask, {**options, "dropout": dropout, "scaling": scaling}
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    if mask is None:  # in generation
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(
            key.shape[2] - query.shape[2]
        )
    mask = mask | ~mask.any(-1, keepdim=True)  # padding sees nothing, whose softmax would be NaN
    return attend._products(query, key, value, attn_mask=mask).transpose(1, 2), None


def _with_dropout(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    attention: AttentionMetadata,
    *,
    module: nn.Module,
    **options: Any,
) -> Tensor:
    """As `common.attention.Attention` with the mask of `attention`, but by PyTorch, with
    dropout."""
    query, key, value = (x.transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
    return sdpa_attention_forward(module, query, key, value, attention.mask, **options)[0]


ALL_ATTENTION_FUNCTIONS.register(KERNEL, _attend)
masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(KERNEL, _make_mask)
masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
    "eager", _within_documents(masking_utils.eager_mask)
)
masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
    "sdpa", _within_documents(masking_utils.sdpa_mask)
)


@dataclass(frozen=True)
class Packing:
    """Form in which a class gets packed documents: with our attention ("kernel"), with its own and
    masks of documents, or a row per document."""

    mode: Mode
    reason: str = ""
    """Reason why faster modes fail."""
    is_exact: bool = True
    """True if a trial showed that documents cannot change each other."""

    @property
    def implementation(self) -> str | None:
        """Attention implementation of the class; None: its default."""
        return KERNEL if self.mode == "kernel" else None

    def run(
        self,
        model: "PreTrainedModel",
        tokens_BL: Tensor,
        attention: AttentionMetadata | None,
        *,
        static: bool = False,
        masks_padding: bool = False,
        attend: nn.Module | None = None,
        **options: object,
    ) -> ClassOutputs:
        """Call a class on packed tokens, or, without `attention`, on rows of one document each;
        `gather` its results. With `static`, kernels have constant shapes, for compiled blocks. With
        `masks_padding`, the class gets a mask of padding, which its losses of routers read and our
        attention does not. `attend` computes our attention, if it is used."""
        attention = attention or AttentionMetadata.of_rows(*tokens_BL.shape)
        mask_BL = torch.ones_like(tokens_BL)
        if masks_padding:
            mask_BL = padding_mask(tokens_BL, attention)
        inputs: dict[str, object] = {"attention_mask": mask_BL} if masks_padding else {}
        positions_BL = attention.positions_BL
        if self.mode != "rows":
            if positions_BL is None:
                positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(
                    tokens_BL
                )
            # With a mask, transformers does not look for documents in the positions, which would
            # wait for the device.
            inputs |= {"position_ids": positions_BL, "attention_mask": mask_BL}
        elif positions_BL is not None:
            mask_NM = send(_rows(attention)[1], tokens_BL.device)
            inputs["attention_mask"] = mask_NM * self.scatter(mask_BL, attention)
            tokens_BL = self.scatter(tokens_BL, attention)
            attention = AttentionMetadata.of_rows(*tokens_BL.shape)
        return ForwardPass(attention, static, attend=attend).call(
            model, **text_inputs(model, tokens_BL, **inputs), **options
        )

    def token_mask(self, tokens_BL: Tensor, attention: AttentionMetadata | None) -> Tensor:
        """Return whether each place that a class gets is a token of a document, flat, in the order
        of `run`."""
        attention = attention or AttentionMetadata.of_rows(*tokens_BL.shape)
        documents = attention.with_documents(tokens_BL.device).documents
        assert documents
        mask_BL = documents.has_token_BL
        if self.mode != "rows" or attention.positions_BL is None:
            return mask_BL.flatten()
        index_NM, mask_NM = (send(x, tokens_BL.device) for x in _rows(attention))
        return (mask_BL.flatten()[index_NM] & mask_NM.bool()).flatten()

    def scatter(self, values_BL: Tensor, attention: AttentionMetadata | None) -> Tensor:
        """Return packed values, (B, L, ...), in the form in which a class gets the values of tokens
        in `run`; padding repeats other values."""
        if self.mode != "rows" or attention is None or attention.positions_BL is None:
            return values_BL
        index_NM = send(_rows(attention)[0], values_BL.device)
        return values_BL.flatten(0, 1)[index_NM]

    def gather(self, hidden_NMD: Tensor, attention: AttentionMetadata | None) -> Tensor:
        """Return a class's results for packed tokens, (B, L, ...), from the results of `run`."""
        if self.mode != "rows" or attention is None or attention.positions_BL is None:
            return hidden_NMD
        _, mask_NM = _rows(attention)
        index_T = send(mask_NM.flatten().nonzero().flatten(), hidden_NMD.device)
        return hidden_NMD.flatten(0, 1)[index_T].unflatten(0, attention.positions_BL.shape)


def padding_mask(tokens_BL: Tensor, attention: AttentionMetadata) -> Tensor:
    """Return a mask that is 0 in padding, int64; 1 if there is nothing else, since a mean over no
    token would be NaN."""
    documents = attention.with_documents(tokens_BL.device).documents
    assert documents
    has_token_BL = documents.has_token_BL
    return (has_token_BL | ~has_token_BL.any()).long()


def _rows(attention: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return the places of the tokens in a row per document, padded with the next tokens, and a
    mask that is 0 in the padding, (N, M). N M is the batch size times (longest / average document);
    memory and operations grow with it."""
    starts, places_M = attention.cu_seqlens.long(), torch.arange(attention.max_seqlen)
    index_NM = (starts[:-1, None] + places_M).clamp(max=int(starts[-1]) - 1)
    return index_NM, (places_M < starts.diff()[:, None]).long()


_LENGTHS = [27, 5, 1, 31, 40, 24]
"""Tokens of the documents of the trial, in two rows; some are longer than the windows and chunks of
the clone."""


@trial
def find_packing(config: PretrainedConfig) -> Packing:
    """Return the fastest way in which a class keeps packed documents apart. Raise `UserError` if
    the class needs more than text, or tokens see later ones, as in an encoder."""
    return _try(config)


@trial
def choose_packing(config: PretrainedConfig) -> Packing:
    """As `find_packing`; log one line if the way is not the fastest."""
    packing = find_packing(config)
    log_packing(config, packing, "packed document")
    if missing := ", ".join(missing_kernels(config)):
        logger.info(
            "%s: without %s, its class computes with PyTorch's operations",
            config.model_type,
            missing,
        )
    return packing


def log_packing(config: PretrainedConfig, packing: Packing, what: str) -> None:
    """Log how a class keeps documents apart if it is not the fastest way. `what` names one of
    them."""
    if packing.mode != "kernel":
        rows = f"each {what} gets a row, padded to the length of the longest"
        way = (
            rows
            if packing.mode == "rows"
            else f"{what}s are kept apart by masks of all pairs of tokens"
        )
        doubt = (
            ""
            if packing.is_exact
            else ", but a trial did not show that they cannot change each other"
        )
        log = logger.info if packing.is_exact else logger.warning
        log("%s: %s%s (%s)", config.model_type, way, doubt, packing.reason)


def trial_config(config: PretrainedConfig) -> tuple[PretrainedConfig, list[Mode]]:
    """Return a configuration for trials, and the modes to try."""
    config, modes = copy.deepcopy(config), list(get_args(Mode))
    text = config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None):
        text.attn_logit_softcapping = 0.1  # so small that it changes the scores of the clone
        if getattr(text, "attention_dropout", 0):  # our attention has not both
            modes.remove("kernel")
    return config, modes


def _try(config: PretrainedConfig) -> Packing:
    config, modes = trial_config(config)
    model = None
    try:
        model = random_clone(config)
        tokens_BL = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 64))
        documents = tokens_BL.flatten().split(_LENGTHS)
        alone = [model(**text_inputs(model, document[None])).logits for document in documents]
        packed = torch.cat(alone, 1)
        if packed.shape[1] != tokens_BL.numel():
            raise ValueError("it gives no logits for each token")
    except Exception as error:
        # an argument is missing, or an explicit check
        if model and isinstance(error, TypeError | ValueError):
            raise UserError(
                f"model_type {config.model_type} does not compute text alone: {in_words(error)}"
            ) from error
        return Packing("rows", f"a tiny clone cannot be built ({in_words(error)})", is_exact=False)

    def change(logits: Tensor, expected: Tensor) -> float:
        return float((logits.reshape(expected.shape) - expected).abs().max() / packed.abs().max())

    rows, start = (
        model(**text_inputs(model, x)).logits for x in (tokens_BL, documents[0][None, :10])
    )
    if change(start, alone[0][:, :10]) > CLONE_TOLERANCE:
        raise UserError(
            f"model_type {config.model_type}: its tokens see later ones, so it cannot predict them"
        )
    if change(rows, packed) < 100 * CLONE_TOLERANCE:
        return Packing("rows", "no leak would be seen in a tiny clone", is_exact=False)
    attention = AttentionMetadata.from_positions(
        torch.cat([torch.arange(n) for n in _LENGTHS]).view(2, 64)
    )
    reasons: list[str] = []
    for mode in modes:
        packing = Packing(mode, "; ".join(reasons))
        try:
            candidate = random_clone(config, packing.implementation)
            plain = change(packing.run(candidate, tokens_BL, None).logits, rows)
            leak = change(
                packing.gather(packing.run(candidate, tokens_BL, attention).logits, attention),
                packed,
            )
        except Exception as error:
            reasons.append(f"{mode}: {in_words(error)}")
            continue
        if max(plain, leak) <= CLONE_TOLERANCE:
            return packing
        reasons.append(
            f"{mode}: leak {leak:.1e}, and without other documents logits change by {plain:.1e}"
        )
    return Packing("rows", "; ".join(reasons), is_exact=False)
