"""Mixtral ("Mixtral of Experts", arXiv:2401.04088), and its Hugging Face format."""

from collections.abc import Sequence

from torchtitan.models.common.hugging_face import EMBEDDING, ModelType, attention_rows, dense_format, norm_rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.rows import expert_rows
from torchtitan.protocols.state_dict_adapter import KeyMapping


class MixtralModel(MoEDecoder):
    """Mistral's decoder with experts in place of each feed-forward network."""


_DENSE = (
    EMBEDDING,
    *attention_rows(),
    *norm_rows(attention_norm="input_layernorm", ffn_norm="post_attention_layernorm"),
)


def _rows(config: MixtralModel.Config) -> Sequence[KeyMapping]:
    names = {name: name for name in ("w1", "w2", "w3")}
    return (*_DENSE, *expert_rows(config.moe.n_experts, "block_sparse_moe", names))


FORMAT = dense_format(
    {
        "mixtral": ModelType(
            architecture="MixtralForCausalLM",
            config=MixtralModel.Config,
            rows=_rows,
            keys={
                "sliding_window": "sliding_window",
                "num_local_experts": "moe.n_experts",
                "num_experts_per_tok": "moe.top_k",
            },
            defaults={
                **{"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
                **{"rope_theta": 1e6, "rms_norm_eps": 1e-5},
            },
            fixed={"router_jitter_noise": 0.0},
            ignored=("output_router_logits", "router_aux_loss_coef"),
            write=lambda config: {} if config.moe.ffn_dim is None and config.moe.layer_types == ["sparse"] else None,
        )
    }
)
