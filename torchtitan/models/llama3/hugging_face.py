"""Llama in Hugging Face's format. Mistral's is the same model."""

from torchtitan.models.common.hugging_face import ModelType, dense_format
from torchtitan.models.llama3.model import Llama3Model

_NO_BIASES = {"attention_bias": False, "mlp_bias": False}

FORMAT = dense_format(
    Llama3Model.Config,
    {
        "llama": ModelType(architecture="LlamaForCausalLM", fixed=_NO_BIASES, heads_divide_width=True),
        "mistral": ModelType(
            architecture="MistralForCausalLM",
            fixed=_NO_BIASES,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            has_window=True,
        ),
    },
)
