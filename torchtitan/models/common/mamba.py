"""Mamba 2 (Dao and Gu 2024, arXiv:2405.21060), with the parameters of Bamba's, Granite 4's and
Nemotron-H's layers.

Dimensions: H heads of P elements, in G groups of R neighboring heads that share their keys (B in
the paper) and queries (C) of N elements; J channels of a convolution; M chunks of T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import Section
from torchtitan.models.common.chunks import Chunks
from torchtitan.models.common.document_conv import DocumentConv
from torchtitan.models.common.feed_forward import make_linear
from torchtitan.models.common.fused_recurrences import fused_recurrence, is_fusable
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.mixers import ATTENTION, HybridDecoder, MixerKind
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.initializer import Constant, LogUniform, Uniform, with_initializers
from torchtitan.protocols.recurrence import OwnHeads, Recurrence
from torchtitan.protocols.sharding import TensorSharding, with_features
from torchtitan.protocols.state_dict_adapter import Concatenated, KeyMapping
from torchtitan.tools.errors import require


@dataclass(kw_only=True, slots=True)
class MambaConfig(Section):
    """Layers of Mamba 2, in the field `mamba` of a model's configuration."""

    n_heads: int = 128
    """Heads, each with a state of head_dim x state_dim elements."""

    head_dim: int = 64
    """Width of a head."""

    n_groups: int = 1
    """Groups of neighboring heads with the same keys and queries; divides n_heads."""

    state_dim: int = 128
    """Width of a key or query."""

    conv_width: int = 4
    """Tokens that the convolutions see, including the current one."""

    bias: bool = False
    """Add biases to the projections."""

    conv_bias: bool = True
    """Add biases to the convolutions."""

    least_step: float = 0.0
    """Smallest step (dt in the paper) of a token."""

    @property
    def dim(self) -> int:
        """Width of all heads."""
        return self.n_heads * self.head_dim

    def validate(self) -> None:
        """Raise `UserError` for impossible values."""
        for name in ("n_heads", "head_dim", "n_groups", "state_dim", "conv_width"):
            size = getattr(self, name)
            require(1 <= size <= 2**16, f"--model.mamba.{name}", size, f"from 1 to {2**16}")
        must = f"a divisor of --model.mamba.n_heads {self.n_heads}"
        require(self.n_heads % self.n_groups == 0, "--model.mamba.n_groups", self.n_groups, must)
        step = self.least_step
        require(0 <= step < math.inf, "--model.mamba.least_step", step, "0 or above")


class Mamba2(Recurrence):
    """A linear recurrence with a state of constant size per head, which decays with a rate that
    depends on the token. States are not shared by documents.

    Args:
        norm_eps: added to the mean square of each group's result.
        init_std: standard deviation of the initial input projections.
        out_init_std: standard deviation of the initial output projection.
    """

    def __init__(
        self,
        config: MambaConfig,
        *,
        dim: int,
        norm_eps: float,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.head_dim, self.state_dim = config.head_dim, config.state_dim
        self.least_step = config.least_step
        widths = config.head_dim, config.state_dim
        self.fused = fused_recurrence("selective scan of Mamba 2", *widths)
        inner, shared = config.dim, config.n_groups * config.state_dim
        self.in_z, self.in_x, self.in_b, self.in_c, self.in_dt = (
            make_linear(dim, width, init_std, bias=config.bias)
            for width in (inner, inner, shared, shared, config.n_heads)
        )
        has_one_group = config.n_groups == 1
        # tensor parallelism gathers its input, the keys or queries of a single group
        self.share: Any = nn.Identity() if has_one_group else None
        self.shared_inputs = (1, 2) if has_one_group else ()
        self.conv_x, self.conv_b, self.conv_c = (
            DocumentConv(channels, config.conv_width, bias=config.conv_bias, is_shared=is_shared)
            for channels, is_shared in (
                (inner, False),
                (shared, has_one_group),
                (shared, has_one_group),
            )
        )
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(config.n_heads)) for _ in range(3)
        )
        # As in the paper's code: rates from 1 to 16, and steps from 0.001 to 0.1 with a uniform
        # logarithm, since the softplus of numbers below -2 is their exponential, up to 6 %.
        steps = Uniform(math.log(0.001), math.log(0.1))
        with_initializers(self, A_log=LogUniform(1.0, 16.0), D=Constant(1.0), dt_bias=steps)
        with_features(self, A_log=("out",), D=("out",), dt_bias=("out",))
        self.norm = GatedGroupNorm(inner, inner // config.n_groups, norm_eps)
        self.out = make_linear(inner, dim, out_init_std, bias=config.bias)

    def project(self, x_BLD: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs, keys and queries before their convolutions, (B, L, J) each, and the
        steps before their softplus, (B, L, H)."""
        b_BLJ, c_BLJ = self.in_b(x_BLD), self.in_c(x_BLD)
        if self.share is not None:
            b_BLJ, c_BLJ = self.share(b_BLJ), self.share(c_BLJ)
        return self.in_x(x_BLD), b_BLJ, c_BLJ, self.in_dt(x_BLD)

    def recur(
        self, *inputs: Tensor, documents_BL: Tensor, state: Any, attention: AttentionMetadata
    ) -> tuple[Tensor, object]:
        """Return the heads' results, (B, L, H, P), and the convolutions' last inputs with the
        states."""
        precise = torch.promote_types(inputs[0].dtype, torch.float32)
        *inputs_BLJ, step_BLH = (each.to(precise) for each in inputs)
        *earlier, state_BHNP = state or (None,) * 4
        convs = (self.conv_x, self.conv_b, self.conv_c)
        mixed = [
            conv(each, documents_BL, before)
            for conv, each, before in zip(convs, inputs_BLJ, earlier, strict=True)
        ]
        x_BLJ, b_BLJ, c_BLJ = (F.silu(out_BLJ) for out_BLJ, _ in mixed)
        x_BLHP = x_BLJ.unflatten(-1, (-1, self.head_dim))
        step_BLH = F.softplus(step_BLH + self.own(self.dt_bias)).clamp(min=self.least_step)
        steps = step_BLH, -self.own(self.A_log).to(step_BLH.dtype).exp()
        b, c = (each.unflatten(-1, (-1, self.state_dim)) for each in (b_BLJ, c_BLJ))
        skipped_BLHP = self.own(self.D)[:, None] * x_BLHP
        if self.fused is not None and is_fusable(inputs[0], attention):
            x, b, c = (each.type_as(inputs[0]) for each in (x_BLHP, b, c))
            return self.fused((x, *steps, b, c), documents_BL, attention) + skipped_BLHP, None
        out_BLHP, state_BHNP = selective_scan(x_BLHP, *steps, b, c, documents_BL, state_BHNP)
        return out_BLHP + skipped_BLHP, (*(last for _, last in mixed), state_BHNP)

    def finish(self, out_BLHP: Tensor, x_BLD: Tensor) -> Tensor:
        """Gate and normalize the results, and project them."""
        return self.out(self.norm(out_BLHP.flatten(-2), self.in_z(x_BLD)).to(x_BLD.dtype))


class GatedGroupNorm(OwnHeads):
    """RMSNorm of `x * silu(gate)`, separately for groups of neighboring elements. Of a single
    group, a rank may have a part."""

    def __init__(self, dim: int, group_dim: int, eps: float):
        super().__init__()
        self.group_dim, self.eps = group_dim, eps
        self.weight = nn.Parameter(torch.empty(dim))
        with_initializers(self, weight=Constant(1.0))
        with_features(self, weight=("out",))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(…, dim) → (…, dim), computed in the type of `x`."""
        gated = x * F.silu(gate.type_as(x))
        if gated.shape[-1] >= self.group_dim:
            groups = gated.unflatten(-1, (-1, self.group_dim))
            return F.rms_norm(groups, (self.group_dim,), eps=self.eps).flatten(-2) * self.weight
        assert self.total_of_ranks is not None
        squares = self.total_of_ranks(gated.square().sum(dim=-1, keepdim=True))
        return gated * torch.rsqrt(squares / self.group_dim + self.eps) * self.weight


def selective_scan(
    x_BLHP: Tensor,
    step_BLH: Tensor,
    rate_H: Tensor,
    b_BLGN: Tensor,
    c_BLGN: Tensor,
    documents_BL: Tensor,
    state_BHNP: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, L, H, P) and the last state (B, H, N, P) of the recurrence

        S_t = exp(rate step_t) S_(t-1) + step_t b_t x_tᵀ,  o_t = S_tᵀ c_t,

    which starts from 0 in each document, computed in chunks (arXiv:2405.21060, section 6).

    Args:
        rate_H: below 0, of each head.
        documents_BL: numbers of the tokens' documents, (B or 1, L); 0: the document of
            `state_BHNP`.
        state_BHNP: state before the first token; None: zeros.
    """
    n_groups = b_BLGN.shape[2]
    chunks = Chunks((rate_H * step_BLH)[..., None], documents_BL)
    between, before, after = (
        each[..., 0].unflatten(2, (n_groups, -1))
        for each in (chunks.between, chunks.before, chunks.after)
    )  # (B, M, G, R, T, T), (B, M, G, R, T), (B, M, G, R, T)
    b_BMGTN, c_BMGTN = chunks.split(b_BLGN), chunks.split(c_BLGN)
    x_BMGRTP = chunks.split(x_BLHP * step_BLH[..., None]).unflatten(2, (n_groups, -1))
    seen = (c_BMGTN @ b_BMGTN.mT)[:, :, :, None] * between
    out_BMGRTP = seen @ x_BMGRTP

    changes = (b_BMGTN.mT[:, :, :, None] @ (x_BMGRTP * after[..., None])).flatten(2, 3)
    kept = chunks.before[..., -1, 0]
    states, state_BHNP = chained(changes, kept, state_BHNP)
    states = states.unflatten(2, (n_groups, -1))
    out_BMGRTP = out_BMGRTP + (c_BMGTN[:, :, :, None] @ states) * before[..., None]
    return chunks.join(out_BMGRTP.flatten(2, 3)), state_BHNP


def chained(
    changes_BMHNP: Tensor, kept_BMH: Tensor, state_BHNP: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and after the last one: a chunk keeps a part of the
    state, and adds a change."""
    state = torch.zeros_like(changes_BMHNP[:, 0]) if state_BHNP is None else state_BHNP
    states = []
    for change, kept in zip(changes_BMHNP.unbind(1), kept_BMH.unbind(1), strict=True):
        states.append(state)
        state = kept[..., None, None] * state + change
    return torch.stack(states, dim=1), state


def _mamba(decoder: Any, index: int) -> Mamba2:
    config = decoder.config
    return Mamba2(
        config.mamba, dim=config.dim, norm_eps=config.norm_eps, **decoder.init_stds(index)
    )


def _state_flops(decoder: Any, index: int, seq_len: int) -> float:
    """A token adds the product of its key and its input to each state, and multiplies it with its
    query: 2 operations each per element. The chunked computation needs more."""
    mamba = decoder.config.mamba
    return 4 * mamba.dim * mamba.state_dim


_TENSOR: Mapping[str, TensorSharding] = {
    **{f"in_{name}": "columns" for name in ("z", "x", "b", "c", "dt")},
    **{f"conv_{name}": "own channels" for name in "xbc"},
    "share": "columns to shared",
    "norm": "own channels",
    "out": "rows",
}
_HEADS = ("mamba.n_heads", "mamba.n_groups")

MAMBA = MixerKind(
    make=_mamba,
    score_flops=_state_flops,
    tensor=_TENSOR,
    heads=_HEADS,
    divided_instead={"mamba.n_groups": "mamba.state_dim"},
)


class MambaDecoder(HybridDecoder):
    """A decoder whose layers of type linear_attention are Mamba 2."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridDecoder.Config):
        mamba: MambaConfig = field(default_factory=MambaConfig)
        """Layers of type linear_attention."""

        mixers: ClassVar[Mapping[str, MixerKind]] = {
            "linear_attention": MAMBA,
            "full_attention": ATTENTION,
        }

        def validate(self) -> None:
            HybridDecoder.Config.validate(self)
            self.mamba.validate()

    config: Config


LAYER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Type of layer in older files of hybrid models → in newer ones."""


def mamba_rows(their: str) -> tuple[KeyMapping, ...]:
    """Return the rows of Mamba 2 in the module `their` of a layer."""
    ours, theirs = "layers.*.attention", f"model.layers.*.{their}"
    kinds = ("weight", "bias")
    return (
        *(
            KeyMapping(
                tuple(f"{ours}.in_{name}.{kind}" for name in ("z", "x", "b", "c", "dt")),
                f"{theirs}.in_proj.{kind}",
                Concatenated(0),
            )
            for kind in kinds
        ),
        *(
            KeyMapping(
                tuple(f"{ours}.conv_{name}.{kind}" for name in "xbc"),
                f"{theirs}.conv1d.{kind}",
                Concatenated(0),
            )
            for kind in kinds
        ),
        *(KeyMapping(f"{ours}.{name}", f"{theirs}.{name}") for name in ("A_log", "D", "dt_bias")),
        *module_rows(ours, theirs, {"norm": "norm", "out": "out_proj"}),
    )
