"""Experts in Hugging Face's format."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.protocols.state_dict_adapter import Identity, KeyMapping, Permuted, Stacked, Transform

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
            KeyMapping("layers.*.moe.experts.w13", stacked("w1", "w3"), Stacked(2)),
            KeyMapping("layers.*.moe.experts.w2", stacked("w2"), Stacked()),
        )

    return rows


FUSED_EXPERT_ROWS: Sequence[KeyMapping] = (
    KeyMapping("layers.*.moe.router.weight", "model.layers.*.mlp.gate.weight"),
    KeyMapping("layers.*.moe.experts.w13", "model.layers.*.mlp.experts.gate_up_proj", Permuted((0, 1, 2, 3), joined=1)),
    KeyMapping("layers.*.moe.experts.w2", "model.layers.*.mlp.experts.down_proj"),
)
"""The same with all experts of a layer in one tensor, as in the parameters of transformers 5."""


def transposed_expert_rows(order: tuple[int, ...]) -> tuple[KeyMapping, ...]:
    """Return the rows of a router and of experts whose fused tensors are transposed: `w13` with dimensions in another
    `order`, of which the last two are one."""
    rows: Sequence[tuple[str, str, Transform]] = (
        ("router.weight", "router.weight", Identity()),
        ("router.bias", "router.bias", Identity()),
        ("experts.w13", "experts.gate_up_proj", Permuted(order, joined=2)),
        ("experts.bias13", "experts.gate_up_proj_bias", Permuted((0, 2, 1), joined=1)),
        ("experts.w2", "experts.down_proj", Permuted((0, 2, 1))),
        ("experts.bias2", "experts.down_proj_bias", Identity()),
    )
    return tuple(KeyMapping(f"layers.*.moe.{ours}", f"model.layers.*.mlp.{theirs}", x) for ours, theirs, x in rows)


def shared_rows(theirs: str) -> tuple[KeyMapping, ...]:
    """Return the rows of a shared expert, and of its gate."""
    names = {**{f"{w}.weight": f".{name}" for w, name in _NAMES.items()}, "gate": "_gate"}
    return tuple(
        KeyMapping(f"layers.*.moe.shared.{ours}", f"model.layers.*.mlp.{theirs}{name}.weight")
        for ours, name in names.items()
    )


def expert_keys(number: str, **others: str) -> dict[str, str]:
    """Return `ModelType.keys` of experts: the key of their `number`, and `others` → field of the `MoEConfig`."""
    fields = {number: "n_experts", "num_experts_per_tok": "top_k", **others}
    return {key: f"moe.{field}" for key, field in fields.items()}


_SAME = ("n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "scoring_func")
SPARSE = {"moe_intermediate_size": "ffn_dim", "mlp_layer_types": "layer_types"}
SIGMOID_KEYS = expert_keys("n_routed_experts", **SPARSE, **{name: name for name in _SAME})
"""Key of config.json → field of the `MoEConfig` (DeepSeek-V3)."""


def prepare_dense_layers(document: dict[str, Any], default: int = 1) -> dict[str, Any]:
    """Return a config.json with `mlp_layer_types` for the number of dense layers, by `default` this one."""
    reader = ConfigReader("config.json", document)
    n_layers, n_dense = reader.n_layers(), reader.whole_number("first_k_dense_replace", default, least=0)
    return {**document, "mlp_layer_types": ["dense" if i < n_dense else "sparse" for i in range(n_layers)]}


def write_dense_layers(config: Any) -> dict[str, Any] | None:
    """Return the number of dense layers in config.json; None: it cannot describe a model with these layers."""
    sparse = [config.moe.is_sparse(index) for index in range(config.n_layers)]
    fits = config.moe.ffn_dim is not None and sparse == sorted(sparse)
    return {"first_k_dense_replace": sparse.count(False)} if fits else None
