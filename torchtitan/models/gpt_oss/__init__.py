"""gpt-oss in its published sizes, and a small one that trains on a laptop."""

from torchtitan.models.common.layer_types import one_full_of
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, of_sizes
from torchtitan.models.gpt_oss.model import FORMAT, GGUF, GptOssModel

FLAVORS = {
    "debugmodel": GptOssModel.Config(
        **(SMALL | {"ffn_dim": 192}),
        head_dim=64,
        attention_bias=True,
        sliding_window=64,
        layer_types=one_full_of(2),
        rope=RoPEConfig(theta=10_000.0),
        moe=MoEConfig(n_experts=16, top_k=2),
    ),
    "20B": of_sizes(
        FORMAT, "gpt_oss", 2880, 2880, 24, 64, 201_088, max_seq_len=131_072, num_local_experts=32
    ),
    "120B": of_sizes(FORMAT, "gpt_oss", 2880, 2880, 36, 64, 201_088, max_seq_len=131_072),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
