"""`Float8LinearConverter`: linear layers and routed experts computed in 8-bit floating point by
torchao.

A tensor t becomes float8(s t), with the scale s = max / max |t| over the whole tensor
("tensorwise") or over each row of a product's operand ("rowwise"); max is the largest number of the
8-bit type: 448 in e4m3, which is used for inputs, weights and, with rowwise scales, gradients;
57344 in e5m2, which is used for gradients with tensorwise scales. Each product computes new scales
and divides its result by them (arXiv:2209.05433). Weights, gradients and optimizer keep their
types; checkpoints stay plain.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.components.quantization.narrow_products import Float8Products, narrow_experts
from torchtitan.components.quantization.wide_layers import NarrowConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.initialize import canonical_name, local_part
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.initializer import initializers_of, with_initializers
from torchtitan.tools.errors import UserError
from torchtitan.tools.sharded import is_dtensor
from torchtitan.tools.torch_private import dtensor_like
from torchtitan.tools.torchao import check_torchao, import_torchao

_ALIGNMENT = 16
"""Divisor that float8 kernels require of all sides of the matrices, except the rows of the
first."""

_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8 products (Ada)."""

_CAPABILITY_OF_EXPERTS = (9, 0)
"""CUDA compute capability of the GPUs with float8 products of experts (Hopper)."""


class Float8LinearConverter(NarrowConverter):
    """Computes the forward product and both backward products of linear layers in float8. On a GPU,
    train with `--compile.enable`: casts that are not fused with other operations cost more than the
    products save."""

    @dataclass(kw_only=True, slots=True)
    class Config(NarrowConverter.Config):
        """Layers to convert and scaling of their tensors."""

        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
        """Scales of whole tensors (the fastest), of rows (more accurate; powers of 2), or of rows
        with the weights' gradient in the higher precision (the most accurate). Only "rowwise"
        converts routed experts, on GPUs of compute capability 9.0 or with emulation."""

        emulate: bool = False
        """Round like float8, but multiply in float32: runs everywhere, slower than without
        float8."""

        fsdp_float8_all_gather: bool = False
        """FSDP gathers weights in float8, at half the traffic of bfloat16: they are rounded before
        the gather, not after. In float32, results are bitwise identical; in bfloat16, weights are
        rounded once instead of twice. Tensorwise only; no effect without FSDP."""

        def validate(self) -> None:
            NarrowConverter.Config.validate(self)
            option = self.option
            if self.fsdp_float8_all_gather and self.recipe != "tensorwise":
                raise UserError(
                    f"{option}.fsdp_float8_all_gather cannot be combined with {option}.recipe "
                    f"{self.recipe}: its products round the same weights in two ways; set recipe "
                    "tensorwise"
                )

        def check_run(
            self,
            *,
            training: TrainingConfig,
            parallelism: ParallelismConfig,
            compile: CompileConfig,
        ) -> None:
            check_torchao(self.option)
            if self.emulate:
                return
            pipelined = parallelism.pipeline_parallel_degree > 1
            sequences = (
                parallelism.pipeline_parallel_microbatch_size
                if pipelined
                else training.local_batch_size
            )
            tokens = sequences * training.seq_len // parallelism.context_parallel_degree
            if tokens % _ALIGNMENT and self.recipe != "rowwise_with_gw_hp":
                raise UserError(
                    f"{self.option}: float8 kernels sum over multiples of {_ALIGNMENT} tokens, and "
                    f"a rank has {tokens} at a time; change --training.seq_len {training.seq_len}"
                )

        def check_device(self) -> None:
            if not self.emulate and (reason := _missing_kernels_reason()) is not None:
                raise UserError(
                    f"{self.option}: float8 products need a GPU of compute capability 8.9 or "
                    f"above, and {reason}; {self.option}.emulate emulates them, slowly, on any "
                    "device"
                )

    config: Config
    alignment = _ALIGNMENT

    def reason_to_skip(self, name: str, layer: nn.Module) -> str:
        if isinstance(layer, StackedExperts):
            option = self.config.option
            if self.config.recipe != "rowwise":
                return f"routed experts, which only {option}.recipe rowwise multiplies"
            if not self.config.emulate and not _multiplies_experts():
                return (
                    "routed experts, since their kernels need a GPU of compute capability 9.0 "
                    f"({option}.emulate needs none)"
                )
        return NarrowConverter.reason_to_skip(self, name, layer)

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        if isinstance(layer, StackedExperts):
            if self.config.emulate:
                return narrow_experts(layer, Float8Products(), part_multiple=1)
            return narrow_experts(layer, _Float8Kernels(), part_multiple=_ALIGNMENT)
        float8 = import_torchao("torchao.float8")
        settings = dataclasses.replace(
            float8.Float8LinearConfig.from_recipe_name(self.config.recipe),
            emulate=self.config.emulate,
            enable_fsdp_float8_all_gather=self.config.fsdp_float8_all_gather,
        )
        converted: nn.Module = float8.convert_to_float8_training(layer, config=settings)
        if self.config.fsdp_float8_all_gather:
            converted.register_state_dict_post_hook(_give_plain_weight)
        if not self.config.emulate:
            converted.part_multiple = _ALIGNMENT  # type: ignore[assignment]  # of inputs and outputs per rank
        return with_initializers(converted, **initializers_of(layer))

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Compute the scales for the first step if FSDP gathers float8; raise `UserError` if it
        cannot."""
        if self.config.fsdp_float8_all_gather:
            for part in model_parts:
                self._check_shards(part)
        self.refresh_hook(model_parts)

    def refresh_hook(self, model_parts: list[nn.Module]) -> None:
        """Compute the scales of all weights with one all-reduce (two with tensor parallelism) if
        FSDP gathers float8. Otherwise, each weight would need its own all-reduce when gathered.
        Weights in CPU memory still do, since FSDP copies them to the device without the scale."""
        if self.config.fsdp_float8_all_gather:
            import_torchao("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(
                nn.ModuleList(model_parts)
            )

    def _check_shards(self, part: nn.Module) -> None:
        """Reject uneven shards: torchao passes unpadded rows to FSDP, and ranks with fewer would
        make all hang."""
        from torchao.float8.float8_linear import Float8Linear

        for name, module in part.named_modules():
            if not (isinstance(module, Float8Linear) and is_dtensor(module.weight)):
                continue
            mesh = module.weight.device_mesh
            placements = module.weight.placements
            rows = module.weight.shape[0]
            # By attribute: FSDP's placement of rows that tensor parallelism has sharded is not a
            # `Shard`.
            sizes = [
                n
                for n, place in zip(mesh.shape, placements, strict=True)
                if getattr(place, "dim", None) == 0
            ]
            ranks = math.prod(sizes)
            if rows % ranks:
                option = self.config.option
                raise UserError(
                    f"{option}.fsdp_float8_all_gather: the {rows} outputs of "
                    f"{canonical_name(name)} cannot be sharded evenly over {ranks} ranks; remove "
                    f"this option, or exclude the layer ({option}.exclude)"
                )


class _Float8Kernels:
    """torchao's products of experts with rowwise scales. Their results are in bfloat16."""

    def multiply(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None = None
    ) -> Tensor:
        raise NotImplementedError

    def multiply_experts(
        self, rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        """Kernels sum over whole groups of 16 rows in the weights' gradient, so each expert gets
        rows of zeros, which change no scale of another row, up to a multiple. Nothing waits for the
        numbers of rows."""
        library = import_torchao("torchao.prototype.moe_training.fp8_grouped_mm")
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        padded_E = -(-counts_E // _ALIGNMENT) * _ALIGNMENT
        padded_ends_E = padded_E.cumsum(0, dtype=torch.int32)
        moved_E = (padded_ends_E - padded_E) - (ends_E - counts_E)
        places_R = torch.arange(len(rows_RI), device=rows_RI.device)
        places_R = places_R + moved_E[torch.searchsorted(ends_E, places_R, right=True)]
        n_padded = len(rows_RI) + _ALIGNMENT * len(ends_E)  # at most
        n_padded = -(-n_padded // _ALIGNMENT) * _ALIGNMENT
        padded_rows = rows_RI.new_zeros(n_padded, rows_RI.shape[1]).index_copy(0, places_R, rows_RI)
        y_PO: Tensor = library._to_fp8_rowwise_then_scaled_grouped_mm(
            padded_rows, weight_EOI.mT, padded_ends_E, pad_token_groups_for_grouped_mm=False
        )
        return y_PO[places_R].to(rows_RI.dtype)


def _multiplies_experts() -> bool:
    return (
        torch.cuda.is_available() and torch.cuda.get_device_capability() == _CAPABILITY_OF_EXPERTS
    )


def _give_plain_weight(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    """Replace torchao's wrapper in a state dict with the plain tensor that it wraps, without
    copying. Otherwise, checkpoints would refer to the wrapper's class."""
    key = f"{prefix}weight"
    weight = state_dict[key].detach()
    plain = local_part(weight)._tensor.detach()  # type: ignore[attr-defined]
    state_dict[key] = dtensor_like(plain, weight) if is_dtensor(weight) else plain


def _missing_kernels_reason() -> str | None:
    """Return the reason why this machine has no float8 products; None if it has."""
    if not torch.cuda.is_available():
        return "this machine has none"
    capability = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}"
        if capability < _CAPABILITY
        else None
    )
