"""Names and layouts of a family's weights in other formats: one table for both directions.

A row maps our tensors ("native") to another format's ("foreign") with a transform, independent of files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.tensor_source import TensorForm, some
from torchtitan.tools.errors import UserError

Names = str | tuple[str, ...]
"""One tensor's name or several; `*` matches every layer's number."""


def model_forms(config: BaseModel.Config) -> dict[str, TensorForm]:
    """Return name → form of every tensor of the model that `config` builds, in its order; nothing is allocated."""
    with torch.device("meta"):
        model = config.build()
    return {name: TensorForm.of(tensor) for name, tensor in model.state_dict().items()}


class Transform(ABC):
    """Bit-exact rearrangement of a row's tensors, without its own memory; meta tensors give the other side's shapes."""

    rows_only: ClassVar[bool] = False
    """True if this only moves rows between two tensors, and so also applies to a weight's adapter or row norms."""

    @abstractmethod
    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Return our tensors, of `shapes`, from the other format's."""

    @abstractmethod
    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the other format's tensors from ours."""


@dataclass(frozen=True)
class Identity(Transform):
    """One tensor, identical in both formats."""

    rows_only = True

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return tensors

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


@dataclass(frozen=True)
class RopePermutation(Transform):
    """Rows of a query or key projection, if the other format rotates neighboring pairs of a head's elements. Ours and
    Hugging Face's rotate element i with i + head_dim / 2; Meta's pairs are 2i and 2i + 1 (arXiv:2104.09864, 3.2)."""

    rows_only = True

    head_dim: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [self._permute(tensor, (self.head_dim // 2, 2)) for tensor in tensors]

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._permute(tensor, (2, self.head_dim // 2)) for tensor in tensors]

    def _permute(self, tensor: Tensor, order: tuple[int, int]) -> Tensor:
        return tensor.unflatten(0, (-1, *order)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Concatenated(Transform):
    """Several of our tensors, fused into one along `dim` in the other format."""

    dim: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        (fused,) = tensors
        return list(fused.split([shape[self.dim] for shape in shapes], dim=self.dim))

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors, dim=self.dim)]


@dataclass(frozen=True)
class Stacked(Transform):
    """One of our tensors, split into one for each index of `dim` in the other format: the experts of a layer."""

    dim: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [torch.stack(tensors, dim=self.dim)]

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        (stack,) = tensors
        return list(stack.unbind(self.dim))


@dataclass(frozen=True)
class Repeated(Transform):
    """One of our tensors, repeated in the other format: tied weights in a format without ties."""

    times: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Return the first tensor; the adapter's `tied` requires the others to equal it."""
        return tensors[:1]

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors * self.times


@dataclass(frozen=True)
class KeyMapping:
    """Our tensors, their equivalents in the other format, and the transform between them."""

    native: Names
    foreign: Names
    transform: Transform = Identity()


@dataclass(frozen=True)
class TensorConversion:
    """One row for one layer: the tensors of either side determine the other side's."""

    native: tuple[str, ...]
    foreign: tuple[str, ...]
    transform: Transform


class StateDictAdapter:
    """The table of one model configuration, with `*` in the `rows` replaced by each layer's number (`steps`).

    Args:
        rows: cover every tensor of the model once.
        ignored: optional foreign tensors without information, such as RoPE frequencies; `*` as in rows.
        tied: optional foreign tensor → the tensor that it must equal; the reader compares them (`check_tied`).
    """

    def __init__(
        self,
        rows: Sequence[KeyMapping],
        *,
        n_layers: int,
        ignored: Iterable[str] = (),
        tied: Mapping[str, str] | None = None,
    ):
        self.steps = [step for row in rows for step in _expand_row(row, n_layers)]
        self.tied = dict(tied or {})
        self._ignored = {name for pattern in ignored for name in _expand(pattern, n_layers)}
        for names in (self.native_names, self.foreign_names):
            assert len(set(names)) == len(names), "a tensor in more than one row"

    @property
    def native_names(self) -> list[str]:
        return [name for step in self.steps for name in step.native]

    @property
    def foreign_names(self) -> list[str]:
        """The other format's tensors, without optional ones."""
        return [name for step in self.steps for name in step.foreign]

    def foreign_forms(self, native: Mapping[str, TensorForm]) -> dict[str, TensorForm]:
        """Return name → form of the other format's tensors for a model with the forms `native`. Raise `UserError` if
        those are not exactly the table's tensors."""
        _check_names("the weights", native, self.native_names, allowed=())
        forms: dict[str, TensorForm] = {}
        for step in self.steps:
            tensors = [torch.empty(native[n].shape, dtype=native[n].dtype, device="meta") for n in step.native]
            made = step.transform.to_foreign(tensors)
            forms |= {name: TensorForm.of(tensor) for name, tensor in zip(step.foreign, made, strict=True)}
        return forms

    def plan(self, foreign: Mapping[str, TensorForm], native: Mapping[str, TensorForm]) -> list[TensorConversion]:
        """Return the steps that convert a checkpoint with the forms `foreign` to a model with the forms `native`. Raise
        `UserError`, naming missing, unknown or misshapen tensors."""
        expected = self.foreign_forms(native)
        _check_names("the checkpoint", foreign, list(expected), allowed={*self._ignored, *self.tied})
        misshapen = [
            f"{name} is {list(foreign[name].shape)} and must be {list(form.shape)}"
            for name, form in expected.items()
            if foreign[name].shape != form.shape
        ]
        if misshapen:
            raise UserError(f"the checkpoint's tensors do not fit the model: {some(misshapen)}")
        return self.steps


def check_tied(name: str, tensor: Tensor, tied_to: str, original: Tensor) -> None:
    """Raise `UserError` unless a checkpoint's tensor equals the tensor that the model uses in its place."""
    if tensor.shape != original.shape or not torch.equal(tensor, original):
        raise UserError(
            f"the checkpoint's {name} differs from {tied_to}, and the model has the same weights for both; "
            "to keep them apart, set tie_word_embeddings to false in config.json (--model.no_tie_embeddings)"
        )


@dataclass(frozen=True)
class ForeignFormat:
    """A family's tensors in another format, and the file that describes the model."""

    adapter: Callable[[Any], StateDictAdapter]
    """Model configuration → the table of its tensors."""

    to_foreign: Callable[[Any], dict[str, Any]]
    """Model configuration → its keys in config.json (hf) or params.json (meta). Raises `UserError` if impossible."""

    from_foreign: Callable[[Mapping[str, Any]], BaseModel.Config]
    """Content of that file → model configuration. Raises `UserError`, naming unsupported requirements."""

    model_types: tuple[str, ...] = ()
    """Values of `model_type` in config.json that belong to this family."""


def _expand(name: str, n_layers: int) -> list[str]:
    return [name.replace("*", str(index)) for index in range(n_layers)] if "*" in name else [name]


def _expand_row(row: KeyMapping, n_layers: int) -> list[TensorConversion]:
    native = (row.native,) if isinstance(row.native, str) else row.native
    foreign = (row.foreign,) if isinstance(row.foreign, str) else row.foreign
    columns = [_expand(name, n_layers) for name in (*native, *foreign)]
    lines = zip(*columns, strict=True)
    return [TensorConversion(line[: len(native)], line[len(native) :], row.transform) for line in lines]


def _check_names(owner: str, found: Iterable[str], expected: Sequence[str], allowed: Iterable[str]) -> None:
    there, known = set(found), {*expected, *allowed}
    missing = [name for name in expected if name not in there]
    surplus = [name for name in found if name not in known]
    faults = [f"missing from {owner}: {some(missing)}"] if missing else []
    faults += [f"in {owner}, and not in the model: {some(surplus)}"] if surplus else []
    if faults:
        raise UserError("; ".join(faults))
