"""Kimi Linear's model in its published size, and a small one that trains on a laptop."""

from torchtitan.models.common.mixers import hybrid_sharding
from torchtitan.models.common.moe.layer import SMALL_SIGMOID
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.kimi_linear.model import FORMAT, GGUF, KimiLinearModel

_FULL = [4, 8, 12, 16, 20, 24, 27]
_LAYERS = {
    "full_attn_layers": _FULL,
    "kda_layers": [number for number in range(1, 28) if number not in _FULL],
}

FLAVORS = {
    "debugmodel": KimiLinearModel.Config(
        **(SMALL | {"n_kv_heads": 8}),
        head_dim=48,
        v_head_dim=32,
        kv_lora_rank=64,
        linear_num_heads=16,
        linear_head_dim=32,
        rope=RoPEConfig(theta=1e4, rotated_fraction=1 / 3),
        moe=SMALL_SIGMOID,
    ),
    "48B-A3B": of_sizes(
        FORMAT,
        "kimi_linear",
        *(2304, 9216, 27, 32, 163_840),
        max_seq_len=1_048_576,
        linear_attn_config=_LAYERS,
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
SHARDING = hybrid_sharding(KimiLinearModel.Config.mixers)
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS, sharding=SHARDING)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
