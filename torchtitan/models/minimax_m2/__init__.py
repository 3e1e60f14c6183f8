"""MiniMax-M2 in its published size, and a small one that trains on a laptop."""

from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.minimax_m2.model import FORMAT, GGUF, MiniMaxM2Model

FLAVORS = {
    "debugmodel": MiniMaxM2Model.Config(
        **(SMALL | {"ffn_dim": 128}),
        norm_eps=1e-6,
        rope=RoPEConfig(theta=10_000.0, rotated_fraction=0.5),
        moe=MoEConfig(n_experts=32, top_k=4, scoring_func="sigmoid", selection_bias=True),
    ),
    "229B-A10B": of_sizes(
        FORMAT, "minimax_m2", 3072, 1536, 62, 48, 200_064, max_seq_len=196_608, rotary_dim=64
    ),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
