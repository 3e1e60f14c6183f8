"""Llama 3 ("The Llama 3 Herd of Models", arXiv:2407.21783), and its Hugging Face format."""

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import Architecture, Rotation, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, write_if


class Llama3Model(Decoder):
    """Llama 3, 3.1 and 3.2, which differ only in sizes, tying and RoPE scaling."""


FORMAT = dense_format(
    {
        "llama": ModelType(
            architecture="LlamaForCausalLM",
            config=Llama3Model.Config,
            rows=DENSE_ROWS,
            keys={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
            ignored=("sliding_window",),  # transformers' Llama has no window
            # required by transformers
            write=write_if(lambda config: config.dim % config.n_heads == 0),
        )
    }
)

GGUF = gguf_format(
    Architecture(
        name="llama",
        config=Llama3Model.Config,
        biased="qkvof",
        rotation=Rotation(neighbors=True, scalings=("llama3", "linear", "yarn")),
    )
)
