"""Seed-OSS (github.com/ByteDance-Seed/seed-oss), and its Hugging Face format."""

from dataclasses import dataclass

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import Architecture, gguf_format
from torchtitan.models.common.gguf_rows import POST_ATTENTION_NORM
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format


class SeedOssModel(Decoder):
    """Llama's decoder with biases of queries, keys and values."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        attention_bias: bool = True
        """Add biases to queries, keys and values."""

    config: Config

    biased = "qkv"


FORMAT = dense_format(
    {
        "seed_oss": ModelType(
            architecture="SeedOssForCausalLM",
            config=SeedOssModel.Config,
            rows=DENSE_ROWS,
            keys={name: name for name in ("attention_bias", "mlp_bias")},
            fixed={"attention_out_bias": False},
            defaults={"num_key_value_heads": 8, "head_dim": 128},
        )
    }
)

GGUF = gguf_format(
    Architecture(
        name="seed_oss", config=SeedOssModel.Config, rows=lambda config: POST_ATTENTION_NORM
    )
)
