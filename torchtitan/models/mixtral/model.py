"""Mixtral ("Mixtral of Experts", arXiv:2401.04088), and its Hugging Face format."""

from torchtitan.models.common.gguf import (
    NEIGHBORS,
    Architecture,
    Experts,
    gguf_format,
    require_gguf,
)
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.rows import LOCAL_KEYS, expert_rows


class MixtralModel(MoEDecoder):
    """Mistral's decoder with experts instead of each feed-forward network."""


_TYPE = ModelType(
    architecture="MixtralForCausalLM",
    config=MixtralModel.Config,
    rows=lambda config: (
        DENSE_ROWS + expert_rows(config, folder="block_sparse_moe", names=("w1", "w2", "w3"))
    ),
    keys={**LOCAL_KEYS, "sliding_window": "sliding_window"},
    defaults={
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
        **{"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    },
    fixed={"router_jitter_noise": 0.0},
)
FORMAT = dense_format({"mixtral": _TYPE})


def _check_width(config: MoEDecoder.Config) -> dict[str, object]:
    width = config.moe.ffn_dim
    must = f"--model.ffn_dim {config.ffn_dim}"
    require_gguf(width in (None, config.ffn_dim), "moe.ffn_dim", width, must)
    return {}


GGUF = gguf_format(
    Architecture(
        name="llama",
        config=MixtralModel.Config,
        rotation=NEIGHBORS,
        biased="qkvo",
        experts=Experts({"norm_topk_prob": True, "shared_ffn_dim": None}),
        keys=_check_width,
    )
)
