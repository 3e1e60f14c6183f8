"""Decoders with experts in some layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack, cast

from torch import Tensor, nn

from torchtitan.models.common.blocks import ScaledSandwichBlock
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import GatedFeedForward, LayerSizes
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.layer import MixtureOfExperts, MoEConfig
from torchtitan.models.common.moe.router import Router
from torchtitan.models.common.norms import NormFactory
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import require


class ExpertLayers:
    """A mixin before a decoder's class; so is its `Config`, before the decoder's."""

    class Config:
        __slots__ = ()

        moe: MoEConfig
        dim: int
        n_layers: int
        ffn_dim: int

        router_types: tuple[str, ...] = ("softmax",)
        """Values of `moe.scoring_func` that the family supports."""

        counts_shared: bool = True
        """True if `moe.n_shared_experts` has an effect, and not only `moe.shared_ffn_dim`."""

        @property
        def expert_dim(self) -> int:
            """Width of a routed expert."""
            return self.moe.ffn_dim or self.ffn_dim

        @property
        def expert_parallel_sizes(self) -> dict[str, int]:
            return {
                "moe.n_experts": self.moe.n_experts,
                "moe.ffn_dim": self.expert_dim,
            }

        def validate(self) -> None:
            cast(Decoder.Config, super()).validate()
            self.moe.validate()
            kind, most = self.moe.scoring_func, " or ".join(self.router_types)
            require(kind in self.router_types, "--model.moe.scoring_func", kind, most)
            n_shared, is_counted = self.moe.n_shared_experts, self.counts_shared
            must = "0: this family has one, of width --model.moe.shared_ffn_dim"
            require(is_counted or not n_shared, "--model.moe.n_shared_experts", n_shared, must)

    config: Config

    has_routers = True
    make_experts: Callable[..., RoutedExperts] = RoutedExperts
    make_router: Callable[..., Router] = Router

    def make_feed_forward(
        self, index: int, kind: Callable[..., nn.Module] = GatedFeedForward, **options: object
    ) -> nn.Module | None:
        decoder, moe = cast(Decoder, super()), self.config.moe
        if not moe.is_sparse(index):
            return decoder.make_feed_forward(index, kind, **options)
        width = self.config.expert_dim
        sizes: LayerSizes = {"dim": self.config.dim, **decoder.init_stds(index)}
        router = self.make_router(moe, dim=self.config.dim, init_std=sizes["init_std"])
        router.layer = index
        experts = self.make_experts(
            n_experts=moe.n_experts, top_k=moe.top_k, hidden_dim=width, **sizes
        )
        return MixtureOfExperts(router, experts, self.make_shared(width, **sizes))

    def make_shared(self, width: int, **sizes: Unpack[LayerSizes]) -> nn.Module | None:
        """Return the expert that gets all tokens, next to routed ones of a `width`; None: without
        it. `sizes`: of `GatedFeedForward`, without its width."""
        return self.config.moe.make_shared(width, **sizes)


class DenseAndExpertsBlock(ScaledSandwichBlock):
    """Experts next to a `dense` network, both between norms of their own (Gemma 4)."""

    moe: MixtureOfExperts
    feed_forward: nn.Module
    dense_post_norm: nn.Module

    def __init__(self, *parts: nn.Module, dense: nn.Module, dim: int, norm: NormFactory):
        super().__init__(*parts, dim=dim, norm=norm)
        self.feed_forward, self.dense_post_norm = dense, norm(dim)
        self.moe.norm, self.moe.post_norm = norm(dim), norm(dim)

    def _feed_forward(self, x_BLD: Tensor, attention: AttentionMetadata) -> Tensor:
        assert self.ffn_norm and self.ffn_post_norm
        dense_BLD = self.dense_post_norm(self.feed_forward(self.ffn_norm(x_BLD)))
        return self.ffn_post_norm(dense_BLD + self.moe(x_BLD, attention.documents))


class MoEDecoder(ExpertLayers, WindowedDecoder):
    """A decoder with experts in some layers or in all, and windows."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, WindowedDecoder.Config):
        moe: MoEConfig
        """Experts."""

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            is_dense = any(not self.moe.is_sparse(index) for index in range(self.n_layers))
            names = ("n_heads", "n_kv_heads", *(("ffn_dim",) if is_dense else ()))
            return {name: getattr(self, name) for name in names}

    config: Config
