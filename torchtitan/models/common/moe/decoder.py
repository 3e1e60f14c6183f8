"""Decoders with experts in some layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from torchtitan.models.common.blocks import ScaledSandwichBlock
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.layer import MixtureOfExperts, MoEConfig
from torchtitan.models.common.moe.router import Router
from torchtitan.models.common.norms import NormFactory


class ExpertLayers:
    """A mixin before a decoder's class, whose `Config` has a `MoEConfig` as `moe`."""

    config: Any

    make_experts: Callable[..., RoutedExperts] = RoutedExperts
    make_router: Callable[..., Router] = Router

    router_options: Mapping[str, Any] = {}
    """Options of `Router` in place of those of `MoEConfig.router_options`."""

    def make_feed_forward(self, index: int, *args: Any, **options: Any) -> nn.Module:
        decoder, moe = cast(Decoder, super()), self.config.moe
        if not moe.is_sparse(index):
            return decoder.make_feed_forward(index, *args, **options)
        sizes: dict[str, Any] = {"dim": self.config.dim, "n_experts": moe.n_experts}
        stds, width = decoder.init_stds(index), moe.ffn_dim or self.config.ffn_dim
        router_options = {"penalties": moe.penalties, **moe.router_options(), **self.router_options}
        router = self.make_router(**sizes, init_std=stds["init_std"], **router_options)
        experts = self.make_experts(**sizes, top_k=moe.top_k, hidden_dim=width, **stds)
        return MixtureOfExperts(router, experts, self.make_shared(width, dim=self.config.dim, **stds))

    def make_shared(self, width: int, **options: Any) -> nn.Module | None:
        """As `MoEConfig.make_shared`."""
        shared: nn.Module | None = self.config.moe.make_shared(width, **options)
        return shared


class DenseAndExpertsBlock(ScaledSandwichBlock):
    """Experts next to a `dense` network, both between norms of their own (Gemma 4)."""

    def __init__(self, *parts: nn.Module, dense: nn.Module, dim: int, norm: NormFactory):
        super().__init__(*parts, dim=dim, norm=norm)
        self.feed_forward, self.dense_post_norm = dense, norm(dim)
        assert self.moe is not None
        self.moe.norm, self.moe.post_norm = norm(dim), norm(dim)

    def _feed_forward(self, x_BLD: Tensor) -> Tensor:
        assert self.ffn_norm and self.feed_forward and self.moe and self.ffn_post_norm
        dense_BLD: Tensor = self.dense_post_norm(self.feed_forward(self.ffn_norm(x_BLD)))
        return self.ffn_post_norm(dense_BLD + self.moe(x_BLD))


class MoEDecoder(ExpertLayers, WindowedDecoder):
    """A decoder with experts in some layers or in all, and windows."""

    @dataclass(kw_only=True, slots=True)
    class Config(WindowedDecoder.Config):
        moe: MoEConfig
        """Experts."""

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            sizes = {name: getattr(self, name) for name in ("n_heads", "n_kv_heads")}
            is_dense = any(not self.moe.is_sparse(index) for index in range(self.n_layers))
            return {**sizes, "ffn_dim": self.ffn_dim} if is_dense else sizes

        @property
        def expert_parallel_sizes(self) -> dict[str, int]:
            return self.moe.parallel_sizes(self.ffn_dim)

        def validate(self) -> None:
            WindowedDecoder.Config.validate(self)
            self.moe.validate()

    config: Config
