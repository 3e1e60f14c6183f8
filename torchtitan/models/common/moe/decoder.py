"""Decoders with experts in some layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.layer import MixtureOfExperts, MoEConfig
from torchtitan.models.common.moe.router import Router


class ExpertLayers:
    """A mixin before a decoder's class, whose `Config` has a `MoEConfig` as `moe`."""

    config: Any

    def make_feed_forward(self, index: int, *args: Any, **options: Any) -> nn.Module:
        decoder, moe = cast(Decoder, super()), self.config.moe
        if not moe.is_sparse(index):
            return decoder.make_feed_forward(index, *args, **options)
        stds, dim = decoder.init_stds(index), self.config.dim
        router = Router(
            dim=dim,
            n_experts=moe.n_experts,
            penalties=moe.penalties.build(),
            init_std=stds["init_std"],
            **self.router_parts(),
        )
        width = moe.ffn_dim or self.config.ffn_dim
        experts = self.make_experts(n_experts=moe.n_experts, top_k=moe.top_k, dim=dim, hidden_dim=width, **stds)
        return MixtureOfExperts(router, experts, self.make_shared(index))

    def router_parts(self) -> Mapping[str, Any]:
        """Return the parts that the family's `Router` is made of."""
        raise NotImplementedError

    def make_experts(self, **options: Any) -> RoutedExperts:
        """Return the routed experts of a layer."""
        return RoutedExperts(**options)

    def make_shared(self, index: int) -> nn.Module | None:
        """Return the expert of all tokens; None: there is none."""
        return None


class ExpertLayersConfig:
    """A mixin before the `Config` of a decoder with `ExpertLayers`."""

    __slots__ = ()

    moe: MoEConfig
    n_layers: int

    @property
    def tensor_parallel_sizes(self) -> dict[str, int]:
        is_dense = any(not self.moe.is_sparse(index) for index in range(self.n_layers))
        sizes = cast(Decoder.Config, super()).tensor_parallel_sizes
        return {name: size for name, size in sizes.items() if is_dense or name != "ffn_dim"}

    def validate(self) -> None:
        cast(Decoder.Config, super()).validate()
        self.moe.validate()


class MoEDecoder(ExpertLayers, WindowedDecoder):
    """A decoder with experts in some layers or in all, and windows."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayersConfig, WindowedDecoder.Config):
        moe: MoEConfig
        """Experts."""

    config: Config
