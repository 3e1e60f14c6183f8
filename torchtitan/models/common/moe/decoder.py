"""Decoders with experts in some layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import GatedFeedForward
from torchtitan.models.common.layer_types import WindowedDecoder
from torchtitan.models.common.moe.experts import RoutedExperts
from torchtitan.models.common.moe.layer import GatedSharedExpert, MixtureOfExperts, MoEConfig
from torchtitan.models.common.moe.router import Router, ScoreWeights, TopK, softmax_scores


class ExpertLayers:
    """A mixin before a decoder's class, whose `Config` has a `MoEConfig` as `moe`."""

    config: Any

    make_experts: Callable[..., RoutedExperts] = RoutedExperts

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
        """Return the parts of `Router`: by default, normalized probabilities."""
        choose, weigh = TopK(self.config.moe.top_k), ScoreWeights(normalized=True)
        return {"score": softmax_scores, "choose": choose, "weigh": weigh}

    def make_shared(self, index: int) -> nn.Module | None:
        """Return the expert of all tokens; None: there is none."""
        return None


class QwenExpertLayers(ExpertLayers):
    """`ExpertLayers` with a `QwenMoEConfig`."""

    def router_parts(self) -> Mapping[str, Any]:
        return {**super().router_parts(), "weigh": ScoreWeights(self.config.moe.norm_topk_prob)}

    def make_shared(self, index: int) -> nn.Module | None:
        width, stds = self.config.moe.shared_ffn_dim, cast(Decoder, self).init_stds(index)
        return None if width is None else GatedSharedExpert(dim=self.config.dim, hidden_dim=width, **stds)


class SigmoidExpertLayers(ExpertLayers):
    """`ExpertLayers` with a `SigmoidMoEConfig`."""

    def router_parts(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self.config.moe.router_parts())

    def make_shared(self, index: int) -> nn.Module:
        moe, stds = self.config.moe, cast(Decoder, self).init_stds(index)
        width = (moe.ffn_dim or self.config.ffn_dim) * moe.n_shared_experts
        return GatedFeedForward(dim=self.config.dim, hidden_dim=width, **stds)


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
