"""ERNIE 4.5 in its published sizes, and small models that train on a laptop."""

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.ernie4_5.model import FORMAT, GGUF, Ernie45Model, Ernie45MoeModel
from torchtitan.models.families import SMALL, Family, of_sizes

_ROPE = RoPEConfig(theta=10_000.0)
_SMALL_EXPERTS = MoEConfig(
    n_experts=16,
    top_k=3,
    ffn_dim=128,
    n_shared_experts=2,
    selection_bias=True,
    layer_types=["dense", "sparse", "sparse", "sparse"],
)
_300B = {
    **{"num_key_value_heads": 8, "moe_intermediate_size": 3584, "moe_k": 8},
    **{"moe_layer_start_index": 3, "moe_num_shared_experts": 0, "tie_word_embeddings": False},
}

FLAVORS = {
    "debugmodel": Ernie45Model.Config(**SMALL, tie_embeddings=True, rope=_ROPE),
    "moe-debugmodel": Ernie45MoeModel.Config(
        **SMALL, tie_embeddings=True, rope=_ROPE, moe=_SMALL_EXPERTS
    ),
    "0.3B": of_sizes(FORMAT, "ernie4_5", 1024, 3072, 18, 16, 103_424, max_seq_len=131_072),
    "21B-A3B": of_sizes(FORMAT, "ernie4_5_moe", 2560, 12288, 28, 20, 103_424, max_seq_len=131_072),
    "300B-A47B": of_sizes(
        FORMAT, "ernie4_5_moe", 8192, 28672, 54, 64, 103_424, max_seq_len=131_072, **_300B
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
