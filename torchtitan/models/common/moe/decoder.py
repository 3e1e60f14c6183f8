"""Decoders with experts in some layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.models.common.moe.layer import MoEConfig, make_moe


class ExpertLayers:
    """A mixin before a decoder's class, whose `Config` has a `MoEConfig` as `moe`."""

    config: Any

    def make_feed_forward(self, index: int, *args: Any, **options: Any) -> nn.Module:
        decoder, moe = cast(Decoder, super()), self.config.moe
        if not moe.is_sparse(index):
            return decoder.make_feed_forward(index, *args, **options)
        sizes = {"dim": self.config.dim, "ffn_dim": self.config.ffn_dim, **decoder.init_stds(index)}
        return make_moe(moe, router=self.router_parts(), shared=self.make_shared(index), **sizes)

    def router_parts(self) -> Mapping[str, Any]:
        """Return the parts that the family's `Router` is made of."""
        raise NotImplementedError

    def make_shared(self, index: int) -> nn.Module | None:
        """Return the expert of all tokens; None: there is none."""
        return None


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

        def validate(self) -> None:
            WindowedDecoder.Config.validate(self)
            self.moe.validate()

    config: Config
