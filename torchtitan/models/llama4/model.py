"""The language model of Llama 4 (ai.meta.com/blog/llama-4-multimodal-intelligence), and its Hugging Face format."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.attention import Attention
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.feed_forward import GatedFeedForward
from torchtitan.models.common.hugging_face import DENSE_ROWS, ModelType, dense_format, write_if
from torchtitan.models.common.layer_types import LayerType
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.moe.experts import InputScaledExperts
from torchtitan.models.common.moe.router import ScoreWeights, TopK, sigmoid_scores
from torchtitan.models.common.moe.rows import shared_rows, transposed_expert_rows
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.state_dict_adapter import KeyMapping, RopePermutation


class Llama4Model(MoEDecoder):
    """A decoder whose windows are chunks of the document. Layers without windows have no positions, but temperature
    tuning. The experts of a layer are next to one that every token passes through."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        layer_types: list[LayerType] = field(default_factory=lambda: [*["sliding_attention"] * 3, "full_attention"])
        """Types of the first layers, repeated for the others. Those of type full_attention have no positions."""

        use_qk_norm: bool = True
        """Normalize the queries and keys of each head, in layers with positions."""

        attn_temperature_tuning: bool = True
        """In the other layers, multiply queries by `1 + attn_scale * log(1 + n)` from position n * floor_scale on."""

        floor_scale: int = 8192
        """Tokens between steps of this factor."""

        attn_scale: float = 0.1
        """Height of its steps."""

        def validate(self) -> None:
            MoEDecoder.Config.validate(self)
            self.check_sizes(2**32, "floor_scale")
            self.check_positive("attn_scale")

    config: Config

    has_chunks = True
    make_experts = InputScaledExperts

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return self.config.rope if self.config.has_window(index) else None

    def make_attention(self, index: int, **options: Any) -> nn.Module:
        module: Any = super().make_attention(index, **options)
        module.attend = _Attention(self.config, self.config.has_window(index))
        return module

    def router_parts(self) -> Mapping[str, Any]:
        return {"score": sigmoid_scores, "choose": TopK(self.config.moe.top_k), "weigh": ScoreWeights()}

    def make_shared(self, index: int) -> nn.Module:
        width = self.config.moe.ffn_dim or self.config.ffn_dim
        return GatedFeedForward(dim=self.config.dim, hidden_dim=width, **self.init_stds(index))


class _Attention(Attention):
    """Attention with norms after RoPE or, without RoPE, with temperature tuning (after arXiv:2501.19399)."""

    def __init__(self, config: Llama4Model.Config, has_positions: bool):
        super().__init__()
        self.config, self.has_positions = config, has_positions

    def forward(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, attention: AttentionMetadata) -> Tensor:
        if self.has_positions and self.config.use_qk_norm:
            q_BLHD, k_BLKD = (F.rms_norm(x, x.shape[-1:], eps=self.config.norm_eps) for x in (q_BLHD, k_BLKD))
        elif self.config.attn_temperature_tuning and not self.has_positions:
            positions_BL = attention.positions_BL
            if positions_BL is None:
                positions_BL = torch.arange(q_BLHD.shape[1], device=q_BLHD.device)[None]
            factor_BL = 1 + self.config.attn_scale * torch.log1p((positions_BL + 1) // self.config.floor_scale)
            q_BLHD = (q_BLHD * factor_BL[..., None, None]).type_as(q_BLHD)
        return super().forward(q_BLHD, k_BLKD, v_BLKD, attention)


def _rows(config: Llama4Model.Config) -> list[KeyMapping]:
    """Return the names of weights. The format rotates pairs of neighboring elements of queries and keys."""
    turned = {f"layers.*.attention.{name}.{kind}" for name in ("wq", "wk") for kind in ("weight", "bias")}
    permutation = RopePermutation(config.resolved_head_dim)
    rows = [replace(row, transform=permutation) if row.internal in turned else row for row in DENSE_ROWS]
    rows += [*shared_rows("shared_expert"), *transposed_expert_rows((0, 3, 1, 2))]
    return [replace(row, external=row.external.replace(".mlp.", ".feed_forward.")) for row in rows]


def _chunked(types: list[str]) -> list[str]:
    return [kind.replace("sliding", "chunked") for kind in types]


def _prepare(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with `layer_types` and `mlp_layer_types`. Raise `UserError` for contradictory keys."""
    reader = ConfigReader("config.json", document)
    n_layers, interval = reader.n_layers(), reader.whole_number("no_rope_layer_interval", 4)
    step = reader.whole_number("interleave_moe_layer_step", 1)
    has_rope = document.pop("no_rope_layers", None) or [(index + 1) % interval for index in range(n_layers)]
    sparse = document["moe_layers"] if reader.has("moe_layers") else [*range(step - 1, n_layers, step)]
    if not isinstance(has_rope, list) or len(has_rope) < n_layers:
        raise reader.wrong("no_rope_layers", has_rope, f"a list with num_hidden_layers = {n_layers} items")
    if not (isinstance(sparse, list) and all(index in range(n_layers) for index in sparse)):
        raise reader.wrong("moe_layers", sparse, "a list of numbers of layers")
    types = ["sliding_attention" if rope else "full_attention" for rope in has_rope[:n_layers]]
    if document.get("layer_types", _chunked(types)) != _chunked(types):
        raise reader.wrong("layer_types", document["layer_types"], "chunked_attention where layers have positions")
    kinds = ["sparse" if index in sparse else "dense" for index in range(n_layers)]
    return {**document, "layer_types": types, "mlp_layer_types": kinds}


def _write(config: Llama4Model.Config) -> dict[str, Any]:
    layers = range(config.n_layers)
    types = ["sliding_attention" if config.has_window(index) else "full_attention" for index in layers]
    sparse = [index for index in layers if config.moe.is_sparse(index)]
    return {
        "no_rope_layers": [int(config.has_window(index)) for index in layers],
        "moe_layers": sparse,
        "layer_types": _chunked(types),
    }


_SAME = ("attention_bias", "layer_types", "use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale")
_TEXT = ModelType(
    architecture="Llama4ForCausalLM",
    config=Llama4Model.Config,
    rows=_rows,
    keys={
        **{**{name: name for name in _SAME}, "intermediate_size_mlp": "ffn_dim", "intermediate_size": "moe.ffn_dim"},
        **{"num_local_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k"},
        **{"mlp_layer_types": "moe.layer_types", "attention_chunk_size": "sliding_window"},
    },
    defaults={
        **{"num_local_experts": 16, "num_experts_per_tok": 1, "num_key_value_heads": 8, "head_dim": 128},
        **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "attention_chunk_size": 8192},
        **{"rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
    },
    fixed={"router_jitter_noise": 0.0},
    ignored=("no_rope_layer_interval", "moe_layers", "interleave_moe_layer_step", "for_llm_compressor"),
    prepare=_prepare,
    write=write_if(lambda config: config.moe.ffn_dim is not None and config.sliding_window is not None, _write),
)
FORMAT = dense_format({"llama4_text": _TEXT, "llama4": _TEXT}, without=("vision_model.", "multi_modal_projector."))
