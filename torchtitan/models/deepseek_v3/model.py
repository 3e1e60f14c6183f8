"""DeepSeek-V2 and V3 (arXiv:2405.04434, 2412.19437), Kimi K2 (arXiv:2507.20534), and their Hugging
Face format."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from torchtitan.models.common import hugging_face as hf
from torchtitan.models.common.blocks import MultiTokenBlock, Rope
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.hugging_face_rope import write_rope
from torchtitan.models.common.latent_attention import LatentAttention
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.output_head import Head, with_further_tokens
from torchtitan.tools.errors import require


class DeepSeekModel(MoEDecoder):
    """A decoder with latent attention, and experts in all but the first layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        router_types = ("sigmoid", "softmax")

        q_lora_rank: int | None = None
        """Width of the latent of queries. None: queries have no latent."""

        kv_lora_rank: int
        """Width of the latent of keys and values."""

        v_head_dim: int
        """Width of a head's values, at most --model.head_dim."""

        mscale_all_dim: float | None = None
        """Growth of the square root of attention scores with the logarithm of
        --model.rope.scaling_factor."""

        rope_interleave: bool = True
        """Rotate neighboring pairs of elements, not the two halves of the rotated part."""

        n_mtp_modules: int = 0
        """Modules of multi-token prediction, which train the model to predict one more token after
        the next one each. Files store them as layers after the last, and this option loads them;
        DeepSeek-V3 has 1."""

        mtp_weight: float = field(default=0.3, compare=False)  # not in config.json
        """Weight of the modules' mean loss in gradients. DeepSeek-V3 used 0.3, then 0.1."""

        def unsupported_parallelisms(self) -> dict[str, str]:
            reason, kinds = (
                "multi-token prediction needs embedding and all tokens of a row",
                ("context", "pipeline"),
            )
            return {f"{kind}_parallel_degree": reason for kind in kinds if self.n_mtp_modules}

        def validate(self) -> None:
            MoEDecoder.Config.validate(self)
            self.check_positive("q_lora_rank", "kv_lora_rank", "v_head_dim", "mtp_weight")
            self.check_sizes(64, "n_mtp_modules", least=0)
            most, heads = self.resolved_head_dim, f"equal to --model.n_heads {self.n_heads}"
            require(
                self.v_head_dim <= most,
                "--model.v_head_dim",
                self.v_head_dim,
                f"at most the head width {most}",
            )
            require(self.n_kv_heads == self.n_heads, "--model.n_kv_heads", self.n_kv_heads, heads)

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        for index in range(config.n_layers, config.n_layers + config.n_mtp_modules):
            self.layers[str(index)] = self.make_block(config.n_layers - 1, kind=MultiTokenBlock)

    def training_head(
        self,
        head: Head,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        rope: Rope,
        attention: AttentionMetadata,
    ) -> Head:
        def module(block: nn.Module, k: int) -> Callable[..., Tensor]:
            # Its router counts only tokens whose k-th later token is in their document.
            documents = attention.documents and attention.documents.before_last(k)
            own = replace(attention, documents=documents)
            return lambda x_BLD, later_BL: block(x_BLD, rope, own, self.embed(later_BL))

        blocks = list(self.layers.values())[self.config.n_layers :]
        modules = [module(block, k) for k, block in enumerate(blocks, start=1)]
        return with_further_tokens(head, modules, tokens_BL, positions_BL, self.config.mtp_weight)

    def make_attention(self, index: int, **options: object) -> nn.Module:
        config = self.config
        ranks: Any = {
            "q_rank": config.q_lora_rank,
            "rank": config.kv_lora_rank,
            "v_dim": config.v_head_dim,
        }
        mscale = 1 + 0.1 * (config.mscale_all_dim or 0.0) * math.log(
            max(1.0, config.rope.scaling_factor)
        )
        scale, stds = config.resolved_head_dim**-0.5 * mscale**2, self.init_stds(index)
        return LatentAttention(
            config, **ranks, scale=scale, interleaved=config.rope_interleave, **stds
        )

    def score_flops(self, index: int, seq_len: int) -> float:
        return (
            super().score_flops(index, seq_len)
            * (1 + self.config.v_head_dim / self.config.resolved_head_dim)
            / 2
        )


_LATENTS = {
    **{"q_latent.0": "q_a_proj", "q_latent.1": "q_a_layernorm", "q_latent.2": "q_b_proj"},
    **{"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "attend.wkv_b": "kv_b_proj"},
}
_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
_DENSE = hf.DENSE_ROWS + hf.module_rows("layers.*.attention", "model.layers.*.self_attn", _LATENTS)
_DENSE += hf.module_rows("layers.*.mtp", "model.layers.*", _MTP)


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the width of whole heads and its rotated part, and groups for any
    choice of experts."""
    is_v2 = document["model_type"] == "deepseek_v2"
    if document.get("topk_method", "greedy" if is_v2 else None) == "greedy":
        document = {
            **document,
            "topk_method": "group_limited_greedy",
            "n_group": 1,
            "topk_group": 1,
        }
    reader = ConfigReader(
        "config.json", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, **document}
    )
    plain, rotated = (reader.whole_number(f"qk_{part}_head_dim") for part in ("nope", "rope"))
    widths = {"head_dim": plain + rotated, "partial_rotary_factor": rotated / (plain + rotated)}
    for section in map(reader.section, ("rope_scaling", "rope_parameters")):
        if section.has("mscale_all_dim"):
            widths["mscale_all_dim"] = section.number("mscale_all_dim")
    # an option, since other files name modules that they lack
    document.pop("num_nextn_predict_layers", None)
    return {**rows.prepare_dense_layers(document, 0 if is_v2 else 3), **widths}


def _write(config: DeepSeekModel.Config) -> dict[str, Any] | None:
    dense, head_dim = rows.write_dense_layers(config), config.resolved_head_dim
    rotated = config.rope.rotated_dim(head_dim)
    widths = {
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head_dim - rotated,
    }
    scaling = write_rope(config.rope, config.max_seq_len)["rope_scaling"]
    growth = {"mscale_all_dim": config.mscale_all_dim} if config.mscale_all_dim else {}
    ropes = {"rope_scaling": {**scaling, **growth}} if scaling else {}
    return None if dense is None else {**dense, **widths, "partial_rotary_factor": 1.0, **ropes}


_KEYS = {
    **rows.SIGMOID_KEYS,
    **{
        k: k
        for k in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "attention_bias", "mscale_all_dim")
    },
}
_WIDTHS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "partial_rotary_factor": 1.0,
}
_V3 = hf.ModelType(
    architecture="DeepseekV3ForCausalLM",
    config=DeepSeekModel.Config,
    rows=lambda config: _DENSE + rows.expert_rows(config, shared="shared_experts"),
    keys={
        **_KEYS,
        "rope_interleave": "rope_interleave",
        "num_nextn_predict_layers": "n_mtp_modules",
    },
    defaults={
        **{
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 8,
        },
        **{"topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 1, **_WIDTHS},
    },
    values={"moe.selection_bias": True},
    fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ignored=("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "first_k_dense_replace"),
    prepare=_prepare,
    write=_write,
)
_V2 = replace(
    _V3,
    architecture="DeepseekV2ForCausalLM",
    keys=_KEYS,
    defaults={
        **_WIDTHS,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    values={},
    fixed={
        **_V3.fixed,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
)

FORMAT = hf.dense_format({"deepseek_v3": _V3, "kimi_k2": _V3, "deepseek_v2": _V2})
