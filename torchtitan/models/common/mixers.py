"""Hybrid decoders: a table says which mixer of tokens each type of layer has (attention, a delta
net, …)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar

from torch import nn

from torchtitan.models.common.decoder import ATTENTION_SHARDING, DENSE_SHARDING, Decoder
from torchtitan.protocols.sharding import ShardingPlan, TensorSharding
from torchtitan.tools.errors import require


@dataclass(frozen=True, kw_only=True)
class MixerKind:
    """A kind of mixer, the part of a layer named `attention`, through which tokens see earlier
    ones.

    The mixer itself is called as `mixer(x_BLD, rope, attention)`. It keeps documents apart, and
    continues from a cache: attention through `attend` (`common.attention`), others as a
    `Recurrence`, which context parallelism also finds by its class. Converters such as LoRA find
    linear layers by their class, and their names in files are rows of the family's format.
    """

    make: Callable[[Any, int], nn.Module | None]
    """(Decoder, layer's number) → mixer; None: the layer has none."""

    score_flops: Callable[[Any, int, int], float]
    """(Decoder, layer's number, `seq_len`) → operations per token in the forward pass, without
    the weights' own."""

    tensor: Mapping[str, TensorSharding]
    """Tensor parallelism: name of a part of the mixer → treatment, for each part that has
    parameters. The mixer itself is treated as a `whole sequence`."""

    heads: tuple[str, ...] = ()
    """Fields of the configuration, also nested ones, with the numbers of heads or channels of a
    `Recurrence`; tensor times context parallelism must divide them."""

    divided_instead: Mapping[str, str] = field(default_factory=dict)
    """Field of `heads` → the field that they must divide instead if it is 1: all ranks have the
    results of this head, and divide its weights."""


ATTENTION = MixerKind(
    make=lambda decoder, index: decoder.make_attention(index),
    score_flops=Decoder.score_flops,
    tensor=ATTENTION_SHARDING,
)

NO_MIXER = MixerKind(
    make=lambda decoder, index: None, score_flops=lambda decoder, index, seq_len: 0, tensor={}
)
"""For layers with a feed-forward network alone."""


class HybridDecoder(Decoder):
    """A decoder whose layers have mixers of different kinds."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        layer_types: list[Any]
        """Types of the first layers, repeated for the others."""

        mixers: ClassVar[Mapping[str, MixerKind]]
        """Type of layer → kind of its mixer."""

        def type_of(self, index: int) -> str:
            """Return the type of a layer."""
            layer_type: str = self.layer_types[index % len(self.layer_types)]
            return layer_type

        def mixer_of(self, index: int) -> MixerKind:
            """Return the kind of a layer's mixer."""
            return self.mixers[self.type_of(index)]

        @property
        def context_parallel_sizes(self) -> dict[str, int]:
            kinds = [self.mixer_of(index) for index in range(self.n_layers)]
            names = {
                kind.divided_instead.get(name, name) if attrgetter(name)(self) == 1 else name
                for kind in kinds
                for name in kind.heads
            }
            return {name: attrgetter(name)(self) for name in sorted(names)}

        def validate(self) -> None:
            Decoder.Config.validate(self)
            types, known = self.layer_types, self.mixers
            require(bool(types), "--model.layer_types", types, "at least one type")
            require({*types} <= {*known}, "--model.layer_types", types, " or ".join(known))

    config: Config

    def make_mixer(self, index: int) -> nn.Module | None:
        mixer = self.config.mixer_of(index).make(self, index)
        if mixer is None:
            return None
        for kind in self.config.mixers.values():
            for name in {part.partition(".")[0] for part in kind.tensor} - {*dir(mixer)}:
                setattr(mixer, name, None)  # a part of other mixers, for their entries in the plan
        return mixer

    def score_flops(self, index: int, seq_len: int) -> float:
        return self.config.mixer_of(index).score_flops(self, index, seq_len)


def hybrid_sharding(mixers: Mapping[str, MixerKind]) -> ShardingPlan:
    """Return the plan of a decoder with these mixers."""
    mixer = "layers.*.attention."
    others = {k: split for k, split in DENSE_SHARDING.tensor.items() if not k.startswith(mixer)}
    parts = {name: split for kind in mixers.values() for name, split in kind.tensor.items()}
    entries = {f"{mixer}{name}": split for name, split in parts.items()}
    return replace(DENSE_SHARDING, tensor={**others, **entries})
