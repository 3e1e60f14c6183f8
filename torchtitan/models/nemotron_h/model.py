"""Nemotron-H (NVIDIA, arXiv:2504.03624) and Nemotron 3 (arXiv:2512.20848), and their Hugging Face
format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, Unpack

from torch import nn

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward, LayerSizes, squared_relu
from torchtitan.models.common.gguf import Architecture, Experts, gguf_format, require_gguf
from torchtitan.models.common.gguf_recurrent import gguf_mamba_rows, is_recurrent, mamba_keys
from torchtitan.models.common.hugging_face import ModelType, dense_format, module_rows, replaced
from torchtitan.models.common.mamba import LAYER_NAMES, MAMBA, MambaDecoder, mamba_rows
from torchtitan.models.common.mixers import ATTENTION, NO_MIXER, MixerKind
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.models.common.moe.experts import SquaredReLUExperts
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.rows import expert_rows, fused_expert_rows
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols.state_dict_adapter import KeyMapping, Permuted, Stacked
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.logging import logger

LayerType = Literal["linear_attention", "full_attention", "mlp", "moe"]
"""As in `layers_block_type` of transformers; linear_attention is Mamba 2."""


class NemotronHModel(MambaDecoder):
    """A decoder whose layers have one part each: Mamba 2, attention without positions, or a plain
    feed-forward network."""

    @dataclass(kw_only=True, slots=True)
    class Config(MambaDecoder.Config):
        layer_types: list[LayerType] = field(
            default_factory=lambda: ["linear_attention", "mlp", "full_attention", "mlp"]
        )
        """Types of the first layers, repeated for the others."""

        rope: RoPEConfig = field(default_factory=lambda: RoPEConfig(theta=10_000.0))
        """Not used: no layer has positions."""

        mixers: ClassVar[Mapping[str, MixerKind]] = {
            "linear_attention": MAMBA,
            "full_attention": ATTENTION,
            "mlp": NO_MIXER,
        }

    config: Config

    def rope_of_layer(self, index: int) -> RoPEConfig | None:
        return None

    def make_feed_forward(
        self, index: int, kind: Callable[..., nn.Module] = FeedForward, **options: object
    ) -> nn.Module | None:
        if self.config.type_of(index) != "mlp":
            return None
        own = {"activation": squared_relu, "bias": self.config.mlp_bias}
        return Decoder.make_feed_forward(self, index, FeedForward, **own)


class NemotronHMoEModel(ExpertLayers, NemotronHModel):
    """Nemotron-H with layers of experts, next to a network that every token passes through."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertLayers.Config, NemotronHModel.Config):
        moe: MoEConfig
        """Experts."""

        router_types = ("sigmoid",)
        counts_shared = False

        mixers: ClassVar[Mapping[str, MixerKind]] = {
            **NemotronHModel.Config.mixers,
            "moe": NO_MIXER,
        }

        def validate(self) -> None:
            ExpertLayers.Config.validate(self)
            types = self.moe.layer_types
            must = "only sparse: --model.layer_types says which layers have experts"
            require("dense" not in types, "--model.moe.layer_types", types, must)

    config: Config

    make_experts = SquaredReLUExperts

    def make_feed_forward(
        self, index: int, kind: Callable[..., nn.Module] = FeedForward, **options: object
    ) -> nn.Module | None:
        if self.config.type_of(index) == "moe":
            return ExpertLayers.make_feed_forward(self, index)
        return NemotronHModel.make_feed_forward(self, index)

    def make_shared(self, width: int, **sizes: Unpack[LayerSizes]) -> nn.Module | None:
        config = self.config
        if not config.moe.shared_ffn_dim:
            return None
        return FeedForward(
            hidden_dim=config.moe.shared_ffn_dim,
            activation=squared_relu,
            bias=config.mlp_bias,
            **sizes,
        )


_OLDER_KEYS = {
    **{"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand"},
    **{"mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size"},
    **{"mamba_dt_min": "time_step_min", "mamba_dt_max": "time_step_max"},
    **{"mamba_dt_limit": "time_step_limit", "mamba_dt_init_floor": "time_step_floor"},
}
"""Key that transformers also reads → the key in whose place it then counts."""

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with the types of layers, without older keys, and without experts if no
    layer has them. Raise `UserError` for an unknown type."""
    older = {name: document[key] for key, name in _OLDER_KEYS.items() if key in document}
    document = {k: v for k, v in {**document, **older}.items() if k not in _OLDER_KEYS}
    reader = ConfigReader("config.json", {**document})
    key = "layer_types" if document.get("layers_block_type") is None else "layers_block_type"
    types, pattern = document.pop(key, None), document.pop("hybrid_override_pattern", None)
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or not {*pattern} <= {*PATTERN}:
            must = f"made of {' '.join(PATTERN)}"
            raise UserError(
                f"config.json: hybrid_override_pattern is {pattern!r}, but must be {must}"
            )
        types = [PATTERN[letter] for letter in pattern]
    if types is None:
        types = ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise reader.wrong(key, types, "a list of types of layers")
    types = [LAYER_NAMES.get(kind, kind) for kind in types]
    n_experts = document.get("n_routed_experts", 8) if "moe" in types else 0
    layers = {"layers_block_type": types, "num_hidden_layers": len(types)}
    return {**document, **layers, "n_routed_experts": n_experts}


def _write(config: NemotronHModel.Config) -> dict[str, object] | None:
    """Return the types of layers, also as older code reads them; None: it cannot describe the
    model."""
    types = [config.type_of(index) for index in range(config.n_layers)]
    if isinstance(config, NemotronHMoEModel.Config) and "moe" not in types:
        return None
    letters = {kind: letter for letter, kind in PATTERN.items()}
    return {
        "layers_block_type": types,
        "hybrid_override_pattern": "".join(letters[kind] for kind in types),
    }


_MIXER = "model.layers.*.mixer"
_ROWS = (
    KeyMapping("tok_embeddings.weight", "model.embeddings.weight"),
    KeyMapping("layers.*.attention_norm.weight", "model.layers.*.norm.weight"),
    KeyMapping("layers.*.ffn_norm.weight", "model.layers.*.norm.weight"),
    *module_rows(
        "layers.*.attention",
        _MIXER,
        {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"},
    ),
    *mamba_rows("mixer"),
    *module_rows("layers.*.feed_forward", _MIXER, {"w1": "up_proj", "w2": "down_proj"}),
    KeyMapping("head.norm.weight", "model.norm_f.weight"),
)


_SHARED_ROWS = module_rows(
    "layers.*.moe.shared", f"{_MIXER}.shared_experts", {"w1": "up_proj", "w2": "down_proj"}
)


def _w13_row(theirs: str | tuple[str, ...]) -> KeyMapping:
    """Return the row of the first matrices of experts, which have no gate."""
    transform = Permuted((0, 1, 2, 3), joined=1) if isinstance(theirs, str) else Stacked(2)
    return KeyMapping("layers.*.moe.experts.w13", theirs, transform)


def _expert_rows(config: NemotronHMoEModel.Config) -> tuple[KeyMapping, ...]:
    up = tuple(f"{_MIXER}.experts.{e}.up_proj.weight" for e in range(config.moe.n_experts))
    return _ROWS + replaced(expert_rows(config, folder="mixer"), *_SHARED_ROWS, _w13_row(up))


_DENSE = ModelType(
    architecture="NemotronHForCausalLM",
    config=NemotronHModel.Config,
    rows=_ROWS,
    keys={
        "layers_block_type": "layer_types",
        "layer_norm_epsilon": "norm_eps",
        "mlp_bias": "mlp_bias",
        "mamba_num_heads": "mamba.n_heads",
        "mamba_head_dim": "mamba.head_dim",
        "n_groups": "mamba.n_groups",
        "ssm_state_size": "mamba.state_dim",
        "conv_kernel": "mamba.conv_width",
        "use_conv_bias": "mamba.conv_bias",
        "use_bias": "mamba.bias",
        "time_step_min": "mamba.least_step",
    },
    fixed={
        **{"n_routed_experts": 0, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
        **{"attention_bias": False, "sliding_window": None, "residual_in_fp32": False},
        "tie_word_embeddings": False,
    },
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5},
        **{"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
        **{"time_step_min": 0.001, "max_position_embeddings": 4096},
    },
    ignored=(
        *("chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_latent_size"),
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group", "topk_group"),
        *("moe_shared_expert_overlap", "n_shared_experts", "norm_topk_prob"),
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_logits_to_keep"),
        *("num_experts_per_tok", "rescale_prenorm_residual", "routed_scaling_factor"),
        *("time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels"),
        *("num_hidden_layers", "hybrid_override_pattern", "hidden_dropout", "rms_norm_eps"),
    ),
    prepare=_prepare,
    write=_write,
)
_FUSED = replaced(fused_expert_rows(folder="mixer"), _w13_row(f"{_MIXER}.experts.up_proj"))
_MOE = replace(
    _DENSE,
    config=NemotronHMoEModel.Config,
    rows=_expert_rows,
    keys={
        **_DENSE.keys,
        "n_routed_experts": "moe.n_experts",
        "num_experts_per_tok": "moe.top_k",
        "moe_intermediate_size": "moe.ffn_dim",
        "moe_shared_expert_intermediate_size": "moe.shared_ffn_dim",
        **{
            name: f"moe.{name}"
            for name in ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
        },
    },
    values={"moe.scoring_func": "sigmoid", "moe.selection_bias": True},
    fixed={
        **{key: value for key, value in _DENSE.fixed.items() if key != "n_routed_experts"},
        "moe_latent_size": None,
    },
    defaults={
        **_DENSE.defaults,
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 7688},
        "moe_shared_expert_intermediate_size": 7688,
    },
)

FORMAT = dense_format(
    {"nemotron_h": _DENSE, "nemotron_h:n_routed_experts": _MOE},
    without=("mtp.",),
    renamed={"backbone.": "model."},
    class_rows={"nemotron_h:n_routed_experts": _FUSED},
)


_GGUF_ROWS = (
    *module_rows("layers.*", "blk.*", {"ffn_norm": "attn_norm"}),
    *module_rows("layers.*.feed_forward", "blk.*", {"w1": "ffn_up", "w2": "ffn_down"}),
    *module_rows("layers.*.moe.shared", "blk.*", {"w1": "ffn_up_shexp", "w2": "ffn_down_shexp"}),
    KeyMapping(
        "layers.*.moe.experts.w13",
        "blk.*.ffn_up_exps.weight",
        Permuted((0, 1, 2, 3), joined=1),
    ),
)


def _gguf_keys(config: NemotronHModel.Config) -> dict[str, object]:
    """Return the metadata of layers; a layer with a width of 0 and no heads is Mamba 2."""
    is_recurrent(config)
    if step := config.mamba.least_step:
        logger.warning(
            "llama.cpp does not raise steps of Mamba 2 to --model.mamba.least_step %s: numbers "
            "differ after tokens whose steps are shorter",
            step,
        )
    kinds = [config.type_of(index) for index in range(config.n_layers)]
    widths = [config.ffn_dim if kind in ("mlp", "moe") else 0 for kind in kinds]
    heads = [config.n_kv_heads if kind == "full_attention" else 0 for kind in kinds]
    return {
        **mamba_keys(config),
        "attention.layer_norm_epsilon": float(config.norm_eps),
        "attention.head_count_kv": heads,
        "feed_forward_length": widths,
    }


def _gguf_experts(config: NemotronHMoEModel.Config) -> dict[str, object]:
    kinds = [config.type_of(index) for index in range(config.n_layers)]
    fits = "moe" in kinds and "mlp" not in kinds
    require_gguf(fits, "layer_types", config.layer_types, "moe, and not mlp, with --model.moe")
    width = config.moe.shared_ffn_dim
    require_gguf(width is not None, "moe.shared_ffn_dim", width, "a network for every token")
    require_gguf(not config.mlp_bias, "mlp_bias", True, "False in a model with experts")
    return {**_gguf_keys(config), "expert_shared_count": 1}


_GGUF_CHOICES = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
_architecture = partial(
    Architecture, rows=lambda config: (*_GGUF_ROWS, *gguf_mamba_rows(config)), biased="qkvof"
)

GGUF = gguf_format(
    _architecture(name="nemotron_h", config=NemotronHModel.Config, keys=_gguf_keys),
    _architecture(
        name="nemotron_h_moe",
        config=NemotronHMoEModel.Config,
        keys=_gguf_experts,
        experts=Experts(
            {"selection_bias": True},
            chosen=("scoring_func", "shared_ffn_dim", *_GGUF_CHOICES),
        ),
    ),
)
