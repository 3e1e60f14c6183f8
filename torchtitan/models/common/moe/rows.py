"""Experts in Hugging Face's format, and the sharding plan of models with experts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.protocols import ShardingPlan
from torchtitan.protocols.state_dict_adapter import Identity, KeyMapping, Permuted, Stacked, Transform

MOE_SHARDING = ShardingPlan(
    tensor={**DENSE_SHARDING.tensor, "layers.*.moe": "local tokens"},
    attention=DENSE_SHARDING.attention,
)
"""Plan of decoders with experts in some layers. Tensor parallelism splits attention and dense networks; its ranks have
whole experts, for their own part of the tokens."""

_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expert_rows(
    dense: Sequence[KeyMapping], *, shared: str = "", folder: str = "mlp", names: Mapping[str, str] = _NAMES
) -> Callable[[Any], Sequence[KeyMapping]]:
    """Return `ModelType.rows`: `dense` rows, and the rows of a router, of its experts, each of which has its own
    tensors in the file, and of a `shared` expert."""
    gate, experts = f"model.layers.*.{folder}.gate", f"model.layers.*.{folder}.experts"

    def rows(config: Any) -> Sequence[KeyMapping]:
        def stacked(*theirs: str) -> tuple[str, ...]:
            return tuple(f"{experts}.{e}.{names[w]}.weight" for e in range(config.moe.n_experts) for w in theirs)

        return (
            *dense,
            *shared_rows(shared),
            KeyMapping("layers.*.moe.router.weight", f"{gate}.weight"),
            KeyMapping("layers.*.moe.router.selection.bias_E", f"{gate}.e_score_correction_bias"),
            KeyMapping("layers.*.moe.experts.w13", stacked("w1", "w3"), Stacked(0, n_dims=2)),
            KeyMapping("layers.*.moe.experts.w2", stacked("w2"), Stacked(0)),
        )

    return rows


FUSED_EXPERT_ROWS: Sequence[KeyMapping] = (
    KeyMapping("layers.*.moe.router.weight", "model.layers.*.mlp.gate.weight"),
    KeyMapping("layers.*.moe.experts.w13", "model.layers.*.mlp.experts.gate_up_proj", Permuted((0, 1, 2, 3), joined=1)),
    KeyMapping("layers.*.moe.experts.w2", "model.layers.*.mlp.experts.down_proj"),
)
"""The same with all experts of a layer in one tensor, as in the parameters of transformers 5."""

EXPERT_TENSORS = tuple(row.internal for row in FUSED_EXPERT_ROWS)


def transposed_expert_rows(order: tuple[int, ...]) -> tuple[KeyMapping, ...]:
    """Return the rows of a router and of experts whose fused tensors are transposed: `w13` with dimensions in another
    `order`, of which the last two are one."""
    gate_up, bias, others = Permuted(order, joined=2), Permuted((0, 2, 1), joined=1), Permuted((0, 2, 1))
    names: dict[str, tuple[str, Transform]] = {"w13": ("gate_up_proj", gate_up), "bias13": ("gate_up_proj_bias", bias)}
    names |= {"w2": ("down_proj", others), "bias2": ("down_proj_bias", Identity())}
    rows = {f"experts.{name}": (f"experts.{theirs}", transform) for name, (theirs, transform) in names.items()}
    rows |= {name: (name, Identity()) for name in ("router.weight", "router.bias")}
    return tuple(KeyMapping(f"layers.*.moe.{o}", f"model.layers.*.mlp.{t}", x) for o, (t, x) in rows.items())


def shared_rows(theirs: str) -> tuple[KeyMapping, ...]:
    """Return the rows of a shared expert, and of its gate."""
    names = {**{f"{w}.weight": f".{name}" for w, name in _NAMES.items()}, "gate": "_gate"}
    return tuple(
        KeyMapping(f"layers.*.moe.shared.{ours}", f"model.layers.*.mlp.{theirs}{name}.weight")
        for ours, name in names.items()
    )


_SAME = ("n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "scoring_func")
SIGMOID_KEYS = {
    **{"n_routed_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k", "moe_intermediate_size": "moe.ffn_dim"},
    **{"mlp_layer_types": "moe.layer_types", **{name: f"moe.{name}" for name in _SAME}},
}
"""Key of config.json → field of `SigmoidMoEConfig`."""


def prepare_dense_layers(document: dict[str, Any], default: int = 1) -> dict[str, Any]:
    """Return a config.json with `mlp_layer_types` for the number of dense layers, by `default` this one."""
    reader = ConfigReader("config.json", {"first_k_dense_replace": default, **document})
    n_layers, first = reader.n_layers(), reader.values["first_k_dense_replace"]
    n_dense = first if first == 0 else min(n_layers, reader.whole_number("first_k_dense_replace"))
    others = {key: value for key, value in document.items() if key != "first_k_dense_replace"}
    return {**others, "mlp_layer_types": ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense)}


def write_dense_layers(config: Any, score: str = "sigmoid") -> dict[str, Any] | None:
    """Return the number of dense layers in config.json; None: it cannot describe a model with these layers."""
    moe, sparse = config.moe, [config.moe.is_sparse(index) for index in range(config.n_layers)]
    fits = moe.ffn_dim is not None and moe.scoring_func == score
    return {"first_k_dense_replace": sparse.count(False)} if fits and sparse == sorted(sparse) else None
