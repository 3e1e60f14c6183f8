"""ERNIE 4.5 (yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), and its Hugging Face
format."""

from collections.abc import Sequence

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import NEIGHBORS, Architecture, Experts, gguf_format
from torchtitan.models.common.hugging_face import (
    DENSE_ROWS,
    ModelType,
    dense_format,
    interleaved,
    replaced,
)
from torchtitan.models.common.moe import rows
from torchtitan.models.common.moe.decoder import MoEDecoder
from torchtitan.protocols.state_dict_adapter import KeyMapping, Unsqueezed


class Ernie45Model(Decoder):
    """Llama's decoder."""


class Ernie45MoeModel(MoEDecoder):
    """The same with experts in most layers."""


def _bias(module: str) -> KeyMapping:
    return rows.selection_bias(f"{module}.moe_statics.e_score_correction_bias", Unsqueezed())


def _rows(config: Ernie45MoeModel.Config) -> list[KeyMapping]:
    experts = rows.expert_rows(config, shared="shared_experts")
    return interleaved((*DENSE_ROWS, *replaced(experts, _bias("mlp"))), config)


_PLACES = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _types(n_layers: int, start: int, end: int, interval: int) -> list[str]:
    sparse = [index for index in range(start, end + 1) if (index + 1) % interval == 0]
    return ["sparse" if index in sparse else "dense" for index in range(n_layers)]


def _prepare(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `mlp_layer_types` for its keys about layers with experts. Raise
    `UserError` for unusable keys."""
    defaults = dict(zip(_PLACES, (1, -1, 1), strict=True))
    reader = ConfigReader("config.json", {**defaults, **document})
    n_layers = reader.n_layers()
    start, end, interval = (
        reader.whole_number(key, least=least)
        for key, least in zip(_PLACES, (0, -1, 1), strict=True)
    )
    types = _types(n_layers, start, n_layers - 1 if end == -1 else min(end, n_layers - 1), interval)
    return {**document, "mlp_layer_types": types}


def _write(config: Ernie45MoeModel.Config) -> dict[str, object] | None:
    """Return the keys about layers with experts; None: they cannot describe the model."""
    n_layers = config.n_layers
    types = ["sparse" if config.moe.is_sparse(i) else "dense" for i in range(n_layers)]
    sparse: Sequence[int] = [i for i in range(n_layers) if types[i] == "sparse"]
    start, end = (sparse[0], sparse[-1]) if sparse else (n_layers, n_layers - 1)
    intervals = (n for n in range(1, n_layers + 1) if _types(n_layers, start, end, n) == types)
    interval = next(intervals, None)
    if interval is None or config.moe.ffn_dim is None:
        return None
    return dict(zip(_PLACES, (start, end, interval), strict=True))


_DENSE = ModelType(
    architecture="Ernie4_5ForCausalLM",
    config=Ernie45Model.Config,
    rows=lambda config: interleaved(DENSE_ROWS, config),
    fixed={"use_bias": False},
    defaults={
        **{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        **{"rope_theta": 500_000.0, "tie_word_embeddings": True},
    },
)
_EXPERTS = ModelType(
    architecture="Ernie4_5_MoeForCausalLM",
    config=Ernie45MoeModel.Config,
    rows=_rows,
    keys={
        **rows.SPARSE_KEYS,
        **{"moe_num_experts": "moe.n_experts", "moe_k": "moe.top_k"},
        "moe_num_shared_experts": "moe.n_shared_experts",
    },
    values={"moe.selection_bias": True},
    # The smallest sum of a token's weights, which are always larger.
    fixed={"use_bias": False, "moe_norm_min": 1e-12},
    defaults={
        **_DENSE.defaults,
        **{"num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536},
        **{"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2},
    },
    ignored=(*_PLACES, "moe_capacity", "moe_gate", "moe_use_aux_free"),
    prepare=_prepare,
    write=_write,
)

# Modules that predict further tokens are not read.
FORMAT = dense_format(
    {"ernie4_5": _DENSE, "ernie4_5_moe": _EXPERTS},
    without=("model.mtp_",),
    class_rows={"ernie4_5_moe": (*rows.fused_expert_rows(), _bias("mlp.gate"))},
)


def _gguf_keys(config: Ernie45MoeModel.Config) -> dict[str, object]:
    n_shared = config.moe.n_shared_experts
    shared = {"expert_shared_feed_forward_length": n_shared * config.expert_dim} if n_shared else {}
    return {"interleave_moe_layer_step": 1, **shared}


GGUF = gguf_format(
    Architecture(name="ernie4_5", config=Ernie45Model.Config, rotation=NEIGHBORS),
    Architecture(
        name="ernie4_5-moe",
        config=Ernie45MoeModel.Config,
        rotation=NEIGHBORS,
        experts=Experts(
            {"norm_topk_prob": True, "selection_bias": True, "shared_ffn_dim": None},
            chosen=("n_shared_experts", "layer_types"),
        ),
        keys=_gguf_keys,
    ),
)
