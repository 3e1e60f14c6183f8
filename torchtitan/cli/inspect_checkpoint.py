"""`torchtitan inspect`: show the contents of a checkpoint, and whether it is intact."""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.model_options import add_module_option, import_given_package, run_command
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import presentable, print_error
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from types import ModuleType

    from torchtitan.components.checkpoint import CheckpointInfo
    from torchtitan.components.checkpoint.manifest import Criterion
    from torchtitan.components.weights import Format
    from torchtitan.protocols.tensor_source import TensorSpec

States = Mapping[str, Mapping[str, "TensorSpec"]]

_PICKLE = ".metadata"
"""File that is not opened if it is known to be damaged."""

_DESCRIPTION = """Show the contents of the checkpoint in the folder CHECKPOINT: format, step,
tensors, types, sizes, whether it is complete, and whether its digests match. For a folder of
step-N folders, or a run's folder, list the checkpoints."""

_EPILOG = "exit code: 0 intact, 3 damaged or incomplete, 2 no checkpoint found"


def inspect_checkpoint(args: Sequence[str]) -> int:
    """Inspect the named checkpoint. Return 0 if it is intact, 3 if it is damaged or incomplete, 2
    without one."""
    parser = Parser(prog="torchtitan inspect", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="folder of a checkpoint, or of several"
    )
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor: name, shape, type, bytes"
    )
    parser.add_argument(
        "--no_verify",
        dest="verify",
        action="store_false",
        help="do not verify digests, and read as little as possible",
    )
    add_module_option(parser)
    options = parser.parse_args(args)
    return run_command("inspect", lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    from torchtitan.components.checkpoint import catalog
    from torchtitan.components.checkpoint.formats import check_checkpoint

    path: Path = options.checkpoint
    if not catalog.has_marker(path) and _format_in(path) is None:
        if listed := catalog.list_checkpoints(path) or catalog.list_checkpoints(
            path / "checkpoint"
        ):
            return _print_list(listed)
        if itself := [
            info for info in catalog.list_checkpoints(path.parent) if info.path.name == path.name
        ]:
            return _print_list(itself)
        check_checkpoint(path)
    family = import_given_package(options)
    facts, states, faults = _examine(path, family, verify=options.verify)
    _print_findings(path, facts, states, tensors=options.tensors)
    for fault in dict.fromkeys(faults or _unusable(path, family)):  # two readers may find one
        print_error("inspect", fault)
    return 3 if faults else 0


def _format_in(path: Path) -> "Format | None":
    from torchtitan.components.checkpoint.formats import format_of

    try:
        return format_of(path)
    except UserError:
        return None


def _examine(
    path: Path, family: "ModuleType | None", *, verify: bool
) -> tuple[dict[str, str], States, list[str]]:
    from torchtitan.components.checkpoint import catalog
    from torchtitan.components.checkpoint.dcp import state_tensor_specs
    from torchtitan.components.checkpoint.formats import FORMAT_NAMES
    from torchtitan.components.weights import open_source
    from torchtitan.components.weights.dequantize import DequantizedSource
    from torchtitan.models.pretrained import checkpoint_format

    # A checkpoint with a marker may have lost the files that identify its format.
    found = _format_in(path) if catalog.has_marker(path) else checkpoint_format(path, family)
    faults: list[str] = []
    states: States = {}
    facts = {"format": FORMAT_NAMES[found] if found else "unknown"}
    facts |= _saved_by_a_run(path, found, faults, verify=verify)
    if not any(_PICKLE in fault for fault in faults):
        try:
            if found == "dcp":
                states = state_tensor_specs(path)
            else:
                source = open_source(path)
                states = {"model": source.specs}
                if isinstance(source, DequantizedSource) and source.types:
                    types = [str(dtype).removeprefix("torch.") for dtype in source.types]
                    facts["quantized"] = f"{source.method}, read as {' and '.join(types)}"
        except UserError as error:
            faults.append(str(error))
    if found in ("hf", "meta"):
        faults += _faulty_descriptions(path, found)
    facts.setdefault("complete", "no" if faults else "yes")
    files = [file for file in path.rglob("*") if file.is_file()]
    facts["size"] = f"{sum(file.stat().st_size for file in files):,} bytes in {len(files)} files"
    return facts, states, faults


def _unusable(path: Path, family: "ModuleType | None") -> list[str]:
    """Return the errors that `generate` and `convert` would raise for an undamaged checkpoint."""
    from torchtitan.components.weights.assets import DESCRIPTION, read_converters
    from torchtitan.models.pretrained import spec_of
    from torchtitan.protocols.conversion import converters_from_records

    if _format_in(path) == "dcp" and not (path / DESCRIPTION).is_file():  # saved by another program
        return []
    try:
        spec_of(path, family)
        converters_from_records(
            [*read_converters(path), *read_converters(path, "simulated")], str(path)
        )
    except UserError as error:
        return [str(error)]
    return []


def _faulty_descriptions(path: Path, found: str) -> list[str]:
    """Return errors in the files that describe the model and the tokenizer, found without using the
    files."""
    from torchtitan.components.weights.assets import FILES
    from torchtitan.models.pretrained import DESCRIPTIONS

    model = DESCRIPTIONS[found]
    faults = [] if (path / model).is_file() else [f"{model}, which describes the model, is missing"]
    for name in (model, *(name for name in FILES if name.endswith(".json"))):
        try:
            read_object(path / name)
        except UserError as error:
            faults.append(str(error))
    return faults


def _saved_by_a_run(
    path: Path, found: "Format | None", faults: list[str], *, verify: bool
) -> dict[str, str]:
    """Return facts from the marker and the manifest; add their faults to `faults`."""
    from torchtitan.components.checkpoint import catalog
    from torchtitan.components.weights.assets import read_converters

    if not catalog.has_marker(path):
        if found == "dcp":
            faults.append(
                "it is incomplete: the marker (complete.json) is missing, so the save did not "
                "finish"
            )
        return {"digests": "no manifest"}
    try:
        info = catalog.open_checkpoint(path)
    except UserError:
        faults += catalog.verify(path)  # ends at the marker
        return {"complete": "no"}
    assert info.marker is not None, "it was opened"
    facts = {
        "step": str(info.marker.step),
        "kind": info.marker.kind,
        "torch": info.marker.torch_version,
    }
    try:
        if converters := read_converters(path):
            facts["converters"] = ", ".join(str(converter.get("class")) for converter in converters)
    except UserError as error:
        faults.append(str(error))
    if info.base_model:
        facts["not included"] = f"frozen weights, from {info.base_model}"
    if info.validation_loss is not None:
        facts["validation loss"] = f"{info.validation_loss:.6g}"
    facts |= {"complete": "yes", "digests": "not verified"}
    if verify:
        wrong = catalog.verify(path)
        faults += wrong
        facts["digests"] = f"wrong: {'; '.join(wrong)}" if wrong else "verified"
    return facts


def _print_findings(path: Path, facts: Mapping[str, str], states: States, *, tensors: bool) -> None:
    print(presentable(str(path)))
    for name, value in (*facts.items(), *((name, _summary(of)) for name, of in states.items())):
        print(presentable(f"  {name:<17}{value}"))
    if tensors:
        _print_table(
            ("tensor", "shape", "type", "bytes"),
            [
                (
                    f"{state}: {name}" if len(states) > 1 else name,
                    " x ".join(map(str, specs[name].shape)) or "scalar",
                    _dtype_name(specs[name]),
                    f"{specs[name].n_bytes:,}",
                )
                for state, specs in states.items()
                for name in sorted(specs)
            ],
        )


def _summary(specs: "Mapping[str, TensorSpec]") -> str:
    if not specs:
        return "no tensors"
    types = Counter(map(_dtype_name, specs.values()))
    values = sum(spec.shape.numel() for spec in specs.values())
    n_bytes = sum(spec.n_bytes for spec in specs.values())
    counts = ", ".join(f"{dtype} ({count})" for dtype, count in types.most_common())
    return f"{len(specs)} tensors, {values:,} values, {n_bytes:,} bytes: {counts}"


def _dtype_name(spec: "TensorSpec") -> str:
    return str(spec.dtype).removeprefix("torch.")


def _print_list(checkpoints: "Sequence[CheckpointInfo]") -> int:
    from torchtitan.components.checkpoint import catalog
    from torchtitan.components.checkpoint.manifest import VALIDATION_LOSS, Criterion

    markers = [info.marker for info in checkpoints if info.marker]
    criterion = markers[-1].criterion if markers else Criterion()
    best = catalog.best(checkpoints, criterion)
    others = () if criterion.metric == VALIDATION_LOSS else (criterion.metric,)
    rows = []
    for info in checkpoints:
        loss = "" if info.validation_loss is None else f"{info.validation_loss:.6g}"
        mark = "(best)" if info is best else ""
        numbers = [loss, _best_value(info, criterion)] if others else [loss]
        measured = [*numbers[:-1], f"{numbers[-1]} {mark}".strip()]
        n_bytes = f"{sum(info.path.files().values()):,}"
        rows.append(
            (str(info.path), str(info.step), info.kind or "", _state(info), *measured, n_bytes)
        )
    columns = ("checkpoint", "step", "kind", "state", "validation loss", *others, "bytes")
    _print_table(columns, rows)
    for info in checkpoints:
        if wrong := info.damage or info.fault:
            print_error("inspect", f"{info.path}: {wrong}")
    return 0 if all(info.is_complete and not info.damage for info in checkpoints) else 3


def _best_value(info: "CheckpointInfo", criterion: "Criterion") -> str:
    marker = info.marker
    if marker is None or marker.best_metric != criterion.metric or marker.best_value is None:
        return ""
    return f"{marker.best_value:.6g}"


def _state(info: "CheckpointInfo") -> str:
    if info.damage:
        return "damaged"
    return "complete" if info.is_complete else "incomplete"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from torchtitan.tools.tables import open_console, print_table

    console = open_console(file_width=1000)  # so that each row is a line
    print_table(console, "", columns, rows, numbers=("bytes",), has_lines=False)
