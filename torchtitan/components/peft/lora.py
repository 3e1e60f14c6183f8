"""Low-rank adapters next to frozen weights: LoRA (Hu et al. 2021, arXiv:2106.09685), rsLoRA's scale
(Kalajdzievski 2023, arXiv:2312.03732), DoRA (Liu et al. 2024, arXiv:2402.09353), and QLoRA
(Dettmers et al. 2023, arXiv:2305.14314), which keeps the frozen weights in few bits.

An adapted matrix is `W + scaling · B A`, with W frozen and A and B trained. DoRA trains the length
of each row, its magnitude: `magnitude · (W + scaling · B A) / ‖W + scaling · B A‖`.
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.components.quantization import nf4
from torchtitan.components.quantization.narrow_products import NarrowLinear, narrow_linear
from torchtitan.components.quantization.packed_layers import (
    PackedLayer,
    pack_linear,
    packed_linear,
)
from torchtitan.components.weights.few_bits import FewBits
from torchtitan.distributed.gradients import redistribute_like, row_norms
from torchtitan.protocols.initializer import (
    Constant,
    DerivedRows,
    Initializer,
    TruncatedNormal,
    Uniform,
    initializers_of,
    with_initializers,
)
from torchtitan.protocols.model import ConvertedModule
from torchtitan.protocols.sharding import with_features
from torchtitan.tools.sharded import is_dtensor


class AdaptedLayer(ConvertedModule):
    """A layer with the frozen parameters of the plain layer and an adapter with the trained
    parameters `lora_A` and `lora_B`. `adapter` names all trained parameters; `scaling` multiplies
    the adapter's output."""

    weight: Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, rank: int, scaling: float):
        nn.Module.__init__(self)  # the plain class's __init__ would create new parameters
        self.rank, self.scaling = rank, scaling
        self.is_adapted = True
        """False to compute what the plain layer does; see `adapters_off`."""
        self.adapter: tuple[str, ...] = ("lora_A", "lora_B")

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(name for name in self.adapter if name not in self.derived)

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        adapter = {name: own[name].float() for name in self.adapter}
        bias = {"bias": own["bias"]} if "bias" in own else {}
        return {"weight": self._merge(own["weight"].float(), adapter), **bias}

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in own.items() if name not in self.adapter}

    def base_weight(self) -> Tensor:
        """Return the frozen weight, in the plain layer's shape."""
        return self.weight

    def effective_weight(self) -> Tensor:
        """Return the adapted matrix, with a gradient for the adapter."""
        if not self.is_adapted:
            return self.base_weight()
        return self._merge(self.base_weight(), {name: getattr(self, name) for name in self.adapter})

    @abstractmethod
    def _merge(self, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        """Return the adapted matrix in the type of the plain `weight`; `adapter` has the trained
        parameters by name."""

    def _add_initializers(self, **initializers: Initializer) -> None:
        with_initializers(self, **initializers_of(self), **initializers)


class LoRALinear(AdaptedLayer, nn.Linear):
    """A linear layer with an adapter: `y = x Wᵀ + b + scaling · dropout(x) Aᵀ Bᵀ`; for DoRA, see
    `forward`.

    Parameters: `weight` (out, in) and, if present, `bias` (out,), both frozen; `lora_A` (rank, in)
    and `lora_B` (out, rank); with `dora`, `magnitude` (out,), which is trained too. The plain
    layer's parameters, with their initializers, are reused and frozen. `scaling` multiplies the
    adapter's output; `dropout` is the probability for its inputs."""

    magnitude: nn.Parameter | None

    def __init__(self, linear: nn.Linear, *, rank: int, scaling: float, dropout: float, dora: bool):
        super().__init__(rank, scaling)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dropout = dropout
        plain = linear.weight
        self._adopt_base_layer(linear)
        self.bias = linear.bias
        if linear.bias is not None:
            linear.bias.requires_grad_(False)
            self._add_initializers(
                **{name: x for name, x in initializers_of(linear).items() if name == "bias"}
            )
        self.lora_A = nn.Parameter(plain.new_empty(rank, self.in_features))
        self.lora_B = nn.Parameter(plain.new_empty(self.out_features, rank))
        # As in peft: A starts like a linear layer in torch, Kaiming uniform with a = √5.
        self._add_initializers(
            lora_A=Uniform(-(self.in_features**-0.5), self.in_features**-0.5), lora_B=Constant(0.0)
        )
        with_features(self, lora_A=(None, "in"), lora_B=("out", None))
        self.register_parameter("magnitude", None)
        if dora:
            self.adapter += ("magnitude",)
            self.magnitude = nn.Parameter(plain.new_empty(self.out_features))
            start = DerivedRows(
                "weight", plain.shape, _weight_initializer(linear), self._base_row_norms
            )
            self._add_initializers(magnitude=start)
            with_features(self, magnitude=("out",))

    def _adopt_base_layer(self, linear: nn.Linear) -> None:
        """Reuse and freeze the plain layer's weight, with its initializer."""
        self.weight = linear.weight.requires_grad_(False)
        if start := _weight_initializer(linear):
            self._add_initializers(weight=start)

    def base_output(self, x: Tensor) -> Tensor:
        """Return the plain layer's output with bias: (..., in) → (..., out)."""
        return F.linear(x, self.weight, self.bias)

    def base_rows(self, rows: Tensor) -> Tensor:
        """Return rows of the plain weight, (n, in) in float32, rounded to this layer's storage
        precision."""
        return rows.to(self.weight.dtype).float()

    def _base_row_norms(self, rows: Tensor) -> Tensor:
        return row_norms(self.base_rows(rows))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out). DoRA is computed as a change of the plain layer's output, so
        that the initial output is exactly the same. As in peft, dropout applies to the whole
        change."""
        base = self.base_output(x)
        if not self.is_adapted:
            return base
        inputs = _apply_dropout(x, self.dropout) if self.training and self.dropout else x
        lora_A, lora_B = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
        down = F.linear(inputs, lora_A) * self.scaling  # the narrow side, where scaling costs least
        if self.magnitude is None:
            return _add_product(base, down, lora_B)
        with torch.no_grad():
            adapted = self._add_adapter(self.base_weight(), self.lora_A, self.lora_B)
        scale = row_scale(self.magnitude, row_norms(adapted))
        product = base if inputs is x else self.base_output(redistribute_like(inputs, x))
        if self.bias is not None:
            product = product - self.bias
        return _add_product(
            base + (scale - 1).to(base.dtype) * product,
            down,
            scale.to(base.dtype)[:, None] * lora_B,
        )

    def _merge(self, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        adapted = self._add_adapter(weight, adapter["lora_A"], adapter["lora_B"])
        if self.magnitude is None:
            return adapted
        return (row_scale(adapter["magnitude"], row_norms(adapted.detach()))[:, None] * adapted).to(
            adapted.dtype
        )

    def _add_adapter(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> Tensor:
        return torch.addmm(
            weight, lora_B.to(weight.dtype), lora_A.to(weight.dtype), alpha=self.scaling
        )

    def extra_repr(self) -> str:
        adapter = f"rank={self.rank}, scaling={self.scaling:g}, dropout={self.dropout:g}"
        return f"{super().extra_repr()}, {adapter}, dora={self.magnitude is not None}"


class NarrowLoRALinear(LoRALinear):
    """A `LoRALinear` whose frozen weight multiplies in the narrow type of its `NarrowLinear`."""

    def _adopt_base_layer(self, linear: nn.Linear) -> None:
        super()._adopt_base_layer(linear)
        assert isinstance(linear, NarrowLinear)
        self.products, self.part_multiple = linear.products, linear.part_multiple

    def base_output(self, x: Tensor) -> Tensor:
        return narrow_linear(self.products, x, self.weight, self.bias)


class QLoRALinear(PackedLayer, LoRALinear):
    """A `LoRALinear` with a frozen weight in few bits, by default in our NF4: `packed`, `scales`, …
    (`components.weights.few_bits`) instead of `weight`. Products are computed in the type of the
    inputs."""

    def __init__(self, linear: nn.Linear, *, form: FewBits = nf4.FORM, **options: Any):
        self._form = form
        LoRALinear.__init__(self, linear, **options)

    def _adopt_base_layer(self, linear: nn.Linear) -> None:
        pack_linear(self, linear.weight, _weight_initializer(linear), self._form)

    def base_weight(self) -> Tensor:
        return self.unpacked("weight", self.lora_A.dtype)

    def base_output(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.forms["weight"], self.parts_of("weight"), self.bias)

    def base_rows(self, rows: Tensor) -> Tensor:
        """Return rows of the plain weight as they are stored; published ones already are."""
        if self.forms["weight"] != nf4.FORM:
            return rows
        return nf4.unpack(*nf4.pack(rows), torch.float32)

    def plain_state(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return LoRALinear.plain_state(self, self.plain_base(own))

    def plain_types(self, own: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
        types = PackedLayer.plain_types(self, own)
        return {name: dtype for name, dtype in types.items() if name not in self.adapter}


def _add_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return `y + x weightᵀ`, (..., out), in one pass over `y`. DTensors have none: flattening
    would gather them."""
    if is_dtensor(x):
        return y + F.linear(x, weight)
    return torch.addmm(y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), weight.T).view_as(y)


class LoRAEmbedding(AdaptedLayer, nn.Embedding):
    """An embedding of V tokens in D features with an adapter: the rows of `W + scaling · (B A)ᵀ`.

    Parameters: `weight` (V, D), the plain layer's frozen weight with its initializer; `lora_A`
    (rank, V) and `lora_B` (D, rank).
    """

    def __init__(self, embedding: nn.Embedding, *, rank: int, scaling: float):
        super().__init__(rank, scaling)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = embedding.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, self.num_embeddings))
        self.lora_B = nn.Parameter(self.weight.new_empty(self.embedding_dim, rank))
        # As in peft. With B = 0 instead, the gradients of all rows of A would initially be 0.
        normal = TruncatedNormal(1.0, bound=math.inf)
        if start := _weight_initializer(embedding):
            self._add_initializers(weight=start)
        self._add_initializers(lora_A=Constant(0.0), lora_B=normal)
        with_features(self, lora_A=(None, "in"), lora_B=("out", None))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (...) to (..., D)."""
        base = _look_up(tokens, self.weight)
        if not self.is_adapted:
            return base
        added = F.linear(_look_up(tokens, self.lora_A.T), self.lora_B) * self.scaling
        return base + added.to(base.dtype)

    def _merge(self, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        lora_A, lora_B = (adapter[name].to(weight.dtype) for name in ("lora_A", "lora_B"))
        return torch.addmm(weight, lora_A.T, lora_B.T, alpha=self.scaling)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}, "
            f"scaling={self.scaling:g}"
        )


@contextlib.contextmanager
def adapters_off(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Compute with the base model inside the block: adapted layers skip their adapters."""
    layers = [
        layer for part in parts for layer in part.modules() if isinstance(layer, AdaptedLayer)
    ]
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def row_scale(magnitude: Tensor, lengths: Tensor) -> Tensor:
    """Return the scale of each row of an adapted matrix, (…, out) in float32, from the rows' norms,
    which are constants in the backward pass (DoRA, section 4.3): rounded like the magnitude, so
    equal values cancel. Zero rows stay zero."""
    lengths = lengths.to(magnitude.dtype).float()
    return magnitude.float() / lengths.masked_fill(lengths == 0, 1.0)


def _weight_initializer(layer: nn.Module) -> Initializer | None:
    """Return the initial distribution of a plain layer's weight; None if the model supplies its
    values."""
    return initializers_of(layer).get("weight")


def _apply_dropout(x: Tensor, probability: float) -> Tensor:
    """Apply dropout to a layer's inputs (B, L, in). Under tensor parallelism, each rank draws a
    mask for its own shard or, if the inputs are replicated, for its part of the sequence, so that
    all replicas get the same mask."""
    if not is_dtensor(x):
        return F.dropout(x, probability)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Shard(1)] if x.placements == (Replicate(),) else x.placements
    local = F.dropout(x.redistribute(placements=placements).to_local(), probability)
    return DTensor.from_local(local, x.device_mesh, placements, shape=x.shape, stride=x.stride())


def _look_up(tokens: Tensor, table: Tensor) -> Tensor:
    """Return rows of `table` by token id: (B, L) → (B, L, …). Under tensor parallelism, the ranks'
    partial results are reduce-scattered along the sequence immediately, since PyTorch cannot
    multiply such partial sums."""
    rows = F.embedding(tokens, table)
    if not is_dtensor(rows):
        return rows
    from torch.distributed.tensor import Shard

    return rows.redistribute(placements=[Shard(1)])
