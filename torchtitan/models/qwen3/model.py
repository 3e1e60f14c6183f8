"""Qwen3's dense models ("Qwen3 Technical Report", arXiv:2505.09388), and their Hugging Face format."""

from torchtitan.models.common.decoder import BlockDesign, Decoder
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.protocols.state_dict_adapter import KeyMapping


class Qwen3Model(Decoder):
    """Llama's decoder with a norm on the queries and keys of each head."""

    design = BlockDesign(qk_norm=True)


FORMAT = dense_format(
    Qwen3Model.Config,
    {
        "qwen3": ModelType(
            architecture="Qwen3ForCausalLM",
            fixed={"attention_bias": False, "use_sliding_window": False},
            fixed_per_layer={"layer_types": "full_attention"},
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            ignored=("max_window_layers",),  # only has an effect with use_sliding_window
        )
    },
    rows=(
        *DENSE_ROWS,
        KeyMapping("layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"),
        KeyMapping("layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"),
    ),
)
