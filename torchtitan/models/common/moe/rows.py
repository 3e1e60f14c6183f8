"""Names of experts' weights in Hugging Face's files, and the sharding plan of models with experts."""

from collections.abc import Sequence

from torchtitan.models.common.decoder import DENSE_SHARDING
from torchtitan.protocols import ShardingPlan
from torchtitan.protocols.state_dict_adapter import Flattened, KeyMapping, Stacked

MOE_SHARDING = ShardingPlan(
    tensor={**DENSE_SHARDING.tensor, "layers.*.moe": "local tokens"},
    attention=DENSE_SHARDING.attention,
    row_sums="layers.*.moe.router.penalties.*.row_sums",
)
"""Plan of decoders with experts in some layers. Tensor parallelism splits attention and dense networks; its ranks have
whole experts, for their own part of the tokens."""

_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expert_rows(
    n_experts: int, folder: str = "mlp", names: dict[str, str] = _NAMES, gate: str = "gate"
) -> tuple[KeyMapping, ...]:
    """Return the rows of a router and its experts, each of which has its own tensors in the file."""

    def row(ours: str, *theirs: str) -> KeyMapping:
        folders = [f"model.layers.*.{folder}.experts.{expert}" for expert in range(n_experts)]
        each = tuple(f"{expert}.{name}.weight" for expert in folders for name in theirs)
        return KeyMapping(f"layers.*.moe.experts.{ours}", each, Stacked(0, n_dims=len(theirs)))

    router = KeyMapping("layers.*.moe.router.weight", f"model.layers.*.{folder}.{gate}.weight")
    return (router, row("w13", names["w1"], names["w3"]), row("w2", names["w2"]))


FUSED_EXPERT_ROWS: Sequence[KeyMapping] = (
    KeyMapping("layers.*.moe.router.weight", "model.layers.*.mlp.gate.weight"),
    KeyMapping("layers.*.moe.experts.w13", "model.layers.*.mlp.experts.gate_up_proj", Flattened(1)),
    KeyMapping("layers.*.moe.experts.w2", "model.layers.*.mlp.experts.down_proj"),
)
"""The same with all experts of a layer in one tensor, as in the parameters of transformers 5."""

EXPERT_TENSORS = tuple(row.internal for row in FUSED_EXPERT_ROWS)

SELECTION_ROW = KeyMapping("layers.*.moe.router.selection.bias_E", "model.layers.*.mlp.gate.e_score_correction_bias")
"""The selection bias."""


def shared_rows(theirs: str, ours: str = "layers.*.moe.shared") -> tuple[KeyMapping, ...]:
    """Return the rows of a shared expert."""
    return tuple(
        KeyMapping(f"{ours}.{w}.weight", f"model.layers.*.mlp.{theirs}.{name}.weight") for w, name in _NAMES.items()
    )
