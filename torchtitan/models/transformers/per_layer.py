"""The fields of a config.json that differ by layer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

_LAYERS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|((num_)?(encoder|decoder)_)?layers|.*depth|num_blocks"
)
_FIRST_LAYERS = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "max_window_layers",
)
_PERIODS = re.compile(r".*(period|interval|every_n_layers)")


@dataclass(frozen=True)
class PerLayer:
    """The fields of a description, or of a part of it, that count, list or describe layers."""

    n_layers: int
    """0: it counts no layers."""
    counts: dict[str, int]
    """Numbers of layers."""
    lists: dict[str, list[object]]
    """Lists with an item for each layer."""
    chosen: dict[str, list[int]]
    """Lists of numbers of layers."""
    starts: dict[str, int]
    """Numbers of layers at the beginning."""
    periods: list[int]
    n_shared: int
    """Layers at the end that share what others compute."""
    overrides: dict[int, object]
    """Fields of single layers."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        counts = {
            name: n
            for name, n in values.items()
            if _LAYERS.fullmatch(name) and type(n) is int and n > 0
        }
        n = counts.get("num_hidden_layers") or max(
            counts.values(), default=len(values.get("layers_block_type") or ())
        )
        lists = {
            name: list(v) for name, v in values.items() if isinstance(v, (list, tuple)) and v and n
        }
        named = {name: v for name, v in lists.items() if re.search("layer|_idx|_index|_ids", name)}
        chosen = {name: v for name, v in named.items() if _are_layers(v, n)}
        extra = values.get("num_nextn_predict_layers") or 0
        # of two layers by its name only: two numbers may also be bounds, or factors
        per_layer = {
            name: v
            for name, v in (lists if n > 2 else named).items()
            if n <= len(v) <= n + extra and name not in chosen
        }
        periods = [
            v
            for name, v in values.items()
            if _PERIODS.fullmatch(name) and type(v) is int and not per_layer
        ]
        periods += [len(lists[name]) for name in lists.keys() & {"block_types"}]
        return cls(
            n,
            counts,
            per_layer,
            chosen,
            {name: values[name] for name in _FIRST_LAYERS if type(values.get(name)) is int},
            periods,
            values.get("num_kv_shared_layers") or 0,
            {int(i): v for i, v in (values.get("per_layer_config") or {}).items()},
        )

    def kinds(self) -> list[str]:
        """Return the kind of each layer: its fields."""
        first_shared = self.n_layers - self.n_shared
        kinds = []
        for i in range(self.n_layers):
            kind = [v[i] for v in self.lists.values()]
            kind += [i in v for v in self.chosen.values()]
            kind += [i % p for p in self.periods]
            kind += [i < v for v in (*self.starts.values(), first_shared)]
            kind.append(self.overrides.get(i))
            kinds.append(repr(kind))
        return kinds

    def one_of_each_kind(self) -> list[int]:
        """Return the first layer of each kind, in order, and at least two layers."""
        kinds: dict[str, list[int]] = {}
        for i, kind in enumerate(self.kinds()):
            kinds.setdefault(kind, []).append(i)
        kept = []
        for name, layers in kinds.items():
            # Two layers called hybrid stay, since they share weights.
            n_kept = 2 if "hybrid" in name or len(kinds) == 1 else 1
            kept += layers[:n_kept]
        return sorted(kept)

    @property
    def names(self) -> set[str]:
        """Names of the fields that `keep` changes and a configuration must keep as they are."""
        return {*self.counts, *self.lists, *self.chosen, *self.starts}

    def keep(self, values: dict[str, Any], kept: Sequence[int]) -> None:
        """Keep some layers in `values`. Counts other than the number of layers become 2 at most."""
        first_shared = self.n_layers - self.n_shared
        values.update(
            {
                name: len(kept) if v == self.n_layers else min(v, 2)
                for name, v in self.counts.items()
            }
        )
        values.update({name: [v[i] for i in kept] for name, v in self.lists.items()})
        values.update(
            {name: [new for new, i in enumerate(kept) if i in v] for name, v in self.chosen.items()}
        )
        values.update({name: sum(i < v for i in kept) for name, v in self.starts.items()})
        if self.n_shared:
            values["num_kv_shared_layers"] = sum(i >= first_shared for i in kept)
        if self.overrides:
            values["per_layer_config"] = {
                str(new): self.overrides[i] for new, i in enumerate(kept) if i in self.overrides
            }
        if "attention_types" in values:  # GPT-Neo lists its kinds of layers a second time
            values["attention_types"] = [[values["attention_layers"], 1]]


def _are_layers(items: list[object], n_layers: int) -> TypeGuard[list[int]]:
    """Return whether a list names layers, in order."""
    numbers = [i for i in items if type(i) is int and i < n_layers]
    return len(numbers) == len(items) and numbers == sorted(set(numbers))
