"""`torchtitan inspect`: what a checkpoint holds, and whether it is whole."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.model_options import add_module_option, given_package
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import print_error, visible

if TYPE_CHECKING:
    from types import ModuleType

    from torchtitan.components.checkpoint import CheckpointInfo
    from torchtitan.components.checkpoint.formats import Format
    from torchtitan.protocols.state_dict_adapter import TensorForm

States = Mapping[str, Mapping[str, "TensorForm"]]

_PICKLE = ".metadata"
"""The file that is not opened where it is known to be damaged."""

_DESCRIPTION = """Say what the checkpoint in the folder CHECKPOINT holds: format, step, tensors, types, sizes, whether
it is complete, and whether its digests are right. Of a folder that holds step-N folders (or a run's folder), list
these."""

_EPILOG = "exit code: 0 all is well, 3 something is damaged or incomplete, 2 there is no checkpoint"


@dataclass(frozen=True)
class _Findings:
    """What there is to say of one checkpoint."""

    facts: Mapping[str, str]
    states: States
    faults: Sequence[str]

    notes: Sequence[str]
    """Why its model cannot be used, as it is now, though nothing is wrong with the checkpoint."""


def inspect_checkpoint(args: Sequence[str]) -> int:
    """Print what the command line asks for; 0 when all is well, 3 for a checkpoint that is damaged or incomplete, 2
    where there is none."""
    options = _parse(args)
    try:
        return _inspect(options)
    except UserError as error:
        print_error("inspect", error)
        return 2


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchtitan inspect", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of a checkpoint, or of several")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: name, shape, type, bytes")
    parser.add_argument(
        "--no_verify",
        dest="verify",
        action="store_false",
        help="read no more than is needed, and compare no file with its digest",
    )
    add_module_option(parser)
    return parser.parse_args(args)


def _inspect(options: argparse.Namespace) -> int:
    from torchtitan.components.checkpoint import folders

    path: Path = options.checkpoint
    if not _is_checkpoint(path):
        if listed := folders.list_checkpoints(path) or folders.list_checkpoints(path / "checkpoint"):
            return _print_list(listed)
        if itself := [info for info in folders.list_checkpoints(path.parent) if info.path.name == path.name]:
            return _print_list(itself)
    findings = _examine(path, given_package(options), verify=options.verify)
    _print_findings(path, findings, tensors=options.tensors)
    return 3 if findings.faults else 0


def _is_checkpoint(path: Path) -> bool:
    from torchtitan.components.checkpoint import folders

    return folders.has_marker(path) or _format_in(path) is not None


def _format_in(path: Path) -> "Format | None":
    from torchtitan.components.checkpoint.formats import format_of

    try:
        return format_of(path)
    except UserError:
        return None


def _examine(path: Path, family: "ModuleType | None", *, verify: bool) -> _Findings:
    """Look at one checkpoint.

    Raises:
        UserError: where there is none; what is wrong with one is among the findings.
    """
    from torchtitan.components.checkpoint import folders
    from torchtitan.components.checkpoint.formats.find import FORMAT_NAMES
    from torchtitan.models.pretrained import checkpoint_format

    # A checkpoint with a marker may have lost the files that its format is known by.
    found = _format_in(path) if folders.has_marker(path) else checkpoint_format(path, family)
    faults: list[str] = []
    states: States = {}
    facts = {"format": FORMAT_NAMES[found] if found else "unknown"}
    facts |= _saved_by_a_run(path, found, faults, verify=verify)
    if not any(_PICKLE in fault for fault in faults):
        try:
            states = _read_states(path, found)
        except UserError as error:
            faults.append(str(error))
    if found in ("hf", "meta"):
        faults += _faulty_descriptions(path, found)
    facts.setdefault("complete", "no" if faults else "yes")
    files = [file for file in path.rglob("*") if file.is_file()]
    facts["size"] = f"{sum(file.stat().st_size for file in files):,} bytes in {len(files)} files"
    notes = [] if faults else _unusable(path, family)
    return _Findings(facts, states, faults, notes)


def _unusable(path: Path, family: "ModuleType | None") -> list[str]:
    """Why the model of a checkpoint in which no fault was found cannot be used, as `generate` and `convert` say it."""
    from torchtitan.components.checkpoint.assets import has_model_json, read_converters, read_simulation
    from torchtitan.models.pretrained import spec_of
    from torchtitan.protocols.conversion import described_converters

    if _format_in(path) == "dcp" and not has_model_json(path):  # of another program: it has no more to say
        return []
    try:
        spec_of(path, family)
        described_converters([*read_converters(path), *read_simulation(path)], str(path))
    except UserError as error:
        return [str(error)]
    return []


def _read_states(path: Path, found: "Format | None") -> States:
    if found == "dcp":
        from torchtitan.components.checkpoint.formats.dcp import state_forms

        return state_forms(path)
    from torchtitan.components.checkpoint.formats import open_source

    return {"model": open_source(path).forms}


def _faulty_descriptions(path: Path, found: str) -> list[str]:
    """What is wrong with the files that describe model and tokenizer, as far as it shows without using them."""
    from torchtitan.components.checkpoint.assets import FILES
    from torchtitan.models.pretrained import DESCRIPTIONS

    model = DESCRIPTIONS[found]
    faults = [] if (path / model).is_file() else [f"there is no {model}, which says what model it holds"]
    for name in (model, *(name for name in FILES if name.endswith(".json"))):
        try:
            read_object(path / name)
        except UserError as error:
            faults.append(str(error))
    return faults


def _saved_by_a_run(path: Path, found: "Format | None", faults: list[str], *, verify: bool) -> dict[str, str]:
    """What marker and manifest say; what is wrong with them is added to `faults`."""
    from torchtitan.components.checkpoint import folders
    from torchtitan.components.checkpoint.assets import read_converters

    if not folders.has_marker(path):
        if found == "dcp":
            faults.append("it is not complete: there is no marker (complete.json), so its save was cut short")
        return {"digests": "there is no manifest"}
    try:
        info = folders.open_checkpoint(path)
    except UserError:
        faults += folders.verify(path)  # ends at the marker
        return {"complete": "no"}
    assert info.marker is not None, "it was opened"
    facts = {"step": str(info.marker.step), "kind": info.marker.kind, "torch": info.marker.torch_version}
    try:
        if converters := read_converters(path):
            facts["converters"] = ", ".join(str(converter.get("class")) for converter in converters)
    except UserError as error:
        faults.append(str(error))
    if info.frozen_from:
        facts["left out"] = f"weights that are not trained: those of {info.frozen_from}"
    if info.validation_loss is not None:
        facts["validation loss"] = f"{info.validation_loss:.6g}"
    facts |= {"complete": "yes", "digests": "not compared"}
    if verify:
        wrong = folders.verify(path)
        faults += wrong
        facts["digests"] = f"wrong: {'; '.join(wrong)}" if wrong else "verified"
    return facts


def _print_findings(path: Path, findings: _Findings, *, tensors: bool) -> None:
    print(visible(str(path)))
    for name, value in (*findings.facts.items(), *((name, _summary(of)) for name, of in findings.states.items())):
        print(visible(f"  {name:<17}{value}"))
    if tensors:
        _print_table(
            ("tensor", "shape", "type", "bytes"),
            [
                (f"{state}: {name}" if len(findings.states) > 1 else name, *_described(forms[name]))
                for state, forms in findings.states.items()
                for name in sorted(forms)
            ],
        )
    for fault in (*findings.faults, *findings.notes):
        print_error("inspect", fault)


def _summary(forms: "Mapping[str, TensorForm]") -> str:
    """One line for a state: how many tensors, values and bytes, and of which types."""
    if not forms:
        return "no tensors"
    types: dict[str, int] = {}
    for form in forms.values():
        types[_dtype_name(form)] = types.get(_dtype_name(form), 0) + 1
    values = sum(form.shape.numel() for form in forms.values())
    n_bytes = sum(form.n_bytes for form in forms.values())
    counts = ", ".join(f"{dtype} ({count})" for dtype, count in sorted(types.items(), key=lambda item: -item[1]))
    return f"{len(forms)} tensors, {values:,} values, {n_bytes:,} bytes: {counts}"


def _described(form: "TensorForm") -> tuple[str, str, str]:
    return " x ".join(map(str, form.shape)) or "scalar", _dtype_name(form), f"{form.n_bytes:,}"


def _dtype_name(form: "TensorForm") -> str:
    return str(form.dtype).removeprefix("torch.")


def _print_list(checkpoints: "Sequence[CheckpointInfo]") -> int:
    from torchtitan.components.checkpoint import folders

    best = folders.best(checkpoints)
    rows = []
    for info in checkpoints:
        loss = "" if info.validation_loss is None else f"{info.validation_loss:.6g}{' (best)' if info is best else ''}"
        state = "damaged" if info.damage else "complete" if info.complete else "incomplete"
        rows.append(
            (str(info.path), str(info.step), info.kind or "", state, loss, f"{sum(info.path.files().values()):,}")
        )
    _print_table(("checkpoint", "step", "kind", "state", "validation loss", "bytes"), rows)
    for info in checkpoints:
        if wrong := info.damage or info.fault:
            print_error("inspect", f"{info.path}: {wrong}")
    return 0 if all(info.complete and not info.damage for info in checkpoints) else 3


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    table.columns[-1].justify = "right"
    for row in rows:
        table.add_row(*map(visible, row))
    # Where nobody looks, no line is broken.
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False).print(table)
