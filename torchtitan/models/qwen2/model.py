"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115), and their Hugging Face format."""

from typing import Unpack

from torch import nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.gguf import Architecture, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder, prepare_windows


class Qwen2Model(WindowedDecoder):
    """Llama's decoder with biases of queries, keys and values, and windows in some models' upper
    layers."""

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("biases", "qkvo" if self.config.attention_bias else "qkv")
        return super().make_attention(index, **options)


FORMAT = dense_format(
    {
        "qwen2": ModelType(
            architecture="Qwen2ForCausalLM",
            config=Qwen2Model.Config,
            rows=DENSE_ROWS,
            keys=WINDOW_KEYS,
            prepare=prepare_windows,
            defaults={"num_key_value_heads": 32},
            write=lambda config: {"use_sliding_window": config.sliding_window is not None},
        )
    }
)

GGUF = gguf_format(Architecture(name="qwen2", config=Qwen2Model.Config, any_head_width=False))
