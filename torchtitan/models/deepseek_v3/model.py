"""DeepSeek-V2 and V3 (arXiv:2405.04434, 2412.19437), Kimi K2 (arXiv:2507.20534), GLM-4.7-Flash
(arXiv:2508.06471), and their Hugging Face format."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from torchtitan.models.common import gguf
from torchtitan.models.common import hugging_face as hf
from torchtitan.models.common.blocks import MultiTokenBlock, Rope
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf_latent import latent_keys, latent_rows
from torchtitan.models.common.hugging_face_rope import write_scaling
from torchtitan.models.common.latent_attention import (
    LATENT_ROWS,
    LatentDecoder,
    latent_score_flops,
    widths_of,
    with_widths,
)
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.output_head import Head, with_further_tokens


class DeepSeekModel(LatentDecoder, MoEDecoder):
    """A decoder with latent attention, and experts in all but the first layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(LatentDecoder.Config, MoEDecoder.Config):
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
            LatentDecoder.Config.validate(self)
            self.check_positive("mtp_weight")
            self.check_sizes(64, "n_mtp_modules", least=0)

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

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        return super().make_attention(index, interleaved=self.config.rope_interleave, **options)

    def score_scale(self) -> float:
        growth = 0.1 * (self.config.mscale_all_dim or 0.0)
        mscale = 1 + growth * math.log(max(1.0, self.config.rope.scaling_factor))
        return super().score_scale() * mscale**2

    def score_flops(self, index: int, seq_len: int) -> float:
        return latent_score_flops(self, index, seq_len)


class GLM4MoeLiteModel(DeepSeekModel):
    """GLM-4.7-Flash, the same decoder with other sizes."""


_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
DENSE = hf.DENSE_ROWS + LATENT_ROWS
DENSE += hf.module_rows("layers.*.mtp", "model.layers.*", _MTP)


def _prepare(document: dict[str, object]) -> dict[str, object]:
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
    return with_latents(rows.prepare_dense_layers(document, 0 if is_v2 else 3), plain=128)


def _prepare_lite(document: dict[str, object]) -> dict[str, object]:
    """Return the same for a file whose `mlp_layer_types` name the dense layers, without them the
    first one. Raise `UserError` for another number of dense layers, and for heads whose part with
    positions is rotated in part."""
    document = _without_fraction(document)
    n_dense = document.get("first_k_dense_replace", 1)
    if document.get("mlp_layer_types") is None:
        if n_dense != 1:
            must = "1 without mlp_layer_types"
            raise ConfigReader("config.json", document).wrong(
                "first_k_dense_replace", n_dense, must
            )
        document = rows.prepare_dense_layers(document)
    return with_latents(document, plain=192)


def _without_fraction(document: dict[str, object]) -> dict[str, object]:
    reader, key = ConfigReader("config.json", document), "partial_rotary_factor"

    def without(section: ConfigReader) -> dict[str, object]:
        if section.number(key, 1.0) != 1.0:
            raise section.wrong(key, section.values[key], "1.0")
        return {name: value for name, value in section.values.items() if name != key}

    names = [name for name in ("rope_scaling", "rope_parameters") if reader.has(name)]
    return {**without(reader), **{name: without(reader.section(name)) for name in names}}


def with_latents(document: dict[str, object], plain: int) -> dict[str, object]:
    """Return a config.json with the widths of heads (`with_widths`), and the growth of their
    products with RoPE's."""
    reader, growth = ConfigReader("config.json", document), {}
    for section in map(reader.section, ("rope_scaling", "rope_parameters")):
        if section.has("mscale_all_dim"):
            growth["mscale_all_dim"] = section.number("mscale_all_dim")
    # an option, since other files name modules that they lack
    document.pop("num_nextn_predict_layers", None)
    return {**with_widths(document, plain), **growth}


def _write(config: DeepSeekModel.Config) -> dict[str, object] | None:
    dense = rows.write_dense_layers(config)
    return None if dense is None else {**dense, **_write_widths(config)}


def write_types(config: DeepSeekModel.Config) -> dict[str, object] | None:
    """Return the keys of heads, and of dense layers, which `mlp_layer_types` also names."""
    dense = rows.write_dense_layers(config) or {}
    return None if config.moe.ffn_dim is None else {**dense, **_write_widths(config)}


def _write_widths(config: DeepSeekModel.Config) -> dict[str, object]:
    scaling = write_scaling(config.rope, config.max_seq_len)
    growth = {"mscale_all_dim": config.mscale_all_dim} if config.mscale_all_dim else {}
    ropes = {"rope_scaling": {**scaling, **growth}} if scaling else {}
    widths = widths_of(config)
    # the part of a head with positions, which is rotated
    return {**widths, "head_dim": widths["qk_rope_head_dim"], "partial_rotary_factor": 1.0, **ropes}


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
V3 = hf.ModelType(
    architecture="DeepseekV3ForCausalLM",
    config=DeepSeekModel.Config,
    rows=lambda config: DENSE + rows.expert_rows(config, shared="shared_experts"),
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
    V3,
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
        **V3.fixed,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
)
_LITE = replace(
    V3,
    architecture="Glm4MoeLiteForCausalLM",
    config=GLM4MoeLiteModel.Config,
    defaults={
        **_WIDTHS,
        **{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
        **{"routed_scaling_factor": 1.8, "n_shared_experts": 1, "num_key_value_heads": 20},
        **{"q_lora_rank": 768, "v_head_dim": 256, "rms_norm_eps": 1e-5},
    },
    prepare=_prepare_lite,
    write=write_types,
)

TYPES = {"deepseek_v3": V3, "kimi_k2": V3, "deepseek_v2": _V2, "glm4_moe_lite": _LITE}


_WITHOUT_QUERY_LATENTS = (26, 27)
"""Layers of the models whose queries have no latents; llama.cpp knows them by these numbers."""


def _gguf_keys(config: DeepSeekModel.Config) -> dict[str, object]:
    is_lite = config.n_layers in _WITHOUT_QUERY_LATENTS
    fits, must = (config.q_lora_rank is None) == is_lite, "None in 26 or 27 layers only"
    gguf.require_gguf(fits, "q_lora_rank", config.q_lora_rank, must)
    return gguf_keys(config)


def gguf_keys(config: DeepSeekModel.Config) -> dict[str, object]:
    """Return the metadata of a model with this attention and these experts. Raise `UserError` if
    llama.cpp does not compute it."""
    moe = config.moe
    one_group = moe.topk_group == moe.n_group
    growth, scaled = config.mscale_all_dim, config.rope.is_scaled
    for fits, option, value, must in (
        (config.rope_interleave, "rope_interleave", config.rope_interleave, "True"),
        (not config.n_mtp_modules, "n_mtp_modules", config.n_mtp_modules, "0"),
        (moe.n_shared_experts > 0, "moe.n_shared_experts", moe.n_shared_experts, "at least 1"),
        (one_group or moe.selection_bias, "moe.n_group", moe.n_group, "1 without the bias"),
        (bool(growth) or not scaled, "mscale_all_dim", growth, "a number with YaRN"),
    ):
        gguf.require_gguf(fits, option, value, must)
    scaling = {"rope.scaling.yarn_log_multiplier": 0.1 * (growth or 0.0)} if scaled else {}
    return {**latent_keys(config), **scaling}


def require_usual_growth(config: DeepSeekModel.Config) -> None:
    """Raise `UserError` unless scores grow as in the published models with YaRN. llama.cpp computes
    other growth only for DeepSeek-V2 and V3."""
    growth, scaled = config.mscale_all_dim, config.rope.is_scaled
    gguf.require_gguf(growth == 1.0 or not scaled, "mscale_all_dim", growth, "1.0 with YaRN")


GGUF = gguf.Architecture(
    name="deepseek2",
    config=DeepSeekModel.Config,
    rotation=gguf.Rotation(part=True, scalings=("yarn",), yarn_factor=1.0),
    rows=latent_rows,
    experts=gguf.Experts(
        {"shared_ffn_dim": None}, chosen=(*gguf.CHOICES_OF_DEEPSEEK, "selection_bias")
    ),
    keys=_gguf_keys,
)

ARCHITECTURES = tuple(
    replace(GGUF, config=config) for config in (DeepSeekModel.Config, GLM4MoeLiteModel.Config)
)
