"""Mistral ("Mistral 7B", arXiv:2310.06825), Ministral, and Ministral 3 (arXiv:2601.08584), and
their Hugging Face format."""

import dataclasses
from dataclasses import dataclass
from typing import Unpack

from torch import nn

from torchtitan.models.common.attention import AttentionOptions, TemperedAttention
from torchtitan.models.common.gguf import NEIGHBORS, Architecture, Rotation, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, write_if
from torchtitan.models.common.hugging_face_rope import GROWTH, prepare_growth, write_scaling
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder
from torchtitan.models.common.rope import check_growth


class MistralModel(WindowedDecoder):
    """Llama's decoder with sliding windows in all layers (Mistral 7B 0.1), some (Ministral), or
    none (later models)."""


class Ministral3Model(MistralModel):
    """Mistral's decoder with YaRN and queries that grow with their position."""

    @dataclass(kw_only=True, slots=True)
    class Config(MistralModel.Config):
        llama_4_scaling_beta: float = 0.0
        """Growth of queries by `1 + llama_4_scaling_beta * log(1 + n)` from position n *
        --model.rope.original_max_seq_len on. 0: none."""

        def validate(self) -> None:
            MistralModel.Config.validate(self)
            check_growth(self.llama_4_scaling_beta, self.rope)

    config: Config

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        config = self.config
        attend = TemperedAttention(
            config.rope.original_max_seq_len, config.llama_4_scaling_beta, first=0
        )
        options.setdefault("attend", attend)
        return super().make_attention(index, **options)


_ALL_LAYERS = ModelType(
    architecture="MistralForCausalLM",
    config=MistralModel.Config,
    rows=DENSE_ROWS,
    keys={"sliding_window": "sliding_window"},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json without types of layers if it has no window, so that it is written as
    Mistral: transformers' Ministral needs a window."""
    unused = () if document.get("sliding_window", True) else ("layer_types",)
    return {key: value for key, value in document.items() if key not in unused}


_SOME_LAYERS = dataclasses.replace(
    _ALL_LAYERS,
    architecture="MinistralForCausalLM",
    keys=WINDOW_KEYS,
    prepare=_prepare,
    write=write_if(lambda config: config.sliding_window is not None),
)

_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0},
    **{"original_max_position_embeddings": 16_384, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.1,
}


def _write_growth(config: Ministral3Model.Config) -> dict[str, object]:
    scaling = write_scaling(config.rope, config.max_seq_len) or {}
    return {"rope_scaling": {**scaling, GROWTH: config.llama_4_scaling_beta}}


_TEMPERED = dataclasses.replace(
    _ALL_LAYERS,
    architecture="Ministral3ForCausalLM",
    config=Ministral3Model.Config,
    keys={**_ALL_LAYERS.keys, GROWTH: GROWTH},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    prepare=lambda document: prepare_growth(document, _YARN),
    write=write_if(lambda config: config.rope.is_scaled, _write_growth),
)

FORMAT = dense_format({"mistral": _ALL_LAYERS, "ministral": _SOME_LAYERS, "ministral3": _TEMPERED})


def _gguf_growth(config: Ministral3Model.Config) -> dict[str, object]:
    return {
        "attention.temperature_scale": float(config.llama_4_scaling_beta),
        "rope.scaling.yarn_log_multiplier": 1.0,
    }


GGUF = gguf_format(
    Architecture(name="llama", config=MistralModel.Config, rotation=NEIGHBORS, biased="qkvof"),
    Architecture(
        name="mistral3",
        config=Ministral3Model.Config,
        rotation=Rotation(neighbors=True, scalings=("yarn",), yarn_factor=1.0),
        keys=_gguf_growth,
    ),
)
