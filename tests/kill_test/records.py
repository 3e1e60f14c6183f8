"""Records and checkpoints of a run, and their comparison."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_EXACT = ("step", "lr", "n_tokens_seen")
_COMPUTED = ("loss", "grad_norm")
"""Metrics that depend on the order of floating-point sums."""

Line = dict[str, Any]
"""A line of metrics.jsonl, without timings."""

State = dict[str, Tensor | str]
"""Entries of a checkpoint by name, such as "model.tok_embeddings.weight": full tensors, and other
values as JSON strings, whose names are their digests."""


def read_lines(folder: Path) -> list[Line]:
    """Return the training lines of a run."""
    return [
        {key: line[key] for key in (*_EXACT, *_COMPUTED)}
        for line in _read_json(folder / "metrics.jsonl")
    ]


def read_ledger(folder: Path) -> list[int]:
    """Return the steps in the ledger of a run."""
    return [line["step"] for line in _read_json(folder / "ledger.jsonl")]


def _read_json(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without a partial last line."""
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return list(map(json.loads, whole))


def read_state(checkpoint: Path) -> State:
    """Read the entries of a checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    forms = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: State = {
        name: torch.empty(form.size, dtype=form.properties.dtype)
        if isinstance(form, TensorStorageMetadata)
        else ""
        for name, form in forms.items()
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return state


def without_ranks(state: State) -> State:
    """Return the entries that do not belong to a rank, and rank 0's position in the data; and the
    spike guard's values without recent losses, which other numbers of ranks sum in another order.
    `compare_lines` compares these."""
    other_ranks = re.compile(r"(?!dataloader\.rank0)\w+\.rank\d+\.|spikes\.")
    kept = {name: value for name, value in state.items() if not other_ranks.match(name)}
    for name, value in state.items():
        if name.startswith("spikes.") and isinstance(value, str):
            kept["spikes"] = json.dumps(
                {key: item for key, item in json.loads(value).items() if key != "recent"}
            )
    return kept


@dataclass(frozen=True, order=True)
class Difference:
    """The largest difference between two runs."""

    value: float = 0.0
    """Relative; 0 if bit-identical, infinite if an entry is missing or an exact value differs."""

    place: str = ""
    """Name of the entry or line; empty without a difference."""


def compare_lines(
    lines: Sequence[Line], expected: Sequence[Line], *, with_gaps: bool = False
) -> Difference:
    """Compare `lines` with the first lines of a full run or, with gaps, with its lines of the same
    steps."""
    if with_gaps:
        steps = {line["step"] for line in lines}
        expected = [line for line in expected if line["step"] in steps]
    if len(lines) > len(expected):
        return Difference(math.inf, f"{len(lines)} lines")
    pairs = zip(lines, expected, strict=False)
    differences = [_compare_line(*pair, number) for number, pair in enumerate(pairs, start=1)]
    return max(differences, key=lambda difference: difference.value, default=Difference())


def _compare_line(line: Line, expected: Line, number: int) -> Difference:
    values = {key: 0.0 if line[key] == expected[key] else math.inf for key in _EXACT}
    values |= {
        key: _relative(abs(line[key] - expected[key]), abs(expected[key])) for key in _COMPUTED
    }
    return _largest(values, f" of line {number}")


def compare_states(state: State, expected: State) -> Difference:
    """Compare two checkpoints; the difference of tensors is ‖Δ‖ / ‖w‖."""
    names = sorted({*state, *expected})
    return _largest({name: _compare_entry(state.get(name), expected.get(name)) for name in names})


def _largest(values: dict[str, float], suffix: str = "") -> Difference:
    name = max(values, key=lambda name: values[name])
    return Difference(values[name], f"{name}{suffix}") if values[name] > 0 else Difference()


def _compare_entry(value: Tensor | str | None, expected: Tensor | str | None) -> float:
    if not (isinstance(value, Tensor) and isinstance(expected, Tensor)):
        return 0.0 if value == expected else math.inf
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return math.inf
    if torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (value, expected))):
        return 0.0
    value, expected = value.double(), expected.double()
    difference = _relative((value - expected).norm().item(), expected.norm().item())
    return max(difference, math.ulp(0.0))  # 0.0 equals -0.0, but its bits differ


def _relative(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and math.isfinite(difference) else math.inf
