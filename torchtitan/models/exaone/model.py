"""EXAONE 4 (arXiv:2507.11407) and K-EXAONE (arXiv:2601.01739), and their Hugging Face format."""

from dataclasses import dataclass

from torchtitan.models.common.blocks import PostNormBlock
from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.gguf import (
    CHOICES_OF_DEEPSEEK,
    Architecture,
    Experts,
    Rotation,
    Tying,
    gguf_format,
    require_gguf,
)
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    ModelType,
    dense_format,
    dense_rows,
    replaced,
    write_if,
)
from torchtitan.models.common.layer_types import WINDOW_KEYS, WindowedDecoder, one_full_of
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping


class LocalPositions:
    """A mixin before a decoder's class: if some layers have windows, the others have no
    positions."""

    config: WindowedDecoder.Config

    has_qk_norm = True

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        config = self.config
        return config.rope if config.sliding_window is None or config.has_window(index) else None


class Exaone4Model(LocalPositions, WindowedDecoder):
    """A decoder with the norms after attention and feed-forward network, and norms of the queries
    and keys of each head."""

    config: WindowedDecoder.Config

    block_kind = PostNormBlock


class ExaoneMoeModel(LocalPositions, MoEDecoder):
    """A decoder with norms before its parts, and experts in all but the first layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoEDecoder.Config):
        router_types = ("sigmoid",)

    config: Config


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `layer_types` if it has windows, otherwise without. Raise
    `UserError` if it does not say which layers have windows."""
    reader = ConfigReader("config.json", {"sliding_window_pattern": 4, **document})
    types, n_layers = document.get("layer_types"), reader.n_layers()
    if document.get("sliding_window", 4096) is None:
        if types not in (None, ["full_attention"] * n_layers):
            raise reader.wrong("layer_types", types, "full_attention without a sliding_window")
        return {key: value for key, value in document.items() if key != "layer_types"}
    if types is None:
        period = reader.whole_number("sliding_window_pattern", hint=", or have layer_types")
        types = [
            "sliding_attention" if (index + 1) % period else "full_attention"
            for index in range(n_layers)
        ]
    return {**document, "layer_types": types}


def _prepare_experts(document: dict[str, object]) -> dict[str, object]:
    """Return the same with `mlp_layer_types`. Raise `UserError` if an older key differs."""
    types = (
        document.get("mlp_layer_types") or rows.prepare_dense_layers(document)["mlp_layer_types"]
    )
    is_sparse = document.get("is_moe_layer") or []
    listed = types if isinstance(types, list) else []
    if is_sparse and is_sparse != [kind == "sparse" for kind in listed]:
        raise ConfigReader("config.json", document).wrong(
            "is_moe_layer", is_sparse, "true where mlp_layer_types is sparse"
        )
    return {**_prepare(document), "mlp_layer_types": types}


def _rows(config: ExaoneMoeModel.Config) -> tuple[KeyMapping, ...]:
    experts = rows.expert_rows(config, shared="shared_experts")
    return DENSE_ROWS + replaced(experts, rows.selection_bias("mlp.e_score_correction_bias"))


def _write_experts(config: ExaoneMoeModel.Config) -> dict[str, object]:
    return {"is_moe_layer": [config.moe.is_sparse(index) for index in range(config.n_layers)]}


_DENSE = ModelType(
    architecture="Exaone4ForCausalLM",
    config=Exaone4Model.Config,
    rows=dense_rows(
        attention_post_norm="post_attention_layernorm",
        ffn_post_norm="post_feedforward_layernorm",
    ),
    keys=WINDOW_KEYS,
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    ignored=("sliding_window_pattern",),
    prepare=_prepare,
)
_SAME = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
_EXPERTS = ModelType(
    architecture="ExaoneMoeForCausalLM",
    config=ExaoneMoeModel.Config,
    rows=_rows,
    keys={
        **{**WINDOW_KEYS, **rows.QWEN_KEYS, **rows.SPARSE_KEYS},
        **{"num_shared_experts": "moe.n_shared_experts", **{name: f"moe.{name}" for name in _SAME}},
    },
    values={"moe.scoring_func": "sigmoid", "moe.selection_bias": True},
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    defaults={
        **_DENSE.defaults,
        **{"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024},
        **{"num_shared_experts": 1, "routed_scaling_factor": 2.5},
    },
    ignored=(
        *("sliding_window_pattern", "first_k_dense_replace", "first_last_k_dense_replace"),
        "is_moe_layer",
    ),
    prepare=_prepare_experts,
    write=write_if(
        lambda config: config.moe.ffn_dim is not None and config.sliding_window is not None,
        _write_experts,
    ),
)

_CLASS_ROWS = (
    *rows.fused_expert_rows(),
    rows.selection_bias("mlp.gate.e_score_correction_bias"),
)

# Modules that predict further tokens are not read.
FORMAT = dense_format(
    {"exaone4": _DENSE, "exaone_moe": _EXPERTS},
    without=("mtp.",),
    class_rows={"exaone_moe": _CLASS_ROWS},
)

_WITH_WINDOWS = 64
"""Layers of the only size of EXAONE 4 with windows; llama.cpp recognizes it by this number."""


def _gguf_keys(config: Exaone4Model.Config) -> dict[str, object]:
    has_windows, must = config.sliding_window is not None, config.n_layers == _WITH_WINDOWS
    words = f"a window in {_WITH_WINDOWS} layers only"
    require_gguf(has_windows == must, "sliding_window", config.sliding_window, words)
    return {}


def _gguf_experts(config: ExaoneMoeModel.Config) -> dict[str, object]:
    window, n_shared = config.sliding_window, config.moe.n_shared_experts
    require_gguf(window is not None, "sliding_window", window, "a window")
    require_gguf(n_shared > 0, "moe.n_shared_experts", n_shared, "at least 1")
    return {"expert_shared_feed_forward_length": n_shared * config.expert_dim}


GGUF = gguf_format(
    Architecture(
        name="exaone4",
        config=Exaone4Model.Config,
        rotation=Rotation(scalings=("linear", "yarn", "llama3")),
        any_head_width=False,
        windows=one_full_of(4),
        keys=_gguf_keys,
    ),
    Architecture(
        name="exaone-moe",
        config=ExaoneMoeModel.Config,
        rotation=Rotation(scalings=("linear", "yarn", "llama3")),
        windows="stated",
        tying=Tying(copies=True),
        experts=Experts(
            {"scoring_func": "sigmoid", "shared_ffn_dim": None},
            chosen=(*CHOICES_OF_DEEPSEEK, "selection_bias"),
        ),
        keys=_gguf_experts,
    ),
)
