"""GLM-4.5, its Air, and GLM-4.6 in their published sizes, and a small one that trains on a
laptop."""

from functools import partial

from torchtitan.models.common.moe.layer import SMALL_SIGMOID
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.glm4_moe.model import FORMAT, GGUF, GLM4MoeModel

_published = partial(
    of_sizes, FORMAT, "glm4_moe", head_dim=128, attention_bias=True, rope_theta=1e6
)
_355B = {
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
}

FLAVORS = {
    "debugmodel": GLM4MoeModel.Config(
        **SMALL,
        use_qk_norm=True,
        rope=RoPEConfig(theta=10_000.0, rotated_fraction=0.5),
        moe=SMALL_SIGMOID,
    ),
    "4.5-Air-106B": _published(4096, 10944, 46, 96, 151_552, max_seq_len=131_072),
    "4.5-355B": _published(5120, 12288, 92, 96, 151_552, max_seq_len=131_072, **_355B),
    "4.6-355B": _published(5120, 12288, 92, 96, 151_552, max_seq_len=202_752, **_355B),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
