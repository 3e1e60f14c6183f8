"""Gated Delta Networks (Yang et al. 2024, arXiv:2412.06464), with the parameters of Qwen3-Next's
and Qwen3.5's layers, and decoders with them in some layers.

Dimensions: H value heads with keys of E and values of F elements; J channels of the convolution; N
chunks of C tokens; X = 1 decay of a head, or one for each of the E elements of its keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.chunks import Chunks
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.document_conv import DocumentConv
from torchtitan.models.common.feed_forward import Activation, make_linear
from torchtitan.models.common.fused_recurrences import fused_recurrence, is_fusable
from torchtitan.models.common.mixers import ATTENTION, HybridDecoder, MixerKind
from torchtitan.models.common.norms import OffsetRMSNorm, RMSNorm
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.initializer import Constant, LogUniform, with_initializers
from torchtitan.protocols.recurrence import Recurrence
from torchtitan.protocols.sharding import TensorSharding, with_features
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping
from torchtitan.tools.errors import UserError, require


class GatedDeltaNet(Recurrence):
    """Linear attention with a state of constant size, a matrix per head: each token multiplies it
    by a decay, and moves the value that it returns for the token's key toward the token's value.
    States are not shared by documents. `gate` is the function of the values' gates.

    Args:
        num_key_heads: heads of queries and keys; divides num_value_heads. Each serves neighboring
            value heads.
        conv_kernel_dim: tokens that the convolution of queries, keys and values sees, including the
            current one.
        init_std: standard deviation of the initial input projections.
        out_init_std: standard deviation of the initial output projection.
        largest_beta: bound of how far a token moves the value that the state returns for its key; 1
            replaces it, 2 reverses it (arXiv:2411.12537).
    """

    gate: Activation = staticmethod(F.silu)

    recurrence: ClassVar[str] = "gated delta rule"
    """Name of the recurrence in `fused_recurrences.KERNELS`."""

    def __init__(
        self,
        *,
        dim: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        conv_kernel_dim: int,
        norm_eps: float,
        init_std: float,
        out_init_std: float,
        largest_beta: float = 1.0,
    ):
        super().__init__()
        self.largest_beta = largest_beta
        assert num_value_heads % num_key_heads == 0
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        self.fused = fused_recurrence(self.recurrence, key_head_dim, value_head_dim)
        key_dim, value_dim = num_key_heads * key_head_dim, num_value_heads * value_head_dim

        # Names that attention does not use: a model has both kinds of layers, and its tables tell
        # them by names.
        self.in_q, self.in_k = (make_linear(dim, key_dim, init_std) for _ in range(2))
        self.in_v = make_linear(dim, value_dim, init_std)
        self.in_z: nn.Module = make_linear(dim, value_dim, init_std)
        self.in_a: nn.Module = make_linear(dim, num_value_heads, init_std)
        self.in_b = make_linear(dim, num_value_heads, init_std)
        self.conv_q, self.conv_k = (DocumentConv(key_dim, conv_kernel_dim) for _ in range(2))
        self.conv_v = DocumentConv(value_dim, conv_kernel_dim)
        self.A_log, self.dt_bias = (nn.Parameter(torch.ones(num_value_heads)) for _ in range(2))
        with_initializers(self, A_log=LogUniform(0.01, 16.0), dt_bias=Constant(1.0))
        with_features(self, A_log=("out",), dt_bias=("out",))
        self.norm = RMSNorm(value_head_dim, norm_eps)
        self.out = make_linear(value_dim, dim, out_init_std)

    def project(self, x_BLD: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values before their convolutions, and decays and betas before
        their nonlinear functions."""
        parts = self.in_q, self.in_k, self.in_v, self.in_a, self.in_b
        return tuple(part(x_BLD) for part in parts)

    def recur(
        self, *inputs: Tensor, documents_BL: Tensor, state: Any, attention: AttentionMetadata
    ) -> tuple[Tensor, Any]:
        """Return the values that the states return for the queries, (B, L, H, F)."""
        precise = torch.promote_types(inputs[0].dtype, torch.float32)
        *qkv, decay_BLJ, beta_BLH = (each.to(precise) for each in inputs)
        earlier, state_BHEF = state or ((None, None, None), None)
        convs = self.conv_q, self.conv_k, self.conv_v
        mixed = [
            conv(each, documents_BL, before)
            for conv, each, before in zip(convs, qkv, earlier, strict=True)
        ]
        q, k, v = (F.silu(each_BLJ) for each_BLJ, _ in mixed)
        q_BLKE, k_BLKE = (_normalized(x.unflatten(-1, (-1, self.key_head_dim))) for x in (q, k))
        q_BLKE = q_BLKE * self.key_head_dim**-0.5
        v_BLHF = v.unflatten(-1, (-1, self.value_head_dim))
        decays = self.decays(decay_BLJ), self.largest_beta * beta_BLH.sigmoid()
        if self.fused is not None and is_fusable(inputs[0], attention):
            qkv = [each.type_as(inputs[0]) for each in (q_BLKE, k_BLKE, v_BLHF)]
            return self.fused((*qkv, *decays), documents_BL, attention), None
        out_BLHF, state_BHEF = gated_delta_rule(
            q_BLKE, k_BLKE, v_BLHF, *decays, documents_BL, state_BHEF
        )
        return out_BLHF.to(inputs[0].dtype), (tuple(last for _, last in mixed), state_BHEF)

    def decays(self, decay_BLJ: Tensor) -> Tensor:
        """Return the logarithms of the states' decays, (B, L, H, X)."""
        return (self.rates(decay_BLJ) * F.softplus(decay_BLJ + self.own(self.dt_bias)))[..., None]

    def rates(self, decay_BLJ: Tensor) -> Tensor:
        """Return the factor of each head's logarithms, (H,), in the type of `decay_BLJ`."""
        return -self.own(self.A_log).type_as(decay_BLJ).exp()

    def finish(self, out_BLHF: Tensor, x_BLD: Tensor) -> Tensor:
        """Gate the normalized values, and project them."""
        precise = torch.promote_types(x_BLD.dtype, torch.float32)
        gate_BLHF = self.gate(self.in_z(x_BLD).to(precise)).view_as(out_BLHF)
        out_BLHF = (self.norm(out_BLHF) * gate_BLHF).to(x_BLD.dtype)
        return self.out(out_BLHF.flatten(-2))


def gated_delta_rule(
    q_BLKE: Tensor,
    k_BLKE: Tensor,
    v_BLHF: Tensor,
    decay_BLHX: Tensor,
    beta_BLH: Tensor,
    documents_BL: Tensor,
    state_BHEF: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, L, H, F) and the last state (B, H, E, F) of the recurrence

        S_t = (1 - b_t k_t k_tᵀ) diag(a_t) S_(t-1) + b_t k_t v_tᵀ,  o_t = S_tᵀ q_t,

    with a = exp(decay), of the head or of each element of its keys (arXiv:2510.26692, equation 1),
    which starts from 0 in each document, computed in chunks (arXiv:2412.06464, 3.3): in a chunk,
    the tokens' changes of the state solve a triangular system.

    Args:
        q_BLKE: queries; each of the K heads serves neighboring value heads.
        k_BLKE: keys, as the queries.
        documents_BL: numbers of the tokens' documents, (B or 1, L); 0: the document of
            `state_BHEF`.
        state_BHEF: state before the first token; None: zeros.
    """
    chunks = Chunks(decay_BLHX, documents_BL)
    repeats = v_BLHF.shape[2] // k_BLKE.shape[2]
    q, k = (chunks.split(x.repeat_interleave(repeats, dim=2)) for x in (q_BLKE, k_BLKE))
    v = chunks.split(v_BLHF)
    # The padding has no effect on the state: its decay and its beta are 0.
    beta_BNHC1 = chunks.split(beta_BLH[..., None])
    k_beta = k * beta_BNHC1
    sides = torch.cat((v * beta_BNHC1, k_beta * chunks.before), dim=-1)
    # the solver reads only the part of the system below the diagonal
    system_BNHCC, scores_BNHCC = chunks.products(k, k_beta, q)
    solved = torch.linalg.solve_triangular(system_BNHCC, sides, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    # Only the last token's document reaches the next chunk.
    parts = (values, reads, scores_BNHCC, q * chunks.before, k * chunks.after)
    state = (
        q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
        if state_BHEF is None
        else state_BHEF
    )
    outs = []
    kept_BNHX1 = chunks.before[..., -1, :, None]
    for v_new, read, score, q_before, k_after, keep in zip(
        *(x.unbind(1) for x in (*parts, kept_BNHX1)), strict=True
    ):
        changes_BHCF = v_new - read @ state
        outs.append(q_before @ state + score @ changes_BHCF)
        state = keep * state + k_after.mT @ changes_BHCF
    return chunks.join(torch.stack(outs, dim=1)), state


def _normalized(x_BLHE: Tensor) -> Tensor:
    return x_BLHE * torch.rsqrt(x_BLHE.square().sum(-1, keepdim=True) + 1e-6)


_SIZES = (
    *(
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ),
    "linear_conv_kernel_dim",
)

DELTA_NET_KEYS = {name: name for name in ("layer_types", *_SIZES)}
"""`ModelType.keys` of gated delta nets."""

_OURS, _THEIRS = "layers.*.attention", "model.layers.*.linear_attn"
_NAMES = {
    "norm.weight": "norm.weight",
    "out.weight": "out_proj.weight",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
}


def fused_row(ours: str, parts: str, theirs: str, groups: int = 1) -> KeyMapping:
    """Return the row of one tensor of a file for some `parts` of a delta net, as in
    `fused_row("in_{}.weight", "qkv", "in_proj_qkv.weight")`."""
    internal = tuple(f"{_OURS}.{ours.format(part)}" for part in parts)
    return KeyMapping(internal, f"{_THEIRS}.{theirs}", Concatenated(0, groups))


SHARED_DELTA_NET_ROWS = (
    *(KeyMapping(f"{_OURS}.{ours}", f"{_THEIRS}.{theirs}") for ours, theirs in _NAMES.items()),
    fused_row("conv_{}.weight", "qkv", "conv1d.weight"),
)
"""Names of the weights of gated delta nets, except of their input projections. No layer has tensors
of both these rows and attention's rows."""

DELTA_NET_ROWS = (
    *SHARED_DELTA_NET_ROWS,
    fused_row("in_{}.weight", "qkv", "in_proj_qkv.weight"),
    *(
        KeyMapping(f"{_OURS}.in_{name}.weight", f"{_THEIRS}.in_proj_{name}.weight")
        for name in "zab"
    ),
)
"""Names of the weights of Qwen3.5's delta nets."""


def prepare_layer_types(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` for its `full_attention_interval`. Raise `UserError`
    for contradictory keys."""
    reader = ConfigReader("config.json", document)
    n_layers, interval = reader.n_layers(), reader.whole_number("full_attention_interval", 4)
    types = [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(n_layers)
    ]
    prepared = {"layer_types": types, **document}
    has_interval = prepared.pop("full_attention_interval", None) is not None
    if prepared["layer_types"] != types and has_interval:
        raise UserError(
            f"config.json: full_attention_interval {interval} contradicts layer_types "
            f"{prepared['layer_types']}"
        )
    return prepared


def _state_flops(decoder: Any, index: int, seq_len: int) -> float:
    """A gated delta net multiplies a key and a query with each state, and adds the product of a key
    and a value to it (arXiv:2412.06464, equation 10): 2 operations each per element. The chunked
    computation needs more."""
    config = decoder.config
    n_elements = config.linear_key_head_dim * config.linear_value_head_dim
    return 6 * config.linear_num_value_heads * n_elements


_TENSOR: Mapping[str, TensorSharding] = {
    **{f"in_{name}": "columns" for name in "qkvzab"},
    **{f"conv_{name}": "own channels" for name in "qkv"},
    "norm": "heads",
    "out": "rows",
}
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")

DELTA_NET = MixerKind(
    make=lambda decoder, index: decoder.make_delta_net(index),
    score_flops=_state_flops,
    tensor=_TENSOR,
    heads=_HEADS,
)


class DeltaNetDecoder(HybridDecoder):
    """A decoder whose layers of type linear_attention are gated delta nets."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridDecoder.Config):
        layer_types: list[Literal["linear_attention", "full_attention"]] = field(
            default_factory=lambda: [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ]
        )
        """Types of the first layers, repeated for the others."""

        linear_num_key_heads: int = 16
        """Heads of queries and keys in gated delta nets; divides linear_num_value_heads."""

        linear_num_value_heads: int = 32
        """Heads of values in gated delta nets, each with a state."""

        linear_key_head_dim: int = 128
        """Width of a query or key in gated delta nets."""

        linear_value_head_dim: int = 128
        """Width of a value in gated delta nets."""

        linear_conv_kernel_dim: int = 4
        """Tokens that the convolution of a gated delta net sees, including the current one."""

        mixers: ClassVar[Mapping[str, MixerKind]] = {
            "linear_attention": DELTA_NET,
            "full_attention": ATTENTION,
        }

        def validate(self) -> None:
            HybridDecoder.Config.validate(self)
            self.check_sizes(2**16, *_SIZES)
            n_keys, n_values = self.linear_num_key_heads, self.linear_num_value_heads
            must = f"a divisor of linear_num_value_heads {n_values}"
            require(n_values % n_keys == 0, "--model.linear_num_key_heads", n_keys, must)

    config: Config

    def make_delta_net(self, index: int, **options: Any) -> nn.Module:
        """Return the delta net of a layer; `options` are those of `GatedDeltaNet`."""
        config = self.config
        own = {
            "dim": config.dim,
            "num_key_heads": config.linear_num_key_heads,
            "num_value_heads": config.linear_num_value_heads,
            "key_head_dim": config.linear_key_head_dim,
            "value_head_dim": config.linear_value_head_dim,
            "conv_kernel_dim": config.linear_conv_kernel_dim,
            "norm_eps": config.norm_eps,
            **self.init_stds(index),
        }
        return GatedDeltaNet(**{**own, **options})


class GatedHybridDecoder(DeltaNetDecoder):
    """Gated delta nets and attention with norms of queries and keys, and a gate of its result, as
    in Qwen3-Next and Qwen3.5."""

    norm_kind = OffsetRMSNorm

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("qk_norm", self.make_norm)
        options.setdefault("gated", True)
        return super().make_attention(index, **options)
