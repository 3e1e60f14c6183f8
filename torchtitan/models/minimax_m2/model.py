"""MiniMax-M2 (github.com/MiniMax-AI/MiniMax-M2), and its Hugging Face format."""

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import Architecture, Experts, Rotation, Tying, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, replaced
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.protocols.state_dict_adapter import KeyMapping


class MiniMaxM2Model(MoEDecoder):
    """A decoder with experts in all layers, and norms over all queries and all keys of a token; a
    part of each head is rotated."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        router_types = ("sigmoid",)

    config: Config

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        options.setdefault("qk_wide_norm", self.make_norm)
        return super().make_attention(index, **options)


def _rows(config: MiniMaxM2Model.Config) -> tuple[KeyMapping, ...]:
    bias = rows.selection_bias("block_sparse_moe.e_score_correction_bias")
    experts = rows.expert_rows(config, folder="block_sparse_moe", names=("w1", "w2", "w3"))
    return DENSE_ROWS + replaced(experts, bias)


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the rotated part of a head for their number of elements. Raise
    `UserError` for layers without softmax attention."""
    reader = ConfigReader("config.json", {"head_dim": 128, **document})
    types = document.get("attn_type_list", [])
    if not (isinstance(types, list) and all(kind == 1 for kind in types)):
        raise reader.wrong("attn_type_list", types, "a list of 1")
    if reader.has("rotary_dim"):
        fraction = reader.whole_number("rotary_dim") / reader.whole_number("head_dim")
        document = {"partial_rotary_factor": fraction, **document}
    return document


_TYPE = ModelType(
    architecture="MiniMaxM2ForCausalLM",
    config=MiniMaxM2Model.Config,
    rows=_rows,
    keys=rows.LOCAL_KEYS,
    values={"moe.scoring_func": "sigmoid", "moe.selection_bias": True},
    fixed={
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "router_jitter_noise": 0.0},
        **{"use_qk_norm": True, "qk_norm_type": "per_layer", "sliding_window": None},
        **{"shared_intermediate_size": 0},
    },
    defaults={
        **{"num_local_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 8},
        **{"head_dim": 128, "partial_rotary_factor": 1.0, "rope_theta": 5_000_000.0},
    },
    # Of other models of MiniMax, and of modules that predict further tokens.
    ignored=(
        *("attn_type_list", "rotary_dim", "shared_moe_mode", "mlp_intermediate_size"),
        *(f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")),
        *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ),
    prepare=_prepare,
    write=lambda config: {"rotary_dim": config.rope.rotated_dim(config.resolved_head_dim)},
)
_CLASS_ROWS = *rows.fused_expert_rows(), rows.selection_bias("mlp.e_score_correction_bias")

FORMAT = dense_format({"minimax_m2": _TYPE}, class_rows={"minimax_m2": _CLASS_ROWS})

GGUF = gguf_format(
    Architecture(
        name="minimax-m2",
        config=MiniMaxM2Model.Config,
        rotation=Rotation(part=True),
        tying=Tying(copies=True),
        experts=Experts(
            {"norm_topk_prob": True, "selection_bias": True, "shared_ffn_dim": None},
            chosen=("scoring_func",),
        ),
    )
)
