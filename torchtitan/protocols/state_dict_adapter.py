"""How a family's weights are called and laid out in other formats: a table, used in both directions.

A row says which tensors of ours ("native") are which of another format's ("foreign"), and what lies between them.
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
"""One tensor's name or several; `*` stands for every layer's number."""


def model_forms(config: BaseModel.Config) -> dict[str, TensorForm]:
    """Return name → form of every tensor of the model that `config` builds, in its order; nothing is allocated."""
    with torch.device("meta"):
        model = config.build()
    return {name: TensorForm.of(tensor) for name, tensor in model.state_dict().items()}


class Transform(ABC):
    """What lies between the tensors of a row: a rearrangement, exact to the bit, of meta tensors too."""

    rows_only: ClassVar[bool] = False
    """Whether it makes one tensor of one by moving rows, so that it fits whatever else has one entry per row: an
    adapter of the weight, the norms of its rows."""

    @abstractmethod
    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Our tensors, of `shapes`, from the other format's."""

    @abstractmethod
    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        """The other format's tensors from ours."""


@dataclass(frozen=True)
class Identity(Transform):
    """One tensor, the same in both."""

    rows_only = True

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return tensors

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


@dataclass(frozen=True)
class RopePermutation(Transform):
    """Rows of a query or key projection, if the other format rotates neighboring pairs of a head's elements.

    Our pair is elements i and i + head_dim / 2, as in Hugging Face's format; in Meta's, as in the RoPE paper
    (arXiv:2104.09864, section 3.2), it is elements 2i and 2i + 1.
    """

    rows_only = True

    head_dim: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """Rows of each head: all first elements of the pairs, then all second ones."""
        return [self._permute(tensor, (self.head_dim // 2, 2)) for tensor in tensors]

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        """Rows of each head: the two elements of a pair beside each other."""
        return [self._permute(tensor, (2, self.head_dim // 2)) for tensor in tensors]

    def _permute(self, tensor: Tensor, order: tuple[int, int]) -> Tensor:
        return tensor.unflatten(0, (-1, *order)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Concatenated(Transform):
    """Several tensors of ours that the other format has fused into one, one after the other along `dim`."""

    dim: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        (fused,) = tensors
        return list(fused.split([shape[self.dim] for shape in shapes], dim=self.dim))

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors, dim=self.dim)]


@dataclass(frozen=True)
class Stacked(Transform):
    """One tensor of ours that the other format has as several, one for each index of `dim`: the experts of a layer."""

    dim: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        return [torch.stack(tensors, dim=self.dim)]

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        (stack,) = tensors
        return list(stack.unbind(self.dim))


@dataclass(frozen=True)
class Repeated(Transform):
    """One tensor of ours that the other format writes several times: tied weights in a format that cannot tie them."""

    times: int

    def to_native(self, tensors: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        """The first; that the others equal it is for the adapter's `tied` to say."""
        return tensors[:1]

    def to_foreign(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors * self.times


@dataclass(frozen=True)
class KeyMapping:
    """Tensors of ours, those of the other format that hold the same, and what lies between them."""

    native: Names
    foreign: Names
    transform: Transform = Identity()


@dataclass(frozen=True)
class TensorConversion:
    """One row for one layer: reading the tensors of one side is enough to make those of the other."""

    native: tuple[str, ...]
    foreign: tuple[str, ...]
    transform: Transform


class StateDictAdapter:
    """The table of one model configuration.

    Args:
        rows: every tensor of the model, once; a row with `*` in its names is one of each layer.
        n_layers: how many layers there are.
        ignored: foreign tensors that may be there and carry nothing, such as RoPE frequencies; `*` as in rows.
        tied: foreign tensor → the one it must equal. May be there; whoever reads compares the two (`check_tied`).

    Attributes:
        steps: the rows with `*` replaced by each layer's number.
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
        """The other format's tensors, without those that only may be there."""
        return [name for step in self.steps for name in step.foreign]

    def foreign_forms(self, native: Mapping[str, TensorForm]) -> dict[str, TensorForm]:
        """Return name → form of the other format's tensors, for a model whose tensors have the forms `native`.

        Raises:
            UserError: if `native` lacks tensors of the table or has others.
        """
        _check_names("the weights", native, self.native_names, allowed=())
        forms: dict[str, TensorForm] = {}
        for step in self.steps:
            tensors = [torch.empty(native[n].shape, dtype=native[n].dtype, device="meta") for n in step.native]
            made = step.transform.to_foreign(tensors)
            forms |= {name: TensorForm.of(tensor) for name, tensor in zip(step.foreign, made, strict=True)}
        return forms

    def plan(self, foreign: Mapping[str, TensorForm], native: Mapping[str, TensorForm]) -> list[TensorConversion]:
        """Return the steps that make a model with the forms `native` from a checkpoint with the forms `foreign`.

        Raises:
            UserError: naming the tensors that are missing, that the model has no place for, or of another shape.
        """
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
    """Raise `UserError` unless a tensor of a checkpoint equals the one that the model uses in its place."""
    if tensor.shape != original.shape or not torch.equal(tensor, original):
        raise UserError(
            f"the checkpoint's {name} differs from {tied_to}, and the model has the same weights for both; "
            "to keep them apart, set tie_word_embeddings to false in config.json (--model.no_tie_embeddings)"
        )


@dataclass(frozen=True)
class ForeignFormat:
    """What a family says of another format: its tensors, and the file that describes the model."""

    adapter: Callable[[Any], StateDictAdapter]
    """Model configuration → the table of its tensors."""

    to_foreign: Callable[[Any], dict[str, Any]]
    """Model configuration → content of config.json (hf) or params.json (meta), as far as it follows from it. Raises
    `UserError` for what the format cannot express."""

    from_foreign: Callable[[Mapping[str, Any]], BaseModel.Config]
    """That content → model configuration. Raises `UserError` naming what it asks for and the family does not have."""

    model_types: tuple[str, ...] = ()
    """Those `model_type` of a config.json that are this family."""


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
