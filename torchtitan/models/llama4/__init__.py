"""Llama 4 in its published sizes, without vision, and a small one that trains on a laptop."""

from torchtitan.models.common.layer_types import one_full_of
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.llama4.model import FORMAT, GGUF, Llama4Model

_MOE = MoEConfig(
    n_experts=8,
    top_k=1,
    ffn_dim=192,
    layer_types=["dense", "sparse"],
    scoring_func="sigmoid",
    norm_topk_prob=False,
    n_shared_experts=1,
)
_128E = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}

FLAVORS = {
    "debugmodel": Llama4Model.Config(
        **SMALL,
        layer_types=one_full_of(4),
        sliding_window=64,
        floor_scale=64,
        moe=_MOE,
        rope=RoPEConfig(theta=10_000.0),
    ),
    "17B-16E": of_sizes(FORMAT, "llama4_text", 5120, 8192, 48, 40, 202_048, max_seq_len=262_144),
    "17B-128E": of_sizes(
        FORMAT, "llama4_text", 5120, 8192, 48, 40, 202_048, max_seq_len=262_144, **_128E
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
