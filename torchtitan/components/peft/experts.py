"""LoRA and DoRA of routed experts, in grouped products."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.components.peft.lora import AdaptedLayer, row_scale
from torchtitan.components.quantization.packed_layers import PackedExperts, pack_experts
from torchtitan.components.weights.few_bits import FewBits
from torchtitan.distributed.gradients import row_norms
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.initializer import (
    Constant,
    DerivedRows,
    Initializer,
    Uniform,
    initializers_of,
)


class AdaptedExperts(AdaptedLayer, StackedExperts):
    """A mixin before a class of experts, which adapts each of their `matrices`: `w` (E, …, out,
    in), frozen, gets `w_A` (E, rank, in), `w_B` (E, …, out, rank) and, with DoRA, `w_magnitude` (E,
    …, out). As in PEFT, the gate and up of an expert share A. `scalings` has the factor of each
    matrix's adapter."""

    scalings: Mapping[str, float]
    calls_product = True

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plain = {name: own[name] for name in own if name not in self.adapter}
        for name in self.matrices:
            adapter = {key: own[key].float() for key in self.adapter if key.startswith(name)}
            weight = plain[name].float()
            plain[name] = self._add_adapter(name, weight, adapter)
            if f"{name}_magnitude" in own:
                plain[name] = self._scale(name, weight, adapter)[..., None] * plain[name]
        return plain

    def base_matrix(self, name: str) -> Tensor:
        """Return a frozen matrix of all experts."""
        weight: Tensor = getattr(self, name)
        return weight

    def product(self, rows_RI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        base = super().product(rows_RI, name, ends_E)
        if not self.is_adapted:
            return base
        lora_A, lora_B = (getattr(self, f"{name}_{part}").to(rows_RI.dtype) for part in "AB")
        extra = -lora_A.shape[1] % 8  # grouped products need rows of a multiple of 16 bytes
        low_RX = F.grouped_mm(rows_RI, F.pad(lora_A, (0, 0, 0, extra)).mT, offs=ends_E)
        added = F.grouped_mm(low_RX, F.pad(lora_B, (0, extra)).flatten(1, -2).mT, offs=ends_E)
        added = added * self.scalings[name]
        if f"{name}_magnitude" not in self.adapter:
            return base + added
        adapter = {key: getattr(self, key) for key in self.adapter}
        scale_E = self._scale(name, self.base_matrix(name), adapter).flatten(1)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        scale_R = scale_E.repeat_interleave(counts_E, dim=0, output_size=len(rows_RI))
        return base + (scale_R - 1).to(base.dtype) * base + scale_R.to(base.dtype) * added

    def _add_adapter(self, name: str, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        lora_A, lora_B = (adapter[f"{name}_{part}"].to(weight.dtype) for part in "AB")
        rows, scaling = weight.flatten(1, -2), self.scalings[name]
        return torch.baddbmm(rows, lora_B.flatten(1, -2), lora_A, alpha=scaling).view_as(weight)

    def _scale(self, name: str, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        norms = row_norms(self._add_adapter(name, weight, adapter).detach())
        if self.width_group is not None and self.hidden_dims[f"{name}_A"] is not None:
            # of this rank's part of each row
            dist.all_reduce(norms.square_(), group=self.width_group)
            norms.sqrt_()
        return row_scale(adapter[f"{name}_magnitude"], norms)


class AdaptedPackedExperts(AdaptedExperts, PackedExperts):
    """`AdaptedExperts` of a class of `PackedExperts`."""

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().plain_state(self.plain_base(own))

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        types = PackedExperts.plain_types(self, own)
        return {name: dtype for name, dtype in types.items() if name not in self.adapter}

    def base_matrix(self, name: str) -> Tensor:
        if name not in self.forms:
            return super().base_matrix(name)
        return self.unpacked(name, self.forms[name].value_dtype)


def adapt_experts(
    experts: StackedExperts,
    *,
    ranks: Mapping[str, int],
    scalings: Mapping[str, float],
    dora: bool,
    forms: Mapping[str, FewBits] | None = None,
) -> AdaptedExperts:
    """Freeze experts and give them adapters, in place: they become `AdaptedExperts` of their class.
    Return them.

    `ranks` and `scalings` have an entry for each of the `matrices`; those in `forms` are kept in
    few bits."""
    assert not experts.is_transposed
    experts.requires_grad_(False)
    starts, split_dims = dict[str, Initializer](), dict[str, int | None]()
    plain = {name: experts.get_parameter(name) for name in experts.matrices}
    plain_dims, plain_starts = experts.hidden_dims, initializers_of(experts)
    if forms:
        pack_experts(experts, forms)
    for name, weight in plain.items():
        hidden_dim = plain_dims.get(name)
        *rows, inputs = weight.shape
        # Either the inputs or the outputs are the experts' width.
        dim_A, dim_B = (2, None) if hidden_dim == len(rows) else (None, hidden_dim)
        added: dict[str, tuple[list[int], Initializer, int | None]] = {
            "A": ([rows[0], ranks[name], inputs], Uniform(-(inputs**-0.5), inputs**-0.5), dim_A),
            "B": ([*rows, ranks[name]], Constant(0.0), dim_B),
        }
        if dora:
            norms = DerivedRows(
                name, weight.shape, plain_starts.get(name), partial(_base_norms, experts, name)
            )
            added["magnitude"] = rows, norms, dim_B
        for part, (shape, start, split_dim) in added.items():
            experts.register_parameter(f"{name}_{part}", nn.Parameter(weight.new_empty(shape)))
            starts[f"{name}_{part}"], split_dims[f"{name}_{part}"] = start, split_dim
    mixin = AdaptedPackedExperts if forms else AdaptedExperts
    experts.__class__ = type(f"Adapted{type(experts).__name__}", (mixin, type(experts)), {})
    assert isinstance(experts, AdaptedExperts)
    experts.scalings = dict(scalings)
    experts.is_adapted = True
    experts.adapter = tuple(split_dims)
    experts.hidden_dims = {**experts.hidden_dims, **split_dims}
    experts._add_initializers(**starts)
    return experts


def _base_norms(experts: StackedExperts, name: str, rows: Tensor) -> Tensor:
    """Return the norms of rows of a frozen matrix as they are stored. Rows of a matrix in few bits
    already have the stored values."""
    weight = getattr(experts, name, None)
    return row_norms(rows if weight is None else rows.to(weight.dtype).float())
