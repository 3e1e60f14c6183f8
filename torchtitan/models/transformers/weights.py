"""Tensor names and layouts of a class of transformers in three places: its wrapper here, with the
class as `model` and output weights in `head.output`; the class itself; and its files. The rules of
transformers (`transformers.conversion_mapping`) convert between them, one group of tensors at a
time, such as the experts of one layer."""

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.loading_report import LoadStateDictInfo

from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.scores import SCORE
from torchtitan.protocols.state_dict_adapter import (
    Identity,
    KeyMapping,
    Match,
    StateDictAdapter,
    TensorConversion,
    Transform,
    check_names,
    check_shapes,
)
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError, summarize_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def adapter(config: TransformersModel.Config) -> "TransformersAdapter":
    """Return the table of a model's tensors in files."""
    with torch.device("meta"):
        return TransformersAdapter(config.build())


def class_adapter(config: TransformersModel.Config) -> StateDictAdapter:
    """Return the table of a model's tensors in its class, whose modules PEFT adapts."""
    with torch.device("meta"):
        model = config.build()
    names = class_names(model)
    table = StateDictAdapter([KeyMapping(ours, name) for ours, name in names.items()], n_layers=0)
    table.lost_in_peft = frozenset(_lost_in_peft(model.model, names.values()))
    return table


def _lost_in_peft(model: "PreTrainedModel", names: Iterable[str]) -> Iterator[str]:
    """Yield the names of weights whose adapters peft loses: it applies the renaming rules of files
    to the tensors of adapters, which already have the class's names. It undoes only the removal of
    a prefix."""
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    for name in names:
        key = f"{name.removesuffix('.weight')}.lora_A.weight"
        renamed, _ = loading.rename_source_key(key, renamings, converters)
        if not key.endswith(renamed):
            yield name


def class_names(model: TransformersModel) -> dict[str, str]:
    """Return our name of each tensor → its name in the class."""
    output = SCORE if model.config.scores else model.output_name
    return {
        ours: ours.removeprefix("model.")
        if ours.startswith("model.")
        else output + ours.removeprefix("head.output")
        for ours in model.state_dict()
    }


@dataclass(frozen=True, eq=False)
class Converted(Transform):
    """Tensors that transformers converts together: to our layout in a `plan`, to the files' layout
    in `steps`."""

    model: "PreTrainedModel"
    """The class on the meta device, whose configuration and shapes some conversions need."""
    converter: loading.WeightConverter | None
    """The conversion; None: a single tensor, unchanged."""
    key: str
    """Name of the first result."""
    inputs: dict[str, str | None] = field(default_factory=dict)
    """Name of each tensor to convert → the converter's pattern for it."""
    outputs: list[str] = field(default_factory=list)
    """Results that are wanted, by the converter's names."""

    def simplest(self, results: Collection[str]) -> Transform:
        """Return the transform to these `results`."""
        return Identity() if self.converter is None and len(results) == 1 else self

    def convert(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return all results by name."""
        if self.converter is None:
            return {self.key: next(iter(tensors))}
        converter: Any = deepcopy(self.converter)
        tensors = list(tensors)
        for (name, pattern), tensor in zip(self._first_inputs(len(tensors)), tensors, strict=True):
            converter.add_tensor(self.key, name, pattern, tensor)
        results = converter.convert(self.key, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in results.items()
        }

    def _first_inputs(self, n: int) -> list[tuple[str, str | None]]:
        """Return the first `n` inputs, the same number for each pattern, in the order of the
        files: any that are enough for some of the result's rows."""
        names = self._names_of_patterns().values()
        kept = {name for of_pattern in names for name in of_pattern[: n // len(names)]}
        return [pair for pair in self.inputs.items() if pair[0] in kept]

    def _names_of_patterns(self) -> dict[str | None, list[str]]:
        names: dict[str | None, list[str]] = {}
        for name, pattern in self.inputs.items():
            names.setdefault(pattern, []).append(name)
        return names

    def inputs_of_rows(
        self, rows: slice, n_rows: int, names: Sequence[str]
    ) -> Sequence[tuple[str, slice]] | None:
        merge, *others = self.converter.operations if self.converter else [None]
        if not isinstance(merge, loading.MergeModulelist) or merge.dim != 0:
            return None
        if any(not isinstance(one, loading.Concatenate) or one.dim == 0 for one in others):
            return None
        of_patterns = self._names_of_patterns().values()
        if any(len(of_pattern) != n_rows for of_pattern in of_patterns):
            return None
        wanted = {name for of_pattern in of_patterns for name in of_pattern[rows]}
        return [(name, slice(None)) for name in names if name in wanted]

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return self.to_external(tensors)

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        results = self.convert(tensors)
        return [results[name] for name in self.outputs]


class TransformersAdapter(StateDictAdapter):
    """The table of a class's tensors in files. `steps` follows the newest transformers; every file
    whose names transformers knows can be read.

    Args:
        model: the model on the meta device, before it is sharded.
    """

    def __init__(self, model: TransformersModel):
        self._class = model.model
        aliases: dict[str, str] = self._class.all_tied_weights_keys
        self._replaced = f"{model.output_name}." if model.config.scores else None
        if self._replaced:
            aliases = {
                name: tied_to
                for name, tied_to in aliases.items()
                if not name.startswith(self._replaced)
            }
        # Name in the class → the same, or the name of the tensor that it is tied to.
        self._original = {name: name for name in aliases.values()} | aliases
        # Name in the class → our names: more than one if others are tied to it.
        self._ours: dict[str, list[str]] = {}
        state, tensors = model.state_dict(), {}
        for ours, name in class_names(model).items():
            original = self._original.setdefault(name, name)
            self._ours.setdefault(original, []).append(ours)
            tensors[original] = state[ours]
        # As transformers writes a model that was not read from files, which may not have had the
        # prefix.
        rules = get_model_conversion_mapping(self._class, add_legacy=False)[::-1]
        rules = [
            rule.reverse_transform() for rule in rules if not isinstance(rule, loading.PrefixChange)
        ]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        rename = functools.partial(loading.apply_renamings, weight_renamings=renamings)
        rows = []
        for group in _group(self._class, tensors, converters).values():
            group.outputs.extend(group.convert([tensors[name] for name in group.inputs]))
            internal = tuple(ours for name in group.inputs for ours in self._ours[name])
            external = tuple(rename(name) for name in group.outputs)
            rows.append(KeyMapping(internal, external, group.simplest(internal)))
        super().__init__(
            rows,
            n_layers=0,
            tied={rename(name): rename(tied_to) for name, tied_to in aliases.items()},
        )

    def match(self, external: Mapping[str, TensorSpec]) -> Match:
        """Return how to read a checkpoint. Raise `UserError` if it has a tensor twice."""
        read = [name for name in external if not _is_unread(self._class.config, name)]
        rules = get_model_conversion_mapping(self._class)
        groups = _group(self._class, read, rules, self._original)
        unknown = {key: groups.pop(key).inputs for key in groups.keys() - self._original.keys()}
        if self._replaced:  # the output layer of a language model has become a score
            unknown = {k: names for k, names in unknown.items() if not k.startswith(self._replaced)}
        report = LoadStateDictInfo(set(), set(unknown), set(), [], {}, set())
        # removes the names that the class ignores
        self._class._adjust_missing_and_unexpected_keys(report)
        # A tied tensor is read only if the original is absent.
        chosen = {
            self._original[key]: key
            for key in sorted(groups, key=lambda key: self._original[key] == key)
        }
        tied: dict[str, str] = {}
        steps = []
        for key, group in groups.items():
            names = tuple(group.inputs)
            if group.converter is None and len(names) > 1:
                raise UserError(
                    f"the checkpoint has {key} more than once: {summarize_names(names)}"
                )
            if (first := chosen[self._original[key]]) != key:
                tied[names[0]] = next(iter(groups[first].inputs))
                continue
            try:
                results = group.convert(external[name].on_meta() for name in names)
            except (RuntimeError, ValueError):  # tensors are missing, or have the wrong shape
                continue
            wanted = {
                ours: name
                for name in results
                for ours in self._ours.get(self._original.get(name, ""), ())
            }
            group.outputs.extend(wanted.values())
            steps.append(TensorConversion(tuple(wanted), names, group.simplest(wanted)))
        return Match(
            steps, tied, [name for key in sorted(report.unexpected_keys) for name in unknown[key]]
        )

    def plan(self, external: Mapping[str, TensorSpec], internal: Mapping[str, TensorSpec]) -> Match:
        expected, match = self.external_specs(internal), self.match(external)
        found: dict[str, torch.Size] = {}
        for step in match.steps:
            tensors = step.transform.to_internal(
                [external[name].on_meta() for name in step.external], []
            )
            found |= {
                ours: tensor.shape for ours, tensor in zip(step.internal, tensors, strict=True)
            }
        unread = [
            step
            for step in self.steps
            if any(found.get(x) != internal[x].shape for x in step.internal)
        ]
        names = [name for step in unread for name in step.external]
        check_names(
            "the checkpoint", [name for name in names if name not in external], match.unexpected
        )
        check_shapes((name, external[name].shape, expected[name].shape) for name in names)
        # of too many experts
        check_shapes((name, shape, internal[name].shape) for name, shape in found.items())
        return match


def _is_unread(config: "PretrainedConfig", name: str) -> bool:
    """Return whether a tensor belongs to an expert of LongCat that returns its input, for which
    transformers writes matrices that nothing reads."""
    expert = re.search(r"\.experts\.(\d+)\.(gate|up)_proj\.weight$", name)
    is_mixed = bool(getattr(config, "zero_expert_num", 0))
    return is_mixed and expert is not None and int(expert[1]) >= config.n_routed_experts


def _group(
    model: "PreTrainedModel",
    names: Iterable[str],
    rules: Iterable[loading.WeightTransform],
    known: dict[str, str] | None = None,
) -> dict[str, Converted]:
    """Return name of the first result → the tensors of a class, or of files, that transformers'
    rules convert together. `known` are the class's names, if the tensors are of files."""
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    groups: dict[str, Converted] = {}
    for name in sorted(names, key=loading.dot_natural_key):
        key, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if known and name in known and key not in known:
            key, pattern = name, None
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(key, Converted(model, converter, key)).inputs[name] = pattern
    return groups
