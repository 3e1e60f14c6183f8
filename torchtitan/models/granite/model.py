"""Granite 3 and the dense models of Granite 4 (IBM), and their Hugging Face formats."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import NEIGHBORS, Architecture, gguf_format
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    FUSED_GATE_UP,
    ModelType,
    dense_format,
    replaced,
)
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.initializer import TruncatedNormal
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import UnsupportedModelError

_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


class GraniteModel(Decoder):
    """Llama's decoder with constant factors, as in maximal update parametrization
    (arXiv:2203.03466)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        embedding_multiplier: float = 1.0
        """Factor of the embedding."""

        attention_multiplier: float = 1.0
        """Factor of attention scores, instead of 1 / sqrt(head_dim)."""

        residual_multiplier: float = 1.0
        """Factor of the results of attention and feed-forward network before they are added to the
        residual stream."""

        logits_scaling: float = 1.0
        """Divisor of logits."""

        def validate(self) -> None:
            Decoder.Config.validate(self)
            self.check_positive(*_MULTIPLIERS)

    config: Config

    def make_block(self, index: int, **options: Any) -> nn.Module:
        return super().make_block(index, multiplier=self.config.residual_multiplier, **options)

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        return super().make_attention(index, scale=self.config.attention_multiplier, **options)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return super().embed(tokens_BL) * self.config.embedding_multiplier

    def logit_transform(self) -> LogitTransform:
        return LogitTransform(multiplier=1 / self.config.logits_scaling)

    # Initial values are divided by the factors, so that a new model starts like one without
    # factors.

    def embedding_init(self) -> TruncatedNormal:
        init = super().embedding_init()
        return (
            init
            if self.config.tie_embeddings
            else TruncatedNormal(init.std / self.config.embedding_multiplier)
        )

    def init_stds(self, index: int) -> dict[str, Any]:
        stds = super().init_stds(index)
        return {**stds, "out_init_std": stds["out_init_std"] / self.config.residual_multiplier}

    def output_init(self) -> TruncatedNormal:
        return TruncatedNormal(super().output_init().std * self.config.logits_scaling)


class Granite4Model(GraniteModel):
    """A dense model of Granite 4, the same decoder with or without positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(GraniteModel.Config):
        position_embedding_type: Literal["rope", "nope"] = "rope"
        """Positions in attention: rotary, or none."""

    config: Config

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return self.config.rope if self.config.position_embedding_type == "rope" else None


_ATTENTION = ("attention", "full_attention")
"""Names of transformers 4 and 5."""


def _prepare_dense(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without types of layers, and with the values that transformers gives to
    absent keys. Raise `UserError` if it has Mamba layers."""
    document = {"num_local_experts": 8, **document}
    names = ("layer_types", "layers_block_type")
    for key, types in (
        {key: document.pop(key) for key in names if key in document} or {names[0]: None}
    ).items():
        n_layers = document.get("num_hidden_layers")
        if not (
            isinstance(types, list)
            and len(types) == n_layers
            and all(kind in _ATTENTION for kind in types)
        ):
            raise UnsupportedModelError(
                f"config.json: {key} is {types!r}, which this family does not support (only "
                f"'attention' in each of num_hidden_layers = {n_layers} layers)"
            )
    if document.get("position_embedding_type") is None:
        document["position_embedding_type"] = "nope"
    return document


_KEYS = {name: name for name in ("attention_bias", *_MULTIPLIERS)}

_ROWS = replaced(
    DENSE_ROWS,
    dataclasses.replace(FUSED_GATE_UP, external="model.layers.*.shared_mlp.input_linear.weight"),
    KeyMapping("layers.*.feed_forward.w2.weight", "model.layers.*.shared_mlp.output_linear.weight"),
)

_OF_OTHER_LAYERS = (
    *(
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_head",
        "mamba_d_conv",
        "mamba_expand",
    ),
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
    *("num_experts_per_tok", "intermediate_size", "init_method", "normalization_function"),
)

FORMAT = dense_format(
    {
        "granite": ModelType(
            architecture="GraniteForCausalLM",
            config=GraniteModel.Config,
            rows=DENSE_ROWS,
            keys={**_KEYS, "mlp_bias": "mlp_bias"},
        ),
        "granitemoehybrid": ModelType(
            architecture="GraniteMoeHybridForCausalLM",
            config=Granite4Model.Config,
            rows=_ROWS,
            keys={
                **_KEYS,
                "shared_intermediate_size": "ffn_dim",
                "position_embedding_type": "position_embedding_type",
            },
            fixed={"num_local_experts": 0},
            ignored=_OF_OTHER_LAYERS,
            prepare=_prepare_dense,
            # transformers checks that the number of Mamba heads divides their width, even in models
            # without Mamba.
            write=lambda config: {
                "layer_types": ["attention"] * config.n_layers,
                "mamba_n_heads": 1,
            },
        ),
    }
)

_SCALES = dict(
    zip(
        _MULTIPLIERS,
        ("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
        strict=True,
    )
)

GGUF = gguf_format(
    Architecture(
        name="granite",
        config=GraniteModel.Config,
        rotation=NEIGHBORS,
        biased="qkvof",
        keys=lambda config: {key: float(getattr(config, ours)) for ours, key in _SCALES.items()},
    )
)
