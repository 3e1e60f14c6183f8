"""GLM-4 ("ChatGLM", arXiv:2406.12793) and the GLM-4 and GLM-Z1 of April 2025, and their Hugging
Face format."""

from dataclasses import dataclass
from functools import partial

from torchtitan.models.common import gguf, gguf_rows
from torchtitan.models.common import hugging_face as hf
from torchtitan.models.common.blocks import SandwichBlock
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import KeyMapping


class GLMModel(Decoder):
    """Llama's decoder with biases of queries, keys and values; half of each head is rotated."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        attention_bias: bool = True
        """Add biases to queries, keys and values."""

    config: Config

    biased = "qkv"


class GLM4Model(GLMModel):
    """The model of April 2025, with a norm before and after each part of a block."""

    block_kind = SandwichBlock


_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_mlp_layernorm",
}


def _rows(config: GLMModel.Config) -> list[KeyMapping]:
    return hf.interleaved(hf.replaced(hf.dense_rows(**_NORMS), hf.FUSED_GATE_UP), config)


_model_type = partial(
    hf.ModelType,
    rows=_rows,
    keys={"attention_bias": "attention_bias"},
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    },
)

FORMAT = hf.dense_format(
    {
        "glm4": _model_type(architecture="Glm4ForCausalLM", config=GLM4Model.Config),
        "glm": _model_type(architecture="GlmForCausalLM", config=GLMModel.Config),
    }
)

GGUF = gguf.gguf_format(
    gguf.Architecture(
        name="glm4",
        config=GLM4Model.Config,
        rows=lambda config: (gguf_rows.FUSED_GATE_UP,),
        rotation=gguf.Rotation(neighbors=True, part=True),
    ),
    gguf.Architecture(
        name="chatglm",
        config=GLMModel.Config,
        rows=lambda config: (gguf_rows.FUSED_GATE_UP,),
        rotation=gguf.Rotation(neighbors=True, part=True),
        any_head_width=False,
    ),
)
