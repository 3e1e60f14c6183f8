"""Decoders in GGUF, the format of llama.cpp: names of weights and metadata, from a table of each
family.

The computation of an architecture is fixed in llama.cpp: few choices are in the file. So an
`Architecture` states what a model must be, and everything else is refused. The requirements are
from llama.cpp's sources (src/models, July to November 2026); tests/models/test_gguf.py compares
the results.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf_rows import ROWS, Constant, PlusOne
from torchtitan.models.common.layer_types import LayerType, WindowedDecoder
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.norms import OffsetRMSNorm
from torchtitan.models.common.rope import RoPEConfig, attention_factor, rope_frequencies
from torchtitan.protocols.state_dict_adapter import (
    ExternalFormat,
    KeyMapping,
    Repeated,
    RopePermutation,
    StateDictAdapter,
    model_tensor_specs,
)
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The RoPE of an architecture."""

    neighbors: bool = False
    """It pairs neighboring elements of queries and keys (LLAMA_ROPE_TYPE_NORM)."""

    part: bool = False
    """It rotates a part of each head, if told so."""

    scalings: Sequence[str] = ("linear", "yarn")
    """Changes for long contexts that it computes."""

    yarn_factor: float | None = None
    """Factor of cosines and sines that it has with YaRN; None: the usual one."""

    own: bool = False
    """`rows` and `keys` of the architecture describe the scaling."""


NEIGHBORS = Rotation(neighbors=True)
"""The RoPE of Llama and its relatives."""


@dataclass(frozen=True, kw_only=True)
class Tying:
    """The ties of an architecture's output to the embedding."""

    required: bool | None = None
    """True if the output has the weights of the embedding; None: either."""

    copies: bool = False
    """It reads the output's weights even if they are tied."""


TIED = Tying(required=True)
"""An output that always has the embedding's weights."""


@dataclass(frozen=True)
class Experts:
    """Routing of an architecture of llama.cpp."""

    always: Mapping[str, object]
    """Fields of `moe` → values that it always computes."""

    chosen: Sequence[str] = ()
    """Fields of `moe` that the file gives."""

    step: bool = False
    """The file gives n, and every n-th layer has experts."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp, and what it requires of our model."""

    name: str
    """As in `general.architecture`."""

    config: type[Decoder.Config]
    """Configuration of the model here."""

    rotation: Rotation = Rotation()
    """Its RoPE."""

    rows: Callable[[Any], Sequence[KeyMapping]] = lambda config: ()
    """Return rows that replace the shared ones of the same tensors."""

    biased: str = "qkv"
    """Projections that may have a bias: of attention `qkvo`, of the feed-forward network `f`."""

    any_head_width: bool = True
    """The heads may be wider or narrower than the model's width divided by their number."""

    windows: Sequence[LayerType] | Literal["stated"] = ()
    """Types of layers, repeated, if it computes windows; `stated`: the file says which layers have
    windows. Without them, the context is as long as the window, within which every layer sees all
    earlier tokens."""

    tying: Tying = Tying()
    """Tying of the output to the embedding."""

    experts: Experts | None = None
    """Routing; None without experts."""

    keys: Callable[[Any], dict[str, object]] = lambda config: {}
    """Return further metadata. Raises `UserError` for a model that it does not compute."""

    def is_for(self, config: Decoder.Config) -> bool:
        """Return whether this is the architecture of a configuration. Several may have its type."""
        return type(config) is self.config


LATENT_EPS = 1e-6
"""Added by models to the mean squares of latents, and to the squares of queries and keys of delta
nets; llama.cpp adds --model.norm_eps there."""

_LARGEST_EPS = 1e-5
"""The largest `norm_eps` of published models."""


def check_eps(config: Decoder.Config) -> None:
    """Warn if a model's norms of latents and delta nets add another number than its other norms.
    Raise `UserError` if the difference matters."""
    eps = config.norm_eps
    must = f"at most {_LARGEST_EPS}, since it adds that to norms of latents and delta nets too"
    require_gguf(eps <= _LARGEST_EPS, "norm_eps", eps, must)
    if eps != LATENT_EPS:
        logger.warning(
            "llama.cpp adds --model.norm_eps %s in norms of latents and delta nets, but this model "
            "adds %s: its numbers differ slightly",
            eps,
            LATENT_EPS,
        )


def require_gguf(fits: bool, option: str, value: object, must: str) -> None:
    """Raise `UserError` unless an architecture of llama.cpp computes a model with this value."""
    if not fits:
        raise UserError(
            f"GGUF cannot hold this model: --model.{option} is {value}, but llama.cpp requires "
            f"{must}"
        )


def gguf_format(*architectures: Architecture) -> ExternalFormat:
    """Return the format GGUF of a family, which is only written."""

    def find(config: Decoder.Config) -> Architecture:
        for each in architectures:
            if each.is_for(config):
                return each
        raise UserError(
            f"GGUF cannot hold this model: {type(config)._owner.__name__} has no architecture "
            "in llama.cpp that torchtitan knows"
        )

    def read(document: Mapping[str, object]) -> Decoder.Config:
        raise UserError("GGUF files are written, not read; use the model's Hugging Face folder")

    return ExternalFormat(
        adapter=lambda config: _adapter(find(config), config),
        to_external=lambda config: _metadata(find(config), config),
        from_external=read,
    )


def _adapter(architecture: Architecture, config: Decoder.Config) -> StateDictAdapter:
    _check(architecture, config)
    specs = model_tensor_specs(config)
    rows = [_transformed(row, architecture, config) for row in architecture.rows(config)]
    own = {name for row in rows for name in _names(row.internal)}
    rows += [
        _transformed(row, architecture, config)
        for row in ROWS
        if own.isdisjoint(_names(row.internal))
    ]
    return StateDictAdapter(
        [*rows, *_factors(architecture, config)],
        n_layers=config.n_layers,
        only=specs,
    )


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _transformed(row: KeyMapping, architecture: Architecture, config: Decoder.Config) -> KeyMapping:
    name = next(iter(_names(row.internal)), "")
    if name == "tok_embeddings.weight" and architecture.tying.copies and config.tie_embeddings:
        return KeyMapping(name, ("token_embd.weight", "output.weight"), Repeated(2))
    is_rotated = name.startswith(("layers.*.attention.wq.", "layers.*.attention.wk."))
    if is_rotated and architecture.rotation.neighbors:
        head_dim = config.resolved_head_dim
        permutation = RopePermutation(head_dim, config.rope.rotated_dim(head_dim))
        return KeyMapping(row.internal, row.external, permutation)
    is_norm = name.endswith("norm.weight") and name != "layers.*.attention.norm.weight"
    if is_norm and getattr(config._owner, "norm_kind", None) is OffsetRMSNorm:
        return KeyMapping(row.internal, row.external, PlusOne())
    return row


def divisors(rope: RoPEConfig, head_dim: int) -> KeyMapping:
    """Return the row of the tensor with a divisor for each of RoPE's frequencies."""
    unscaled = rope_frequencies(RoPEConfig(theta=rope.theta), head_dim)
    # Divisors of pairs that are not rotated are so large that the angles round to 0.
    factors = (unscaled / rope_frequencies(rope, head_dim)).clamp(max=1e30)
    return KeyMapping((), "rope_freqs.weight", Constant(tuple(factors.tolist())))


def _factors(architecture: Architecture, config: Decoder.Config) -> list[KeyMapping]:
    """Return the rows of divisors of RoPE's frequencies."""
    rope = config.rope
    if not rope.is_scaled or architecture.rotation.own:
        return []
    if rope.scaling == "longrope":
        return [
            KeyMapping((), f"rope_factors_{name}.weight", Constant(tuple(factors)))
            for name, factors in (("long", rope.long_factors), ("short", rope.short_factors))
            if factors is not None  # `RoPEConfig.validate` requires both
        ]
    if rope.scaling == "llama3":
        return [divisors(rope, config.resolved_head_dim)]
    return []


def _metadata(architecture: Architecture, config: Decoder.Config) -> dict[str, object]:
    """Return the metadata of a model, without the prefix of the architecture except in
    `general.architecture`. Numbers without a point are unsigned integers there."""
    _check(architecture, config)
    head_dim = config.resolved_head_dim
    keys = {
        "general.architecture": architecture.name,
        "vocab_size": config.vocab_size,
        "context_length": _context(architecture, config),
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "feed_forward_length": config.ffn_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.rope.rotated_dim(head_dim),
        "rope.freq_base": float(config.rope.theta),
    }
    return (
        keys
        | _windows(architecture, config)
        | _rope(architecture, config)
        | _experts(architecture, config)
        | architecture.keys(config)
    )


def _windows(architecture: Architecture, config: Decoder.Config) -> dict[str, object]:
    if not isinstance(config, WindowedDecoder.Config) or config.sliding_window is None:
        return {}
    if architecture.windows == "stated":
        pattern = [config.has_window(index) for index in range(config.n_layers)]
        return {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": pattern,
        }
    return {"attention.sliding_window": config.sliding_window} if architecture.windows else {}


def _rope(architecture: Architecture, config: Decoder.Config) -> dict[str, object]:
    rope = config.rope
    if architecture.rotation.own:
        return {}
    if not rope.is_scaled or rope.scaling == "llama3":  # `rope_freqs.weight`
        return {}
    keys = {
        "rope.scaling.type": rope.scaling,
        "rope.scaling.original_context_length": rope.original_max_seq_len,
    }
    if rope.scaling == "longrope":
        return {**keys, "rope.scaling.attn_factor": attention_factor(rope)}
    if rope.scaling == "yarn_untruncated":
        logger.warning(
            "llama.cpp rounds the bounds of YaRN to whole dimensions, and this model does not: its "
            "numbers differ slightly there"
        )
        keys["rope.scaling.type"] = "yarn"
    if rope.scaling == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.scaling_factor)}
    return {
        **keys,
        "rope.scaling.factor": float(rope.scaling_factor),
        "rope.scaling.yarn_beta_fast": float(rope.high_freq_factor),
        "rope.scaling.yarn_beta_slow": float(rope.low_freq_factor),
    }


_GATING = {"softmax": 1, "sigmoid": 2}
"""Scores of a router → llama.cpp's number of them."""

_CHOICES: Mapping[str, Callable[[ExpertLayers.Config], tuple[str, object]]] = {
    "n_shared_experts": lambda config: ("expert_shared_count", config.moe.n_shared_experts),
    "n_group": lambda config: ("expert_group_count", _groups(config.moe)[0]),
    "topk_group": lambda config: ("expert_group_used_count", _groups(config.moe)[1]),
    "norm_topk_prob": lambda config: ("expert_weights_norm", config.moe.norm_topk_prob),
    "routed_scaling_factor": lambda config: (
        "expert_weights_scale",
        float(config.moe.routed_scaling_factor),
    ),
    "scoring_func": lambda config: ("expert_gating_func", _GATING[config.moe.scoring_func]),
    "layer_types": lambda config: ("leading_dense_block_count", _n_dense(config)),
}
"""Field of `moe` → its key in files of architectures that read it."""


CHOICES_OF_DEEPSEEK = tuple(_CHOICES)
"""Fields of `moe` that files of DeepSeek-V3 and models with its experts give."""


def _groups(moe: MoEConfig) -> tuple[int, int]:
    """Return the numbers of groups of experts, and of those that a token uses. llama.cpp refuses a
    choice of all groups, which is one group."""
    return (moe.n_group, moe.topk_group) if moe.topk_group < moe.n_group else (1, 1)


def _n_dense(config: ExpertLayers.Config) -> int:
    return sum(not config.moe.is_sparse(index) for index in range(config.n_layers))


def _step(config: ExpertLayers.Config) -> int:
    """Return n if every n-th layer has experts."""
    return next(index + 1 for index in range(config.n_layers) if config.moe.is_sparse(index))


def _experts(architecture: Architecture, config: Decoder.Config) -> dict[str, object]:
    if not isinstance(config, ExpertLayers.Config):
        return {}
    moe = config.moe
    keys: dict[str, object] = {
        "expert_count": moe.n_experts,
        "expert_used_count": moe.top_k,
        "expert_feed_forward_length": config.expert_dim,
    }
    if moe.shared_ffn_dim:
        keys["expert_shared_feed_forward_length"] = moe.shared_ffn_dim
    chosen = architecture.experts.chosen if architecture.experts else ()
    if architecture.experts and architecture.experts.step:
        keys["interleave_moe_layer_step"] = _step(config)
    return keys | dict(_CHOICES[name](config) for name in chosen if name in _CHOICES)


def _context(architecture: Architecture, config: Decoder.Config) -> int:
    window = getattr(config, "sliding_window", None)
    if architecture.windows or window is None or window >= config.max_seq_len:
        return config.max_seq_len
    logger.warning(
        "llama.cpp computes no windows for this architecture: the file's context is "
        "--model.sliding_window %s tokens instead of %s, within which the numbers are the same",
        window,
        config.max_seq_len,
    )
    return window


def _check(architecture: Architecture, config: Decoder.Config) -> None:
    """Raise `UserError` unless llama.cpp computes the model."""
    if config.scores:
        raise UserError("GGUF cannot hold this model: it has one score instead of logits")
    _check_parts(architecture, config)
    _check_rope(architecture, config)
    types = getattr(config, "layer_types", ())
    if architecture.windows == "stated":
        if isinstance(config, WindowedDecoder.Config):
            has_any = any(config.has_window(index) for index in range(config.n_layers))
            require_gguf(has_any, "layer_types", types, "a layer with a window")
    elif architecture.windows and getattr(config, "sliding_window", None) is not None:
        n = config.n_layers
        repeated = [tuple(t[i % len(t)] for i in range(n)) for t in (types, architecture.windows)]
        require_gguf(repeated[0] == repeated[1], "layer_types", types, str(architecture.windows))
    if isinstance(config, ExpertLayers.Config):
        moe, experts = config.moe, architecture.experts
        assert experts is not None, "an architecture without experts"
        fixed = {
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "scoring_func": "softmax",
            "selection_bias": False,
            "n_shared_experts": 0,
            **experts.always,
        }
        for name, must in fixed.items():
            fits = name in experts.chosen or getattr(moe, name) == must
            require_gguf(fits, f"moe.{name}", getattr(moe, name), str(must))
        fits, must = _check_sparse(experts, config)
        require_gguf(fits, "moe.layer_types", moe.layer_types, must)


def _check_sparse(experts: Experts, config: ExpertLayers.Config) -> tuple[bool, str]:
    """Return whether an architecture computes experts in the layers of a model, and what it
    computes."""
    sparse = [config.moe.is_sparse(index) for index in range(config.n_layers)]
    if experts.step:
        steps = [any(sparse) and (i + 1) % _step(config) == 0 for i in range(config.n_layers)]
        return any(sparse) and sparse == steps, "experts in every n-th layer"
    if "layer_types" in experts.chosen:
        return sparse == sorted(sparse), "experts in all layers after the first ones"
    return all(sparse), "experts in all layers"


def _check_parts(architecture: Architecture, config: Decoder.Config) -> None:
    tied = config.tie_embeddings
    require_gguf(architecture.tying.required in (None, tied), "tie_embeddings", tied, f"{not tied}")
    width = config.dim // config.n_heads
    is_usual = config.dim % config.n_heads == 0 and config.resolved_head_dim == width
    fits = architecture.any_head_width or is_usual
    require_gguf(fits, "head_dim", config.resolved_head_dim, f"dim / n_heads = {width}")
    names = model_tensor_specs(config)
    for option, projections, ends in (
        ("attention_bias", "o", ("wo.bias",)),
        ("mlp_bias", "f", ("w1.bias", "w2.bias", "w3.bias")),
    ):
        fits = projections in architecture.biased or not any(name.endswith(ends) for name in names)
        must = "a model without these biases"
        require_gguf(fits, option, getattr(config, option), must)


def _check_rope(architecture: Architecture, config: Decoder.Config) -> None:
    rope = config.rope
    is_known = not rope.is_scaled or rope.scaling in architecture.rotation.scalings
    known = " or ".join(architecture.rotation.scalings) or "no scaling"
    require_gguf(is_known, "rope.scaling", rope.scaling, known)
    part = rope.rotated_fraction
    require_gguf(part == 1.0 or architecture.rotation.part, "rope.rotated_fraction", part, "1.0")
    if rope.is_scaled and rope.scaling.startswith("yarn"):
        usual = attention_factor(RoPEConfig(scaling="yarn", scaling_factor=rope.scaling_factor))
        must, factor = architecture.rotation.yarn_factor or usual, attention_factor(rope)
        fits = math.isclose(factor, must, rel_tol=1e-6)
        require_gguf(fits, "rope.attention_factor", factor, f"{must} with YaRN")
