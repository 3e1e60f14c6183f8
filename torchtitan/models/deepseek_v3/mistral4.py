"""Mistral 4: DeepSeek-V3's decoder with a softmax router and queries that grow with their position,
and its Hugging Face format."""

from dataclasses import dataclass, replace

from torchtitan.models.common.attention import Attention, TemperedAttention
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import require_gguf
from torchtitan.models.common.hugging_face_rope import GROWTH, prepare_growth, write_rope_section
from torchtitan.models.common.latent_attention import widths_of
from torchtitan.models.common.moe import rows
from torchtitan.models.common.rope import check_growth
from torchtitan.models.deepseek_v3.model import (
    DENSE,
    GGUF,
    V3,
    DeepSeekModel,
    gguf_keys,
    require_usual_growth,
    with_latents,
)


class Mistral4Model(DeepSeekModel):
    """A decoder with latent attention, whose queries grow with their position, and experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekModel.Config):
        llama_4_scaling_beta: float = 0.0
        """Growth of queries by `1 + llama_4_scaling_beta * log(1 + n)` from position n *
        --model.rope.original_max_seq_len on. 0: none."""

        def validate(self) -> None:
            DeepSeekModel.Config.validate(self)
            check_growth(self.llama_4_scaling_beta, self.rope)

    config: Config

    def make_scores(self, scale: float) -> Attention:
        steps, growth = self.config.rope.original_max_seq_len, self.config.llama_4_scaling_beta
        return TemperedAttention(steps, growth, first=0, scale=scale)


_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0},
    **{"original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0},
    GROWTH: 0.1,
}


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the widths of heads, and without the rotated part of a head in the
    section of RoPE. Raise `UserError` if that has another width."""
    document = with_latents(prepare_growth(document, _YARN), plain=64)
    key = "partial_rotary_factor"
    fraction = ConfigReader("config.json", document).number(key)
    for name in ("rope_scaling", "rope_parameters"):
        section = ConfigReader("config.json", document).section(name)
        if section.has(key) and abs(section.number(key) - fraction) > 1e-6:
            raise section.wrong(key, section.values[key], f"{fraction}, by the widths of a head")
        if section.values:
            without = {k: value for k, value in section.values.items() if k != key}
            document = {**document, name: without}
    return rows.prepare_dense_layers(document, default=0)


def _write(config: Mistral4Model.Config) -> dict[str, object] | None:
    dense = rows.write_dense_layers(config)
    if dense is None:
        return None
    growth = {GROWTH: config.llama_4_scaling_beta}
    if config.mscale_all_dim:
        growth["mscale_all_dim"] = config.mscale_all_dim
    section = {**write_rope_section(config.rope, config.max_seq_len), **growth}
    # In transformers, the part with positions is not the width of a head, as in DeepSeek-V3.
    return {**dense, **widths_of(config), "rope_parameters": section, "rope_scaling": None}


_KEYS = {key: name for key, name in V3.keys.items() if key != "num_nextn_predict_layers"}
_MISTRAL_4 = replace(
    V3,
    architecture="Mistral4ForCausalLM",
    config=Mistral4Model.Config,
    # Its files also have one tensor for the experts of a layer.
    rows=(*DENSE, *rows.fused_expert_rows(), *rows.shared_rows("shared_experts")),
    keys={**_KEYS, GROWTH: GROWTH},
    defaults={
        **V3.defaults,
        **{"n_routed_experts": 128, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0},
        **{"q_lora_rank": 1024, "kv_lora_rank": 256, "num_key_value_heads": 32},
        **{"n_group": 1, "topk_group": 1},
    },
    values={},
    fixed={"scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    prepare=_prepare,
    write=_write,
)

TYPES = {"mistral4": _MISTRAL_4}


def _gguf_keys(config: Mistral4Model.Config) -> dict[str, object]:
    has_latents = config.q_lora_rank is not None
    require_gguf(has_latents, "q_lora_rank", config.q_lora_rank, "a width")
    require_usual_growth(config)
    growth = float(config.llama_4_scaling_beta)
    steps = {"attention.temperature_length": config.rope.original_max_seq_len} if growth else {}
    return {**gguf_keys(config), "attention.temperature_scale": growth, **steps}


ARCHITECTURES = (replace(GGUF, name="mistral4", config=Mistral4Model.Config, keys=_gguf_keys),)
