"""DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437), Kimi K2 (arXiv:2507.20534), and their Hugging Face format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.hugging_face import EMBEDDING, ModelType, dense_format, feed_forward_rows, norm_rows
from torchtitan.models.common.hugging_face_rope import write_rope
from torchtitan.models.common.latent_attention import LatentAttention
from torchtitan.models.common.moe.decoder import SigmoidMoEDecoder
from torchtitan.models.common.moe.layer import SigmoidMoEConfig
from torchtitan.models.common.moe.router import GroupLimitedTopK, softmax_scores
from torchtitan.models.common.moe.rows import (
    SELECTION_ROW,
    SIGMOID_KEYS,
    expert_rows,
    prepare_dense_layers,
    shared_rows,
    write_dense_layers,
)
from torchtitan.protocols.state_dict_adapter import KeyMapping
from torchtitan.tools.errors import UserError


@dataclass(kw_only=True, slots=True)
class DeepSeekMoEConfig(SigmoidMoEConfig):
    """Experts of DeepSeek-V3, or of V2."""

    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    """Scores of experts. `softmax` (V2): without a selection bias, and the best expert of a group is its score."""

    def validate(self) -> None:
        SigmoidMoEConfig.validate(self)
        if self.scoring_func == "softmax" and self.bias_rate:
            raise UserError(f"--model.moe.bias_rate is {self.bias_rate}, but must be 0 with softmax scores")

    def router_parts(self) -> dict[str, Any]:
        parts = SigmoidMoEConfig.router_parts(self)
        if self.scoring_func == "sigmoid":
            return parts
        groups = GroupLimitedTopK(self.top_k, self.n_group, self.topk_group, members=1)
        return {**parts, "score": softmax_scores, "choose": groups, "selection": None}


class DeepSeekModel(SigmoidMoEDecoder):
    """A decoder with latent attention, and experts in all but the first layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(SigmoidMoEDecoder.Config):
        moe: DeepSeekMoEConfig
        """Experts."""

        q_lora_rank: int | None
        """Width of the latent of queries. None: there is none."""

        kv_lora_rank: int
        """Width of the latent of keys and values."""

        qk_rope_head_dim: int
        """Last elements of --model.head_dim that have positions, even."""

        v_head_dim: int
        """Width of a head's values."""

        rope_interleave: bool = True
        """Rotate neighboring pairs of elements."""

        mscale_all_dim: float | None = None
        """Growth of scores with the logarithm of --model.rope.scaling_factor (YaRN). None: they do not grow."""

        def validate(self) -> None:
            SigmoidMoEDecoder.Config.validate(self)
            self.check_positive("q_lora_rank", "kv_lora_rank", "v_head_dim", "mscale_all_dim")
            if not 2 <= self.qk_rope_head_dim <= self.resolved_head_dim or self.qk_rope_head_dim % 2:
                raise UserError(
                    f"--model.qk_rope_head_dim is {self.qk_rope_head_dim}, but must be even and at most "
                    f"--model.head_dim {self.resolved_head_dim}"
                )
            if self.v_head_dim > self.resolved_head_dim or self.n_kv_heads != self.n_heads:
                raise UserError(
                    f"--model.v_head_dim {self.v_head_dim} must be at most --model.head_dim {self.resolved_head_dim}, "
                    f"and --model.n_kv_heads {self.n_kv_heads} equal --model.n_heads {self.n_heads}"
                )

    config: Config

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        config = self.config
        mscale = 1 + 0.1 * (config.mscale_all_dim or 0) * math.log(max(1.0, config.rope.scaling_factor))
        return LatentAttention(
            dim=config.dim,
            n_heads=config.n_heads,
            head_dim=config.resolved_head_dim,
            v_dim=config.v_head_dim,
            rope_dim=config.qk_rope_head_dim,
            q_latent_dim=config.q_lora_rank,
            latent_dim=config.kv_lora_rank,
            interleaved=config.rope_interleave,
            bias=config.attention_bias,
            scale=config.resolved_head_dim**-0.5 * mscale**2,
            **self.init_stds(index),
            **options,
        )

    def rope_dim_of_layer(self, index: int) -> int:
        return self.config.qk_rope_head_dim

    def score_flops(self, index: int, seq_len: int) -> float:
        return super().score_flops(index, seq_len) * (1 + self.config.v_head_dim / self.config.resolved_head_dim) / 2


_LATENT = {
    **{"wq": "q_proj", "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj", "wo": "o_proj"},
    **{"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "attend.wkv_b": "kv_b_proj"},
}
_DENSE = (
    EMBEDDING,
    *(
        KeyMapping(f"layers.*.attention.{ours}.{kind}", f"model.layers.*.self_attn.{theirs}.{kind}")
        for ours, theirs in _LATENT.items()
        for kind in ("weight", "bias")
    ),
    *feed_forward_rows(),
    *norm_rows(attention_norm="input_layernorm", ffn_norm="post_attention_layernorm"),
    *shared_rows("shared_experts"),
    SELECTION_ROW,
)


def _rows(config: DeepSeekModel.Config) -> Sequence[KeyMapping]:
    return (*_DENSE, *expert_rows(config.moe.n_experts))


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the width of whole heads, and with `mscale_all_dim` outside of RoPE's section."""
    reader = ConfigReader("config.json", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, **document})
    head_dim = reader.whole_number("qk_nope_head_dim") + reader.whole_number("qk_rope_head_dim")
    sections = [reader.section(key) for key in ("rope_scaling", "rope_parameters")]
    mscales = {"mscale_all_dim": each.number("mscale_all_dim") for each in sections if each.has("mscale_all_dim")}
    others = {key: value for key, value in document.items() if key != "qk_nope_head_dim"}
    return {**prepare_dense_layers(others, default=3), "head_dim": head_dim, **mscales}


def _prepare_v2(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json as `_prepare` does, with groups for the method of the choice."""
    others = {key: value for key, value in document.items() if key != "topk_method"}
    method = document.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"config.json: topk_method is {method!r}, but must be 'greedy' or 'group_limited_greedy'")
    groups = {"n_group": 1, "topk_group": 1} if method == "greedy" else {}
    return _prepare({"first_k_dense_replace": 0, **others, **groups})


def _write(config: DeepSeekModel.Config, score: str) -> dict[str, Any] | None:
    dense = write_dense_layers(config)
    if dense is None or config.moe.scoring_func != score:
        return None
    rotated = config.qk_rope_head_dim
    widths = {"head_dim": rotated, "qk_nope_head_dim": config.resolved_head_dim - rotated}
    rope = write_rope(config.rope, config.max_seq_len)
    if rope["rope_scaling"] and config.mscale_all_dim:
        rope["rope_scaling"]["mscale_all_dim"] = config.mscale_all_dim
    return {**dense, **widths, **rope}


def _write_v2(config: DeepSeekModel.Config) -> dict[str, Any] | None:
    written = _write(config, "softmax")
    method = "greedy" if config.moe.n_group == 1 else "group_limited_greedy"
    return None if written is None or config.moe.norm_topk_prob else {**written, "topk_method": method}


_SHARED: dict[str, Any] = {
    "config": DeepSeekModel.Config,
    "rows": _rows,
    "ignored": (
        *("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim"),
        *("num_nextn_predict_layers", "num_mtp_layers"),
    ),
}
_SAME = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "attention_bias", "mscale_all_dim")
_KEYS = {
    **{key: f"moe.{name}" for key, name in SIGMOID_KEYS.items()},
    **{name: name for name in _SAME},
    "scoring_func": "moe.scoring_func",
}
_WIDTHS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3 = ModelType(
    **_SHARED,
    architecture="DeepseekV3ForCausalLM",
    keys={**_KEYS, "rope_interleave": "rope_interleave"},
    defaults={
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8},
        **{"topk_group": 4, "routed_scaling_factor": 2.5, **_WIDTHS},
    },
    fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    prepare=_prepare,
    write=lambda config: _write(config, "sigmoid"),
)

FORMAT = dense_format(
    {
        "deepseek_v3": _V3,
        "kimi_k2": _V3,
        "deepseek_v2": ModelType(
            **_SHARED,
            architecture="DeepseekV2ForCausalLM",
            keys=_KEYS,
            defaults={
                **{"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2},
                **{"scoring_func": "softmax", "norm_topk_prob": False, **_WIDTHS},
            },
            fixed={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
            prepare=_prepare_v2,
            write=_write_v2,
        ),
    }
)
