"""Experts in Hugging Face's format."""

from collections.abc import Sequence

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.common.moe.decoder import ExpertLayers
from torchtitan.protocols.state_dict_adapter import (
    Identity,
    KeyMapping,
    Permuted,
    Stacked,
    Transform,
)

_IDENTITY = Identity()


def selection_bias(name: str, transform: Transform = _IDENTITY) -> KeyMapping:
    """Return the row of a router's selection bias; `name` is the bias's place in a layer."""
    ours = "layers.*.moe.router.selection.bias_E"
    return KeyMapping(ours, f"model.layers.*.{name}", transform)


def expert_rows(
    config: ExpertLayers.Config,
    *,
    shared: str = "",
    folder: str = "mlp",
    names: Sequence[str] = ("gate_proj", "down_proj", "up_proj"),
) -> tuple[KeyMapping, ...]:
    """Return the rows of a router, of its experts, which have their own tensors in the file, and of
    a `shared` one."""
    gate, experts = f"model.layers.*.{folder}.gate", f"model.layers.*.{folder}.experts"
    w1, w2, w3 = names

    def stacked(*theirs: str) -> tuple[str, ...]:
        return tuple(
            f"{experts}.{e}.{name}.weight" for e in range(config.moe.n_experts) for name in theirs
        )

    return (
        *shared_rows(shared, folder),
        KeyMapping("layers.*.moe.router.weight", f"{gate}.weight"),
        selection_bias(f"{folder}.gate.e_score_correction_bias"),
        KeyMapping("layers.*.moe.experts.w13", stacked(w1, w3), Stacked(2)),
        KeyMapping("layers.*.moe.experts.w2", stacked(w2), Stacked()),
    )


def fused_expert_rows(
    router: str = "gate", order: tuple[int, ...] = (0, 1, 2, 3), folder: str = "mlp"
) -> tuple[KeyMapping, ...]:
    """Return the rows of a `router` and of experts with one tensor for all experts of a layer, as
    in the parameters of transformers 5, in the module `folder`. `order`: dimensions of `w13` there;
    1 and 2, which are neighbors, are one. Unless 3 is the last, the matrices are transposed, also
    of `w2`."""
    rows: Sequence[tuple[str, str, Transform]] = (
        ("router.weight", f"{router}.weight", Identity()),
        ("router.bias", f"{router}.bias", Identity()),
        (
            "experts.w13",
            "experts.gate_up_proj",
            Permuted(order, joined=min(order.index(1), order.index(2))),
        ),
        (
            "experts.bias13",
            "experts.gate_up_proj_bias",
            Permuted(tuple(d for d in order if d < 3), joined=1),
        ),
        ("experts.w2", "experts.down_proj", Identity() if order[-1] == 3 else Permuted((0, 2, 1))),
        ("experts.bias2", "experts.down_proj_bias", Identity()),
    )
    return tuple(
        KeyMapping(f"layers.*.moe.{ours}", f"model.layers.*.{folder}.{theirs}", x)
        for ours, theirs, x in rows
    )


def shared_rows(expert: str, folder: str = "mlp") -> tuple[KeyMapping, ...]:
    """Return the rows of a shared expert, and of its gate, in the module `folder`."""
    names = {
        "w1.weight": ".gate_proj",
        "w2.weight": ".down_proj",
        "w3.weight": ".up_proj",
        "gate": "_gate",
    }
    return tuple(
        KeyMapping(
            f"layers.*.moe.shared.{ours}", f"model.layers.*.{folder}.{expert}{theirs}.weight"
        )
        for ours, theirs in names.items()
    )


LOCAL_KEYS = {"num_local_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k"}
QWEN_KEYS = {"num_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k"}
"""`ModelType.keys` of experts, by the key of their number."""

SPARSE_KEYS = {"moe_intermediate_size": "moe.ffn_dim", "mlp_layer_types": "moe.layer_types"}
"""Further keys of models that also have dense layers."""

_SAME = (
    "n_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "scoring_func",
)
SIGMOID_KEYS = {
    "n_routed_experts": "moe.n_experts",
    "num_experts_per_tok": "moe.top_k",
    **SPARSE_KEYS,
}
SIGMOID_KEYS |= {name: f"moe.{name}" for name in _SAME}
"""Keys of DeepSeek-V3's experts."""


def prepare_dense_layers(
    document: dict[str, object], default: int = 1, key: str = "first_k_dense_replace"
) -> dict[str, object]:
    """Return a config.json with `mlp_layer_types` for the number of dense layers under a `key`, by
    `default` this one."""
    reader = ConfigReader("config.json", document)
    n_layers, n_dense = reader.n_layers(), reader.whole_number(key, default, least=0)
    return {
        **document,
        "mlp_layer_types": ["dense" if i < n_dense else "sparse" for i in range(n_layers)],
    }


def write_dense_layers(
    config: ExpertLayers.Config, key: str = "first_k_dense_replace"
) -> dict[str, object] | None:
    """Return the number of dense layers in config.json, under a `key`; None: it cannot describe a
    model with these layers."""
    sparse = [config.moe.is_sparse(index) for index in range(config.n_layers)]
    fits = config.moe.ffn_dim is not None and sparse == sorted(sparse)
    return {key: sparse.count(False)} if fits else None


def prepare_sparse_steps(document: dict[str, object]) -> dict[str, object]:
    """Return a config.json with `mlp_layer_types` for Qwen's keys about dense layers. Raise
    `UserError` for unusable ones."""
    reader = ConfigReader("config.json", document)
    n_layers, step = reader.n_layers(), reader.whole_number("decoder_sparse_step", 1)
    dense = document.get("mlp_only_layers") or []
    if not (
        isinstance(dense, list)
        and all(type(index) is int and 0 <= index < n_layers for index in dense)
    ):
        raise reader.wrong("mlp_only_layers", dense, "a list of numbers of layers")
    is_dense = [index in dense or (index + 1) % step != 0 for index in range(n_layers)]
    return {**document, "mlp_layer_types": ["dense" if dense else "sparse" for dense in is_dense]}


def write_sparse_steps(config: ExpertLayers.Config) -> dict[str, object]:
    """Return Qwen's keys for the dense layers of a model."""
    dense = [index for index in range(config.n_layers) if not config.moe.is_sparse(index)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
