"""Hunyuan's dense models (github.com/Tencent-Hunyuan/Hunyuan-7B) and Hunyuan-A13B
(github.com/Tencent-Hunyuan/Hunyuan-A13B), and their Hugging Face format."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack, cast

from torch import nn

from torchtitan.models.common.attention import AttentionOptions
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import Architecture, Experts, gguf_format
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, replaced
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.protocols.state_dict_adapter import KeyMapping


class NormedAfterRoPE:
    """A mixin before a decoder's class, with norms of the queries and keys of each head, after
    RoPE."""

    has_qk_norm = True

    def make_attention(self, index: int, **options: Unpack[AttentionOptions]) -> nn.Module:
        decoder = cast(Decoder, super())
        options.setdefault("rotates_first", True)
        return decoder.make_attention(index, **options)


class HunyuanModel(NormedAfterRoPE, Decoder):
    """Llama's decoder with these norms."""


class HunyuanMoeModel(NormedAfterRoPE, MoEDecoder):
    """The same with experts in all layers, next to one that every token passes through."""


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the constant factor of RoPE's base, `alpha`, in its base. Raise
    `UserError` if two keys for the width of heads differ."""
    reader = ConfigReader("config.json", document)
    width = reader.whole_number("hidden_size") // reader.whole_number("num_attention_heads")
    head_dim = reader.whole_number("head_dim") if reader.has("head_dim") else width
    if document.get("attention_head_dim", head_dim) != head_dim:
        other = document["attention_head_dim"]
        raise reader.wrong("attention_head_dim", other, f"head_dim, {head_dim}")
    ropes = {}
    for key in ("rope_scaling", "rope_parameters"):
        section = reader.section(key)
        kind = section.values.get("rope_type", section.values.get("type"))
        if kind == "dynamic" and section.has("alpha"):
            outer = ConfigReader("config.json", {**document, **section.values})
            factor = section.number("alpha") ** (head_dim / (head_dim - 2))
            theta = outer.number("rope_theta", 10_000.0) * factor
            ropes[key] = {"rope_type": "default", "rope_theta": theta}
    return {**document, **ropes}


_LISTS = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
"""Keys that may have one value per layer."""


def _prepare_experts(document: dict[str, object]) -> dict[str, object]:
    """Return the same with one value for all layers. Raise `UserError` if layers differ, or experts
    are wider or narrower than the shared one."""
    document, reader = _prepare(document), ConfigReader("config.json", document)
    for key in _LISTS:
        value = document.get(key)
        if isinstance(value, list):
            if not value or value != [value[0]] * reader.n_layers():
                raise reader.wrong(key, value, "the same for each of num_hidden_layers layers")
            document[key] = value[0]
    width = reader.whole_number("intermediate_size")
    if document.get("moe_intermediate_size", width) != width:
        value = document["moe_intermediate_size"]
        raise reader.wrong("moe_intermediate_size", value, f"intermediate_size, {width}")
    return document


_ROWS = replaced(
    DENSE_ROWS,
    *(
        KeyMapping(
            f"layers.*.attention.{ours}_norm.weight",
            f"model.layers.*.self_attn.{theirs}_layernorm.weight",
        )
        for ours, theirs in {"q": "query", "k": "key"}.items()
    ),
)


def _rows(config: HunyuanMoeModel.Config) -> Sequence[KeyMapping]:
    router = KeyMapping("layers.*.moe.router.weight", "model.layers.*.mlp.gate.wg.weight")
    return _ROWS + replaced(rows.expert_rows(config, shared="shared_mlp"), router)


_DENSE = ModelType(
    architecture="HunYuanDenseV1ForCausalLM",
    config=HunyuanModel.Config,
    rows=_ROWS,
    keys={"attention_bias": "attention_bias"},
    fixed={"use_qk_norm": True, "use_cla": False, "position_embedding_xdrope": False},
    defaults={"rms_norm_eps": 1e-5},
    # Of other models of Hunyuan.
    ignored=(
        *("attention_head_dim", "cla_share_factor", "eod_token_id", "sep_token_id", "norm_type"),
        *("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
        *("org_vocab_size", "mask_init_id", "skip_cls_token", "pool_type", "dense_list", "pad_id"),
        *("add_classification_head", "class_num", "xdrope_section"),
    ),
    prepare=_prepare,
)
_EXPERTS = replace(
    _DENSE,
    architecture="HunYuanMoEV1ForCausalLM",
    config=HunyuanMoeModel.Config,
    rows=_rows,
    keys={**_DENSE.keys, "num_experts": "moe.n_experts", "moe_topk": "moe.top_k"},
    values={"moe.n_shared_experts": 1},
    fixed={
        **_DENSE.fixed,
        **{"num_shared_expert": 1, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0},
        **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "group_limited_greedy": False},
    },
    defaults={**_DENSE.defaults, "num_experts": 1, "moe_topk": 1},
    ignored=(*_DENSE.ignored, "moe_intermediate_size", "num_experts_per_tok", "capacity_factor"),
    prepare=_prepare_experts,
)

FORMAT = dense_format(
    {"hunyuan_v1_dense": _DENSE, "hunyuan_v1_moe": _EXPERTS},
    class_rows={"hunyuan_v1_moe": rows.fused_expert_rows("gate.wg")},
)

GGUF = gguf_format(
    Architecture(name="hunyuan-dense", config=HunyuanModel.Config),
    Architecture(
        name="hunyuan-moe",
        config=HunyuanMoeModel.Config,
        experts=Experts(
            {"norm_topk_prob": True, "n_shared_experts": 1, "shared_ffn_dim": None},
        ),
        keys=lambda config: {"expert_shared_feed_forward_length": config.expert_dim},
    ),
)
