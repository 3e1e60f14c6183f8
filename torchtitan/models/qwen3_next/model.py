"""Qwen3-Next's model and its Hugging Face format."""

from dataclasses import dataclass

from torchtitan.models.common.delta_net import (
    DELTA_NET_KEYS,
    SHARED_DELTA_NET_ROWS,
    GatedHybridDecoder,
    fused_row,
    prepare_layer_types,
)
from torchtitan.models.common.gguf import Architecture, Experts, Rotation, gguf_format
from torchtitan.models.common.gguf_recurrent import delta_net_keys, delta_net_rows, fused
from torchtitan.models.common.gguf_rows import POST_ATTENTION_NORM
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import (
    QWEN_KEYS,
    SPARSE_KEYS,
    expert_rows,
    prepare_sparse_steps,
    write_sparse_steps,
)
from torchtitan.protocols.state_dict_adapter import Concatenated, Identity, KeyMapping


class Qwen3NextModel(ExpertLayers, GatedHybridDecoder):
    """Gated delta nets, with an attention layer after every three, and experts next to one that
    every token passes through."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, GatedHybridDecoder.Config):
        moe: MoEConfig
        """Experts."""

    config: Config


def _rows(config: Qwen3NextModel.Config) -> tuple[KeyMapping, ...]:
    """Return the rows; the projections of a key head and its value heads are neighbors."""
    n_heads = config.linear_num_key_heads
    return (
        *DENSE_ROWS,
        *SHARED_DELTA_NET_ROWS,
        fused_row("in_{}.weight", "qkvz", "in_proj_qkvz.weight", groups=n_heads),
        fused_row("in_{}.weight", "ba", "in_proj_ba.weight", groups=n_heads),
        *expert_rows(config, shared="shared_expert"),
    )


_DEFAULTS = {
    **{"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    **{"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25},
}
_TYPE = ModelType(
    architecture="Qwen3NextForCausalLM",
    config=Qwen3NextModel.Config,
    rows=_rows,
    keys={
        **DELTA_NET_KEYS,
        **QWEN_KEYS,
        **SPARSE_KEYS,
        "shared_expert_intermediate_size": "moe.shared_ffn_dim",
        "norm_topk_prob": "moe.norm_topk_prob",
        "attention_bias": "attention_bias",
    },
    defaults=_DEFAULTS,
    ignored=("decoder_sparse_step", "mlp_only_layers"),
    prepare=lambda document: prepare_sparse_steps(prepare_layer_types(document)),
    write=write_sparse_steps,
)

# Skips tensors that predict more than one token at once, as transformers does.
FORMAT = dense_format({"qwen3_next": _TYPE}, without=("mtp.",))


def _gguf_rows(config: Qwen3NextModel.Config) -> tuple[KeyMapping, ...]:
    decays = Concatenated(0, groups=config.linear_num_key_heads)
    return (
        *POST_ATTENTION_NORM,
        *delta_net_rows(Identity()),
        fused(("in_b.weight", "in_a.weight"), "ssm_ba.weight", decays),
    )


GGUF = gguf_format(
    Architecture(
        name="qwen3next",
        config=Qwen3NextModel.Config,
        rotation=Rotation(part=True),
        rows=_gguf_rows,
        experts=Experts({"norm_topk_prob": True}, chosen=("shared_ffn_dim",)),
        keys=delta_net_keys,
    )
)
