"""DeepSeek-V2, V3, R1 and V3.2, Kimi K2, GLM-4.7-Flash, GLM-5 and Mistral 4 in their published
sizes, and small ones that train on a laptop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.models.common.gguf import gguf_format
from torchtitan.models.common.hugging_face import dense_format
from torchtitan.models.common.moe.layer import SMALL_SIGMOID, MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.deepseek_v3 import mistral4, sparse
from torchtitan.models.deepseek_v3.mistral4 import Mistral4Model
from torchtitan.models.deepseek_v3.model import ARCHITECTURES, TYPES, DeepSeekModel
from torchtitan.models.deepseek_v3.sparse import DeepSeekSparseModel
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.protocols import BaseModel

FORMAT = dense_format({**TYPES, **sparse.TYPES, **mistral4.TYPES})
GGUF = gguf_format(*ARCHITECTURES, *sparse.ARCHITECTURES, *mistral4.ARCHITECTURES)


def _published(
    kind: str,
    sizes: Sequence[int],
    factor: float,
    mscale: float,
    fast: float = 32.0,
    /,
    **keys: object,
) -> BaseModel.Config:
    """Return the model of a published config.json, whose other keys are DeepSeek-V3's."""
    yarn = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": fast,
    }
    keys["rope_scaling"] = {**yarn, "mscale": mscale, "mscale_all_dim": mscale}
    return of_sizes(FORMAT, kind, *sizes, max_seq_len=4096 * int(factor), **keys)


_LITE: dict[str, object] = {
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
}
_V2 = {
    **_LITE,
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 16.0,
}
_K2: dict[str, object] = {
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50_000.0,
}
_SMALL = {
    "head_dim": 48,
    "v_head_dim": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "n_kv_heads": 8,
}

_DEBUG: Any = {
    **{**SMALL, **_SMALL},
    "rope": RoPEConfig(theta=10_000.0, rotated_fraction=1 / 3),
    "moe": SMALL_SIGMOID,
}
_MISTRAL_MOE = MoEConfig(
    n_experts=32,
    top_k=4,
    ffn_dim=128,
    n_shared_experts=1,
    layer_types=["dense", "sparse", "sparse", "sparse"],
)
_MISTRAL_ROPE = RoPEConfig(
    theta=10_000.0,
    rotated_fraction=1 / 3,
    scaling="yarn",
    scaling_factor=8.0,
    high_freq_factor=32.0,
    attention_factor=1.0,
    original_max_seq_len=128,
)

FLAVORS = {
    "debugmodel": DeepSeekModel.Config(**_DEBUG),
    "sparse-debugmodel": DeepSeekSparseModel.Config(
        **_DEBUG, index_topk=64, index_n_heads=16, index_head_dim=32
    ),
    "mistral4-debugmodel": Mistral4Model.Config(
        **{**_DEBUG, "rope": _MISTRAL_ROPE, "moe": _MISTRAL_MOE},
        llama_4_scaling_beta=0.1,
    ),
    "V2-Lite-16B": _published(
        "deepseek_v2", (2048, 10944, 27, 16, 102_400), 40.0, 0.707, q_lora_rank=None, **_LITE
    ),
    "V2-236B": _published("deepseek_v2", (5120, 12288, 60, 128, 102_400), 40.0, 0.707, **_V2),
    "V3-671B": _published("deepseek_v3", (7168, 18432, 61, 128, 129_280), 40.0, 1.0),
    "V3.2-671B": _published("deepseek_v32", (7168, 18432, 61, 128, 129_280), 40.0, 1.0),
    "GLM-4.7-Flash-30B": of_sizes(
        FORMAT,
        "glm4_moe_lite",
        *(2048, 10240, 47, 20, 154_880),
        max_seq_len=202_752,
        rope_theta=1e6,
    ),
    "GLM-5-744B": of_sizes(
        FORMAT,
        "glm_moe_dsa",
        *(6144, 12288, 78, 64, 154_880),
        max_seq_len=202_752,
        rope_theta=1e6,
    ),
    "Mistral-Small-4-119B": of_sizes(
        FORMAT, "mistral4", 4096, 12288, 36, 32, 131_072, max_seq_len=1_048_576
    ),
    "Kimi-K2-1T": _published("kimi_k2", (7168, 18432, 61, 64, 163_840), 32.0, 1.0, 1.0, **_K2),
}

_LATENT = {
    **dict.fromkeys(("q_latent.0", "q_latent.1", "wkv_a", "kv_norm"), "local tokens"),
    **dict.fromkeys(("wq", "q_latent.2"), "parts to columns"),
    **{"indexer": "local tokens", "indexes": "parts to shared"},
    **{"latents": "parts to shared", "attend.wkv_b": "shared to columns", "wo": "rows"},
}
_OTHERS = {
    name: kind for name, kind in DENSE_SHARDING.tensor.items() if "attention" not in name.split(".")
}
_TENSOR = {
    **_OTHERS,
    **{f"layers.*.attention.{name}": kind for name, kind in _LATENT.items()},
    "layers.*.mtp.?norm": "sequence",
    "layers.*.mtp.eh_proj": "local tokens",
    "layers.*.mtp.norm": "final norm",
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(
    module=__name__,
    flavors=FLAVORS,
    formats=FORMATS,
    sharding=replace(DENSE_SHARDING, tensor=_TENSOR),
)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
