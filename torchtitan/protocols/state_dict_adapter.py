"""Names and layouts of a family's weights in other formats: one table for both directions.

A row maps our tensors ("internal") to tensors of another format ("external") with a transform. No
files are involved.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError, summarize_names

Names = str | tuple[str, ...]
"""Name of one tensor, or names of several; `*` matches every layer's number."""


def model_tensor_specs(config: BaseModel.Config) -> dict[str, TensorSpec]:
    """Return name → spec of every tensor of the model that `config` builds, in its order; nothing
    is allocated."""
    with torch.device("meta"):
        model = config.build()
    return {name: TensorSpec.of(tensor) for name, tensor in model.state_dict().items()}


class Transform(ABC):
    """Bit-exact, stateless rearrangement of a row's tensors; with meta tensors, it computes only
    shapes."""

    rows_only: ClassVar[bool] = False
    """True if this only moves the rows of one tensor, so that it also applies to a weight's adapter
    or row norms."""

    @abstractmethod
    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Return our tensors, of `shapes`, from the other format's."""

    @abstractmethod
    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the other format's tensors from ours."""

    def inputs_of_rows(
        self, rows: slice, n_rows: int, names: Sequence[str]
    ) -> Sequence[tuple[str, slice]] | None:
        """Return which of the other format's tensors, called `names`, give these of the `n_rows`
        rows of our only one, and the rows of each that do; None: all tensors are needed."""
        return None


@dataclass(frozen=True)
class Identity(Transform):
    """One tensor, identical in both formats."""

    rows_only = True

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return tensors

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


@dataclass(frozen=True)
class RopePermutation(Transform):
    """Reordered rows of a query or key projection, for a format that rotates neighboring pairs of a
    head's elements. We rotate element i with i + rotated_dim / 2; Meta and GLM rotate 2i with 2i +
    1 (arXiv:2104.09864, 3.2)."""

    rows_only = True

    head_dim: int

    rotated_dim: int | None = None
    """Elements of each head that are rotated, from its first; the rows of others keep their place.
    None: all."""

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [self._permute(tensor, (-1, 2)) for tensor in tensors]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._permute(tensor, (2, -1)) for tensor in tensors]

    def _permute(self, tensor: Tensor, order: tuple[int, int]) -> Tensor:
        rotated_dim = self.head_dim if self.rotated_dim is None else self.rotated_dim
        heads = tensor.unflatten(0, (-1, self.head_dim))
        rotated = heads[:, :rotated_dim].unflatten(1, order).transpose(1, 2).flatten(1, 2)
        return torch.cat((rotated, heads[:, rotated_dim:]), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Grouped(Transform):
    """Rows of several parts, one part after the other in the other format, which we have by groups:
    the first rows of each part, then the next ones of each, and so on."""

    rows_only = True

    groups: int

    shares: tuple[int, ...]
    """Relative numbers of rows of the parts."""

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        (tensor,) = tensors
        unit = tensor.shape[0] // sum(self.shares)
        parts = tensor.split([share * unit for share in self.shares])
        return [torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], dim=1).flatten(0, 1)]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        groups = tensors[0].unflatten(0, (self.groups, -1))
        unit = groups.shape[1] // sum(self.shares)
        parts = groups.split([share * unit for share in self.shares], dim=1)
        return [torch.cat([part.flatten(0, 1) for part in parts])]


@dataclass(frozen=True)
class Columns(Transform):
    """A transform of rows (`rows_only`), applied to the columns of one tensor."""

    of_rows: Transform

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [self.of_rows.to_internal([tensors[0].mT], shapes)[0].mT]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self.of_rows.to_external([tensors[0].mT])[0].mT]


@dataclass(frozen=True)
class Concatenated(Transform):
    """Several of our tensors, fused into one along `dim` in the other format: first the first of
    `groups` of each tensor, then the second of each, and so on."""

    dim: int

    groups: int = 1

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        (fused,) = tensors
        sizes = [shape[self.dim] // self.groups for shape in shapes]
        parts = fused.unflatten(self.dim, (self.groups, -1)).split(sizes, dim=self.dim + 1)
        return [part.flatten(self.dim, self.dim + 1) for part in parts]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        parts = [tensor.unflatten(self.dim, (self.groups, -1)) for tensor in tensors]
        return [torch.cat(parts, dim=self.dim + 1).flatten(self.dim, self.dim + 1)]


@dataclass(frozen=True)
class Stacked(Transform):
    """One of our tensors, split into one for each index of its first `n_dims` dimensions in the
    other format: the experts of a layer; with 2, both input projections of each."""

    n_dims: int = 1

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [torch.stack(tensors).unflatten(0, (-1, *shapes[0][1 : self.n_dims]))]

    def inputs_of_rows(
        self, rows: slice, n_rows: int, names: Sequence[str]
    ) -> Sequence[tuple[str, slice]] | None:
        n = len(names) // n_rows
        return [(name, slice(None)) for name in names[rows.start * n : rows.stop * n]]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].flatten(0, self.n_dims - 1).unbind())


@dataclass(frozen=True)
class Permuted(Transform):
    """One of our tensors, whose dimensions have another `order` in the other format, and there, the
    one at place `joined` and the next are one; None: all are separate."""

    order: tuple[int, ...]

    joined: int | None = None

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        separate = tensors[0].reshape([shapes[0][dim] if dim else -1 for dim in self.order])
        return [separate.permute([self.order.index(dim) for dim in range(len(self.order))])]

    def inputs_of_rows(
        self, rows: slice, n_rows: int, names: Sequence[str]
    ) -> Sequence[tuple[str, slice]] | None:
        return [(names[0], rows)] if self.order[0] == 0 and self.joined != 0 else None

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        permuted = tensors[0].permute(self.order).contiguous()
        return [permuted if self.joined is None else permuted.flatten(self.joined, self.joined + 1)]


@dataclass(frozen=True)
class Unsqueezed(Transform):
    """A vector here that has further dimensions of size 1 in the other format: `before` its
    elements, and `after` them."""

    before: int = 1

    after: int = 0

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [tensors[0].flatten()]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(*(1,) * self.before, -1, *(1,) * self.after)]


@dataclass(frozen=True)
class Repeated(Transform):
    """One of our tensors, repeated in the other format: tied weights in a format without ties."""

    times: int

    def to_internal(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Return the first tensor; the adapter's `tied` requires the others to equal it."""
        return tensors[:1]

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors * self.times


@dataclass(frozen=True)
class KeyMapping:
    """Our tensors, their equivalents in the other format, and the transform between them."""

    internal: Names
    external: Names
    transform: Transform = Identity()


@dataclass(frozen=True)
class TensorConversion:
    """One row for one layer. The tensors of either side determine the tensors of the other."""

    internal: tuple[str, ...]
    external: tuple[str, ...]
    transform: Transform


class StateDictAdapter:
    """The table of one model configuration, with `*` in the `rows` replaced by each layer's number
    (`steps`).

    Args:
        rows: mappings that cover every tensor of the model once.
        only: the model's tensors; rows for other tensors are skipped. None: the rows have only the
            model's tensors.
        ignored: optional external tensors without information, such as RoPE frequencies; `*` as in
            rows.
        tied: optional external tensor → the tensor that it must equal; the code that reads it calls
            `check_tied`.
    """

    lost_in_peft: Collection[str] = ()
    """External tensors, of a class in transformers, whose adapters peft does not find."""

    def __init__(
        self,
        rows: Sequence[KeyMapping],
        *,
        n_layers: int,
        only: Container[str] | None = None,
        ignored: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
    ):
        steps = [step for row in rows for step in _expand_row(row, n_layers)]
        self.steps = [
            step for step in steps if only is None or all(name in only for name in step.internal)
        ]
        self.n_layers, self.tied = n_layers, dict(tied or {})
        self._ignored = {name for pattern in ignored for name in _expand(pattern, n_layers)}
        for names in (self.internal_names, self.external_names):
            assert len(set(names)) == len(names), "a tensor in more than one row"

    @property
    def internal_names(self) -> list[str]:
        return [name for step in self.steps for name in step.internal]

    @property
    def external_names(self) -> list[str]:
        """The other format's tensors, without optional ones."""
        return [name for step in self.steps for name in step.external]

    def external_specs(self, internal: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return name → spec of the other format's tensors for a model with the specs `internal`.
        Raise `UserError` unless `internal` has exactly the tensors of the table."""
        ours = self.internal_names
        known = set(ours)
        check_names(
            "the weights",
            [n for n in ours if n not in internal],
            [n for n in internal if n not in known],
        )
        specs: dict[str, TensorSpec] = {}
        for step in self.steps:
            converted = step.transform.to_external(
                [internal[name].on_meta() for name in step.internal]
            )
            specs |= {
                name: TensorSpec.of(tensor)
                for name, tensor in zip(step.external, converted, strict=True)
            }
        return specs

    def match(self, external: Mapping[str, TensorSpec]) -> "Match":
        """Return how to read a checkpoint with the specs `external`, without checking that it is
        complete."""
        known = {*self.external_names, *self._ignored, *self.tied}
        tied = {name: tied_to for name, tied_to in self.tied.items() if name in external}
        return Match(self.steps, tied, [name for name in external if name not in known])

    def plan(
        self, external: Mapping[str, TensorSpec], internal: Mapping[str, TensorSpec]
    ) -> "Match":
        """Return how to convert a checkpoint with the specs `external` to a model with the specs
        `internal`. Raise `UserError`, naming missing and unexpected tensors and tensors of the
        wrong shape."""
        expected, match = self.external_specs(internal), self.match(external)
        check_names(
            "the checkpoint", [name for name in expected if name not in external], match.unexpected
        )
        check_shapes((name, external[name].shape, spec.shape) for name, spec in expected.items())
        return match


class Match(NamedTuple):
    """Tensors of a checkpoint, compared with an adapter's table."""

    steps: list[TensorConversion]
    """Conversions to our tensors."""
    tied: Mapping[str, str]
    """Tied tensor of the checkpoint → the tensor that it must equal."""
    unexpected: Sequence[str]
    """Tensors that the model does not have."""


def check_tied(name: str, tensor: Tensor, tied_to: str, original: Tensor) -> None:
    """Raise `UserError` unless a checkpoint's tensor equals the tensor that the model uses
    instead."""
    if tensor.shape != original.shape or not torch.equal(tensor, original):
        raise UserError(
            f"the checkpoint's {name} differs from {tied_to}, but the model ties these weights; to "
            "untie them, set tie_word_embeddings to false in config.json "
            "(--model.no_tie_embeddings)"
        )


@dataclass(frozen=True)
class ExternalFormat:
    """A family's tensors in another format, and the file that describes the model."""

    adapter: Callable[[Any], StateDictAdapter]
    """Model configuration → the table of its tensors."""

    to_external: Callable[[Any], dict[str, Any]]
    """Model configuration → its keys in config.json (hf) or params.json (meta). Raises `UserError`
    if impossible."""

    from_external: Callable[[Mapping[str, Any]], BaseModel.Config]
    """Content of that file → model configuration. Raises `UserError`, naming unsupported
    requirements."""

    model_types: Mapping[str, str] = field(default_factory=dict)
    """Value of `model_type` in config.json that belongs to this family → its class in
    transformers; or of another library's key."""

    library: str = "transformers"
    """Library that reads the folder of a model in the format hf, a key of
    `components.checkpoint.formats.LIBRARIES`."""

    other_adapter: Callable[[Any], StateDictAdapter | None] = lambda config: None
    """As `adapter`, for another layout of the same tensors, which is only read; None: no other
    layout."""

    name_of: Callable[[str], str | None] = lambda name: name
    """Name of a tensor in a checkpoint → its name in the table, as written; None if the model has
    no such part."""

    class_adapter: Callable[[Any], StateDictAdapter] | None = None
    """Model configuration → the table of its tensors in the class of transformers, whose modules
    PEFT adapts; None: the class has the names and layouts of the files."""


def adapter_for(format: ExternalFormat, config: object, names: Container[str]) -> StateDictAdapter:
    """Return the table for a checkpoint with these `names`: the other layout's table if a name
    occurs only there."""
    adapter, other = format.adapter(config), format.other_adapter(config)
    if other and any(
        name in names for name in set(other.external_names).difference(adapter.external_names)
    ):
        return other
    return adapter


def _expand(name: str, n_layers: int) -> list[str]:
    return [name.replace("*", str(index)) for index in range(n_layers)] if "*" in name else [name]


def _expand_row(row: KeyMapping, n_layers: int) -> list[TensorConversion]:
    internal = (row.internal,) if isinstance(row.internal, str) else row.internal
    external = (row.external,) if isinstance(row.external, str) else row.external
    columns = [_expand(name, n_layers) for name in (*internal, *external)]
    lines = zip(*columns, strict=True)
    return [
        TensorConversion(line[: len(internal)], line[len(internal) :], row.transform)
        for line in lines
    ]


def check_names(owner: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise `UserError` if any of the owner's tensors are missing or unexpected."""
    faults = [f"missing from {owner}: {summarize_names(missing)}"] if missing else []
    faults += (
        [f"in {owner}, but not in the model: {summarize_names(unexpected)}"] if unexpected else []
    )
    if faults:
        raise UserError("; ".join(faults))


def check_shapes(shapes: Iterable[tuple[str, torch.Size, torch.Size]]) -> None:
    """Raise `UserError`, naming the tensors, if any shape of a checkpoint (second) differs from the
    model's (third)."""
    faults = [
        f"{name} has shape {list(found)} instead of {list(size)}"
        for name, found, size in shapes
        if found != size
    ]
    if faults:
        raise UserError(f"the checkpoint's tensors do not fit the model: {summarize_names(faults)}")
