"""Llama 3 ("The Llama 3 Herd of Models", arXiv:2407.21783), and its Hugging Face format; Mistral is the same model."""

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.hugging_face import ModelType, dense_format


class Llama3Model(Decoder):
    """Llama 3, 3.1 and 3.2, which differ only in sizes, tying and RoPE scaling."""


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
