"""Qwen3's dense models ("Qwen3 Technical Report", arXiv:2505.09388), and their Hugging Face
format."""

from torchtitan.models.common.gguf import Architecture, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder, prepare_windows


class Qwen3Model(WindowedDecoder):
    """Llama's decoder with a norm on the queries and keys of each head, and windows in some models'
    upper layers."""

    has_qk_norm = True


FORMAT = dense_format(
    {
        "qwen3": ModelType(
            architecture="Qwen3ForCausalLM",
            config=Qwen3Model.Config,
            rows=DENSE_ROWS,
            keys={**WINDOW_KEYS, "attention_bias": "attention_bias"},
            fixed={"use_qk_norm": True},
            prepare=prepare_windows,
            write=lambda config: {"use_sliding_window": config.sliding_window is not None},
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        )
    }
)

GGUF = gguf_format(Architecture(name="qwen3", config=Qwen3Model.Config))
