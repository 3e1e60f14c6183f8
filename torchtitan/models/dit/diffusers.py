"""Weights and config.json of diffusers' `DiTTransformer2DModel`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.dit.model import DiTModel
from torchtitan.protocols import ExternalFormat, StateDictAdapter
from torchtitan.protocols.state_dict_adapter import KeyMapping, Repeated, Transform

CLASS = "DiTTransformer2DModel"

_FIXED = {
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-5,
    "dropout": 0.0,
}
"""Keys with one value that is computed here."""


@dataclass(frozen=True)
class Convolution(Transform):
    """Our linear layer of flat patches, a convolution in the other format."""

    channels: int
    size: int

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [tensors[0].flatten(1)]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(1, (self.channels, self.size, self.size))]


@dataclass(frozen=True)
class ChannelsLast(Transform):
    """Our rows, one for each value of a patch with the channel first, which is last in the other
    format."""

    channels: int
    size: int

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        rows = tensors[0].unflatten(0, (self.size, self.size, self.channels))
        return [rows.movedim(2, 0).flatten(0, 2)]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        rows = tensors[0].unflatten(0, (self.channels, self.size, self.size))
        return [rows.movedim(0, 2).flatten(0, 2)]


def _adapter(config: DiTModel.Config) -> StateDictAdapter:
    channels, size = config.channels, config.patch_size
    n = config.n_layers
    rows = [
        KeyMapping("patches.weight", "pos_embed.proj.weight", Convolution(channels, size)),
        KeyMapping("patches.bias", "pos_embed.proj.bias"),
    ]
    tied: dict[str, str] = {}
    # In the other format, each layer has a copy of the condition's embedding.
    embedding = {
        **{
            f"time.linear_{k}.{part}": f"timestep_embedder.linear_{k}.{part}"
            for k in (1, 2)
            for part in ("weight", "bias")
        },
        "classes.weight": "class_embedder.embedding_table.weight",
    }
    for ours, theirs in embedding.items():
        copies = tuple(f"transformer_blocks.{k}.norm1.emb.{theirs}" for k in range(n))
        rows.append(KeyMapping(ours, copies, Repeated(n)))
        tied |= dict.fromkeys(copies[1:], copies[0])
    layers = {
        "modulation": "norm1.linear",
        **{f"w{kind}": f"attn1.to_{kind}" for kind in "qkv"},
        "wo": "attn1.to_out.0",
        "w1": "ff.net.0.proj",
        "w2": "ff.net.2",
    }
    for part in ("weight", "bias"):
        rows += [
            KeyMapping(f"layers.*.{ours}.{part}", f"transformer_blocks.*.{theirs}.{part}")
            for ours, theirs in layers.items()
        ]
        rows.append(KeyMapping(f"head.modulation.{part}", f"proj_out_1.{part}"))
        output = ChannelsLast(channels, size)
        rows.append(KeyMapping(f"head.output.{part}", f"proj_out_2.{part}", output))
    return StateDictAdapter(rows, n_layers=n, tied=tied)


def _to_external(config: DiTModel.Config) -> dict[str, object]:
    return {
        "_class_name": CLASS,
        "num_attention_heads": config.n_heads,
        "attention_head_dim": config.dim // config.n_heads,
        "in_channels": config.channels,
        "out_channels": config.channels,
        "num_layers": config.n_layers,
        "sample_size": config.image_size,
        "patch_size": config.patch_size,
        "num_embeds_ada_norm": config.n_classes,
        **_FIXED,
    }


def _from_external(document: Mapping[str, object]) -> DiTModel.Config:
    reader = ConfigReader("config.json", document)
    heads, width = map(reader.whole_number, ("num_attention_heads", "attention_head_dim"))
    channels = reader.whole_number("in_channels")
    computed = {**_FIXED, "out_channels": channels}
    for key, value in computed.items():
        if document.get(key, value) not in (value, None):
            raise reader.wrong(key, document[key], f"{value!r}, the only value computed here")
    return DiTModel.Config(
        dim=heads * width,
        n_layers=reader.whole_number("num_layers"),
        n_heads=heads,
        image_size=reader.whole_number("sample_size"),
        channels=channels,
        patch_size=reader.whole_number("patch_size"),
        n_classes=reader.whole_number("num_embeds_ada_norm"),
    )


FORMAT = ExternalFormat(
    adapter=_adapter,
    to_external=_to_external,
    from_external=_from_external,
    model_types={CLASS: CLASS},
    library="diffusers",
)
