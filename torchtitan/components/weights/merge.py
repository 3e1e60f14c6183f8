"""Merges of the weights of several checkpoints of one model, computed one tensor at a time in
float32."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.protocols.tensor_source import Slices, TensorSource, TensorSpec, as_type
from torchtitan.tools.errors import UserError

_PARALLEL = 0.9995
"""Cosine of an angle above which SLERP interpolates linearly, as its formula divides by the sine of
the angle."""

Read = Sequence["partial[Tensor]"]
"""Functions that each read one model's tensor in float32, so that few are in memory."""


class Merge(Protocol):
    """Computes a merged tensor; `read_base` reads the tensor of the model before fine-tuning."""

    def __call__(self, reads: Read, read_base: "partial[Tensor] | None") -> Tensor: ...


class MergedSource(TensorSource):
    """Merge of sources with equal names and shapes. Tensors that are not floating-point must be
    equal. `dtype` is the type of the result; None: the first source has it."""

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        merge: Merge,
        *,
        base: TensorSource | None = None,
        dtype: torch.dtype | None = None,
    ):
        self._names, self._sources = list(sources), list(sources.values())
        self._merge = merge
        self._base = base
        first_name, first = next(iter(sources.items()))
        others = {**sources, **({"the base model": base} if base else {})}
        for name, source in others.items():
            _check_same(first_name, first.specs, name, source.specs)
        self.specs = {
            name: TensorSpec(spec.shape, dtype) if dtype and spec.dtype.is_floating_point else spec
            for name, spec in first.specs.items()
        }
        self._last: tuple[str, Tensor] | None = None  # read again for each of its slices

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free the memory first
            self._last = name, self._merged(name)
        whole = self._last[1]
        if slices is not None:
            return whole[slices]
        self._last = None
        return whole

    @torch.no_grad()
    def _merged(self, name: str) -> Tensor:
        dtype = self.specs[name].dtype
        if not dtype.is_floating_point:
            tensors = [source.read(name) for source in self._sources]
            if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
                raise UserError(f"{name} ({dtype}) differs between the models, and has no average")
            return tensors[0]

        def read(source: TensorSource) -> Tensor:
            return source.read(name).to(torch.float32, copy=True)  # changed in place below

        base = partial(read, self._base) if self._base else None
        merged = self._merge([partial(read, one) for one in self._sources], base)
        if not merged.isfinite().all():
            read_by = {**dict(zip(self._names, self._sources, strict=True)), "--origin": self._base}
            wrong = [
                path
                for path, source in read_by.items()
                if source is not None and not source.read(name).isfinite().all()
            ]
            where = ", ".join(wrong) or "the merge, which overflows float32"
            raise UserError(f"{name} has values that are NaN or infinite in {where}")
        return as_type(name, merged, dtype)


def linear(weights: Sequence[float]) -> Merge:
    """Return the weighted mean: sum w t / sum w."""

    def merge(reads: Read, read_base: "partial[Tensor] | None") -> Tensor:
        return _sum_of(reads, weights).div_(sum(weights))

    return merge


def slerp(t: float) -> Merge:
    """Return spherical linear interpolation from the first (`t` = 0) to the second of two models,
    with each tensor as one vector: (sin((1 - t) θ) a + sin(t θ) b) / sin θ, with the angle θ
    between a and b (Shoemake, 1985)."""

    def merge(reads: Read, read_base: "partial[Tensor] | None") -> Tensor:
        a, b = (read() for read in reads)
        norms = a.double().norm() * b.double().norm()
        cosine = (a.flatten().double() @ b.flatten().double() / norms).clamp(-1, 1)
        if not norms or cosine.abs() > _PARALLEL:
            return a.mul_(1 - t).add_(b, alpha=t)
        angle = torch.acos(cosine)
        shares = [float(torch.sin(part * angle) / torch.sin(angle)) for part in (1 - t, t)]
        return a.mul_(shares[0]).add_(b, alpha=shares[1])

    return merge


def ties(weights: Sequence[float], density: float) -> Merge:
    """Return TIES (arXiv:2306.01708): the base model plus the mean of the models' differences from
    it. Of each difference, the fraction `density` of largest elements is kept; each element has the
    sign of the weighted sum over models, and is the weighted mean of elements with this sign."""

    def trimmed(read: "partial[Tensor]", base: Tensor) -> Tensor:
        difference = read().sub_(base)
        n_kept = max(1, int(density * difference.numel()))
        magnitudes = difference.abs().flatten()
        kept = magnitudes.topk(n_kept, sorted=False).indices
        mask = torch.zeros_like(magnitudes, dtype=torch.bool).index_fill_(0, kept, True)
        return difference.mul_(mask.view_as(difference))

    def merge(reads: Read, read_base: "partial[Tensor] | None") -> Tensor:
        assert read_base is not None, "TIES has a base model"
        base = read_base()
        sign = _sum_of([partial(trimmed, read, base) for read in reads], weights).sign_()
        total, weight = torch.zeros_like(base), torch.zeros_like(base)
        for read, share in zip(reads, weights, strict=True):  # read again, to hold one at a time
            difference = trimmed(read, base)
            agrees = (difference.sign() == sign) & (difference != 0)
            total += share * difference * agrees
            weight += share * agrees
        return base + total / weight.where(weight != 0, 1)

    return merge


def _sum_of(reads: Sequence["partial[Tensor]"], weights: Sequence[float]) -> Tensor:
    total: Tensor | None = None
    for read, weight in zip(reads, weights, strict=True):
        scaled = read().mul_(weight)
        total = scaled if total is None else total.add_(scaled)
    assert total is not None
    return total


def _check_same(
    first: str, specs: Mapping[str, TensorSpec], name: str, others: Mapping[str, TensorSpec]
) -> None:
    for tensor in _differing(specs, others):
        here, there = (
            list(each[tensor].shape) if tensor in each else "absent" for each in (specs, others)
        )
        raise UserError(
            f"{tensor} has the shape {here} in {first}, and {there} in {name}; only checkpoints of "
            "one model can be merged"
        )


def _differing(specs: Mapping[str, TensorSpec], others: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in sorted({*specs, *others}):
        if name not in specs or name not in others or specs[name].shape != others[name].shape:
            yield name
