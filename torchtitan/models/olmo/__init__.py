"""OLMo 2 and 3 in their published sizes, and a small one that trains on a laptop."""

from functools import partial

from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.families import SMALL, Family, Sizes
from torchtitan.models.olmo.model import FORMAT, GGUF, Olmo2Model, Olmo3Model

_1B: Sizes = {"dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 8192}
_7B: Sizes = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "ffn_dim": 11008}
_13B: Sizes = {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824}
_32B: Sizes = {"dim": 5120, "n_layers": 64, "n_heads": 40, "n_kv_heads": 8, "ffn_dim": 27648}

_2 = partial(
    Olmo2Model.Config, vocab_size=100_352, max_seq_len=4096, norm_eps=1e-6, rope=RoPEConfig()
)
_YARN = partial(RoPEConfig, scaling="yarn", high_freq_factor=32.0)
_3 = partial(
    Olmo3Model.Config,
    vocab_size=100_278,
    max_seq_len=65_536,
    norm_eps=1e-6,
    rope=_YARN(scaling_factor=8.0, attention_factor=1.2079441541679836),
    local_rope=RoPEConfig(),
)

FLAVORS = {
    "debugmodel": _3(
        **SMALL,
        sliding_window=64,
        vocab_size=None,
        rope=_YARN(theta=1e4, scaling_factor=4.0, original_max_seq_len=512),
        local_rope=RoPEConfig(theta=1e4),
    ),
    "2-1B": _2(**_1B),
    "2-7B": _2(**_7B),
    "2-13B": _2(**_13B),
    "2-32B": _2(**_32B),
    "3-7B": _3(**_7B),
    "3-32B": _3(**_32B),
}

FORMATS = {"hf": FORMAT, "gguf": GGUF}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
