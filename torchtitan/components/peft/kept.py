"""Weights that a folder holds in few bits, and that a run keeps so."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from torchtitan.components.checkpoint.formats import PICKLED, SAFETENSORS
from torchtitan.components.weights.assets import read_converters
from torchtitan.components.weights.dequantize import read_method
from torchtitan.components.weights.few_bits import FewBits
from torchtitan.components.weights.pretrained import internal_source, is_as_saved
from torchtitan.components.weights.sources import format_of, formats_in
from torchtitan.protocols import ModelSpec
from torchtitan.protocols.conversion import converters_from_records
from torchtitan.protocols.converter import HEAD, ModelConverter
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.errors import UserError, summarize_names
from torchtitan.tools.files import is_url
from torchtitan.tools.patterns import without_numbers


class FewBitsOfFolder(NamedTuple):
    """Weights of a folder in few bits, with `*` for the numbers of layers that have the same."""

    forms: list[str]
    """Linear layers and experts, as NAME=FORM."""
    dequantized: list[str]
    """Other weights in few bits, which are dequantized."""


def find_forms(path: str, spec: ModelSpec, added: range, option: str) -> FewBitsOfFolder:
    """Return the layers and weights that the folder `path` holds in few bits. Raise `UserError` for
    layers that cannot be kept as they are, and if config.json names a quantization without the
    weights next to it, whose files say which layers have it.

    Args:
        path: `--checkpoint.initial_load_path`. Nothing is found in a folder without
            Hugging Face's weights, or without a quantization in config.json.
        spec: the model.
        added: ids of tokens added to the tokenizer.
        option: prefix of the converter's options.
    """
    if not _is_folder(path) or not read_method(Path(path))[0] or format_of(path) != "hf":
        return FewBitsOfFolder([], [])
    source = internal_source(path, spec, added=added)
    with torch.device("meta"):
        model = spec.model.build()
    layers = dict(_weights_of(model))
    if refused := sorted(layers.keys() & source.reasons.keys()):
        first = refused[0]
        raise UserError(
            f"{option}.base keep: {path} holds {summarize_names(refused)} in few bits that cannot "
            f"be kept ({first}: {source.reasons[first]}); set {option}.base nf4, which quantizes "
            "the dequantized weights again, or use LoRA, which trains on the dequantized weights"
        )
    in_few_bits = source.forms.keys() | source.reasons.keys()
    forms = _in_common({layer: source.forms.get(name, "") for name, layer in layers.items()})
    return FewBitsOfFolder(forms, without_numbers(sorted(in_few_bits - layers.keys())))


def is_huggingface_folder(path: str) -> bool:
    """Return whether the initial weights are in a Hugging Face folder, which PEFT can open. A
    folder without weights, whose description suffices for a dry run, is not, nor is torchtune's."""
    if not _is_folder(path):
        return False
    return formats_in(Path(path)).get("hf") in (*SAFETENSORS, *PICKLED)


def _is_folder(path: str) -> bool:
    return bool(path) and not is_url(path) and Path(path).is_dir()


def saved_forms(
    path: str, spec: ModelSpec, added: range, config: ModelConverter.Config
) -> list[str]:
    """Return the forms in a checkpoint that a converter continues as it was saved. Return an empty
    list for other weights, also for weights of other adapters: they are merged before a converter
    gets them.

    Args:
        path, spec, added: as in `find_forms`.
        config: options of the run's converter, with a field `forms`.
    """
    if not _is_folder(path) or "dcp" not in formats_in(Path(path)):
        return []
    saved = converters_from_records(read_converters(path), path)
    own = next((converter for converter in saved if type(converter) is config._owner), None)
    if own is None:
        return []
    forms: list[str] = getattr(own.config, "forms")  # noqa: B009
    now = dataclasses.replace(config, forms=forms).build()  # type: ignore[call-arg]
    converters = [now if converter is own else converter for converter in saved]
    return list(forms) if is_as_saved(path, spec, converters, added=added) else []


def check_form(entry: str) -> None:
    """Raise `UserError` for an entry of forms, of a checkpoint's description, that is not
    NAME=FORM."""
    name, _, text = entry.partition("=")
    try:
        FewBits.parse(text)
    except ValueError as error:
        raise UserError(f"the saved form {entry!r} of QLoRA is not NAME=FORM: {error}") from None
    if not name:
        raise UserError(f"the saved form {entry!r} of QLoRA names no layer")


def forms_of(entries: Sequence[str], name: str) -> FewBits | None:
    """Return the form of a layer, or of a matrix of experts; None: it is wide."""
    forms = _parsed(tuple(entries))
    text = forms.get(name) or forms.get(without_numbers([name])[0])
    return FewBits.parse(text) if text else None


@functools.cache
def _parsed(entries: tuple[str, ...]) -> Mapping[str, str]:
    return dict(entry.split("=", 1) for entry in entries)


def _weights_of(model: BaseModel) -> list[tuple[str, str]]:
    """Return each parameter that can be kept in few bits, and the name of its layer or matrix."""
    unused = getattr(model, "unused_layers", ())
    model.stacked_experts()  # a class of transformers stacks its experts when asked for them
    found: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            found += [(f"{name}.{matrix}", f"{name}.{matrix}") for matrix in module.matrices]
        elif type(module) is nn.Linear and name != HEAD and name not in unused:
            found.append((f"{name}.weight", name))
    return found


def _in_common(forms: Mapping[str, str]) -> list[str]:
    """Return an entry for each layer with a form, and one for all whose names differ in numbers
    only if they have the same."""
    groups: dict[str, list[str]] = {}
    for name in forms:
        groups.setdefault(without_numbers([name])[0], []).append(name)
    entries: list[str] = []
    for common, names in groups.items():
        if len({forms[name] for name in names}) == 1 and len(names) > 1:
            entries.append(f"{common}={forms[names[0]]}")
        else:
            entries += [f"{name}={forms[name]}" for name in names]
    return [entry for entry in entries if not entry.endswith("=")]
