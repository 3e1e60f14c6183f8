"""`MXFP8` and `NVFP4`: linear layers and routed experts with products in 8 and 4 bits.

Where torchao has the kernels (GPUs of compute capability 10, such as B200), its training paths
compute them; elsewhere they are emulated (`narrow_products`). Weights, gradients, optimizer and
checkpoints stay as in the plain model.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.components.quantization.block_formats import MXFP8_BLOCK, NVFP4_BLOCK, SIGNS
from torchtitan.components.quantization.narrow_gathers import NVFP4Gathers, gather_mxfp8
from torchtitan.components.quantization.narrow_products import (
    EmulatedProducts,
    MXFP8Products,
    NarrowLinear,
    NVFP4Products,
    Products,
    narrow_experts,
)
from torchtitan.components.quantization.wide_layers import NarrowConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configurable import builds, config_key
from torchtitan.protocols.converter import converter_of
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.initializer import initializers_of, with_initializers
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger
from torchtitan.tools.torchao import check_torchao, import_torchao

_CAPABILITY = 10
"""Major CUDA compute capability of torchao's kernels (B200, B300). Consumer cards with the number
formats (12) need other kernels."""


class BlockConverter(NarrowConverter):
    """Base class of converters to block formats."""

    @dataclass(kw_only=True, slots=True)
    class Config(NarrowConverter.Config):
        """Layers to convert."""

        emulate: bool = False
        """Round like the narrow format, but multiply in float32, also on a device with the
        instructions. On other devices, products are always emulated."""

        @builds(lambda: BlockConverter)
        def build(self) -> object:
            """Build the converter."""

        def check_run(
            self,
            *,
            training: TrainingConfig,
            parallelism: ParallelismConfig,
            compile: CompileConfig,
        ) -> None:
            emulates = bool(self.emulate or reason_to_emulate())
            if not emulates:
                self._check_kernels(training)
            self.check_options(emulates=emulates, training=training)

        def _check_kernels(self, training: TrainingConfig) -> None:
            check_torchao(self.option)
            if training.mixed_precision_param != "bfloat16":
                raise UserError(
                    f"{self.option}: kernels multiply in bfloat16, and "
                    f"--training.mixed_precision_param is {training.mixed_precision_param}; set "
                    f"bfloat16 or {self.option}.emulate"
                )

        def check_options(self, *, emulates: bool, training: TrainingConfig) -> None:
            """Raise `UserError` for options of the format that the run cannot have. `emulates`:
            whether PyTorch's operations compute the products."""

        def check_gather(self, name: str, training: TrainingConfig) -> None:
            """Raise `UserError` if a narrow gather cannot be combined with the training."""
            if training.enable_cpu_offload:
                raise UserError(
                    f"{self.option}.{name} cannot be combined with --training.enable_cpu_offload, "
                    "since FSDP copies weights to the device before it gathers them; remove one "
                    "of them"
                )

    config: Config

    @property
    def emulates(self) -> bool:
        """True if products are computed with PyTorch's operations."""
        return self.config.emulate or reason_to_emulate() is not None

    def convert(self, model: nn.Module) -> None:
        super().convert(model)
        key, option = config_key(self.config), f"{self.config.option}.emulate"
        reason = option if self.config.emulate else reason_to_emulate()
        layers = [each for each in model.modules() if converter_of(each) == key]
        emulated = sum(isinstance(layer.products, EmulatedProducts) for layer in layers)
        computed = len(layers) - emulated
        if computed:
            logger.info("%s: torchao's kernels compute %d layers", key, computed)
        if emulated:
            why = reason or "torchao has no kernels for experts"
            logger.info("%s: %d layers are emulated in float32 (%s)", key, emulated, why)

    def convert_layer(self, name: str, layer: nn.Module) -> nn.Module:
        if isinstance(layer, StackedExperts):
            return narrow_experts(layer, self.products_of_experts(), self.alignment)
        assert isinstance(layer, nn.Linear)
        converted = NarrowLinear(layer, self.products(), self.alignment)
        return with_initializers(converted, **initializers_of(layer))

    @abstractmethod
    def products(self) -> Products:
        """Return how linear layers multiply."""

    def products_of_experts(self) -> Products:
        """Return how routed experts multiply."""
        return self.products()


class MXFP8(BlockConverter):
    """Computes the forward product and both backward products in MXFP8: E4M3 numbers in blocks of
    32 along the sum, with a power of 2 as scale."""

    alignment = MXFP8_BLOCK

    @dataclass(kw_only=True, slots=True)
    class Config(BlockConverter.Config):
        """Layers to convert and recipe."""

        recipe: Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"] = "mxfp8_rceil"
        """torchao's recipes: scales rounded up to a power of 2; `wgrad_with_hp` computes the
        weights' gradient from unrounded operands."""

        fsdp_mxfp8_all_gather: bool = False
        """FSDP gathers the weights of linear layers in 11.5 bits each, which decide how both
        products round them; results are bitwise identical. Unpacked, they need bfloat16's memory
        in addition."""

        def check_options(self, *, emulates: bool, training: TrainingConfig) -> None:
            if self.fsdp_mxfp8_all_gather:
                self.check_gather("fsdp_mxfp8_all_gather", training)

    config: Config

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Let FSDP gather fewer bits, if set. Raise `UserError` if it cannot."""
        if self.config.fsdp_mxfp8_all_gather:
            gather_mxfp8(model_parts, self.config.option)

    def products(self) -> Products:
        wide = self.config.recipe == "mxfp8_rceil_wgrad_with_hp"
        return MXFP8Products(wide) if self.emulates else _MXFP8Kernels(wide)


class NVFP4(BlockConverter):
    """Computes the forward product and both backward products in NVFP4: E2M1 numbers in blocks of
    16 along the sum, with scales in E4M3 and a scale of the whole tensor. Weights have blocks of 16
    × 16. Exclude the last layers to keep the loss near bfloat16's (arXiv:2509.25149, section
    4.1)."""

    alignment = NVFP4_BLOCK

    @dataclass(kw_only=True, slots=True)
    class Config(BlockConverter.Config):
        """Layers to convert and parts of the recipe."""

        stochastic_rounding: bool = True
        """Round gradients to a random neighbor, so that their expected value is exact."""

        hadamard_transforms: bool = True
        """Multiply both operands of the weights' gradient with a random Hadamard matrix, which
        spreads outliers."""

        fsdp_nvfp4_all_gather: bool = False
        """FSDP gathers the weights of linear layers in NVFP4, 4.03 bits each; results are bitwise
        identical. Only of emulated products, since the kernels round whole weights themselves."""

        def check_options(self, *, emulates: bool, training: TrainingConfig) -> None:
            if self.fsdp_nvfp4_all_gather:
                if not emulates:
                    raise UserError(
                        f"{self.option}.fsdp_nvfp4_all_gather: torchao's kernels round whole "
                        f"weights; remove this option, or set {self.option}.emulate"
                    )
                self.check_gather("fsdp_nvfp4_all_gather", training)
            whole = self.stochastic_rounding and self.hadamard_transforms
            if not (whole or emulates):
                raise UserError(
                    f"{self.option}: torchao's kernels have stochastic rounding and Hadamard "
                    f"transforms; set {self.option}.emulate to train without"
                )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self._gathers: NVFP4Gathers | None = None

    def post_init_hook(self, model_parts: list[nn.Module]) -> None:
        """Let FSDP gather NVFP4, if set. Raise `UserError` if it cannot."""
        if self.config.fsdp_nvfp4_all_gather:
            self._gathers = NVFP4Gathers(model_parts, self.config.option)
        self.refresh_hook(model_parts)

    def refresh_hook(self, model_parts: list[nn.Module]) -> None:
        if self._gathers is not None:
            self._gathers.refresh()

    def products(self) -> Products:
        return self._emulated() if self.emulates else _NVFP4Kernels()

    def products_of_experts(self) -> Products:
        """Return emulated products: torchao has no grouped ones with gradients."""
        return self._emulated()

    def has_kernels(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear)

    def reason_to_skip(self, name: str, layer: nn.Module) -> str:
        multiple = _KERNEL_SIDES
        if not self.emulates and isinstance(layer, nn.Linear):
            if any(side % multiple for side in (layer.in_features, layer.out_features)):
                return f"inputs or outputs not a multiple of {multiple}"
        return super().reason_to_skip(name, layer)

    def _emulated(self) -> EmulatedProducts:
        return NVFP4Products(self.config.stochastic_rounding, self.config.hadamard_transforms)


_KERNEL_SIDES = 128
"""Divisor that torchao's NVFP4 kernels require of inputs, outputs and rows."""


def _whole_rows(x_NI: Tensor, multiple: int) -> Tensor:
    """Append rows of zeros, which change no scale and no gradient, up to a multiple: kernels sum
    over rows in the weights' gradient. Generation has one row at a time."""
    return F.pad(x_NI, (0, 0, 0, -len(x_NI) % multiple))


class _MXFP8Kernels:
    """torchao's products in MXFP8."""

    def __init__(self, wide_weight_gradient: bool):
        self.options = {
            "kernel_preference": import_torchao(
                "torchao.quantization.quantize_.common.kernel_preference"
            ).KernelPreference.AUTO,
            "scale_calculation_mode": import_torchao(
                "torchao.prototype.mx_formats.config"
            ).ScaleCalculationMode.RCEIL,
            "wgrad_with_hp": wide_weight_gradient,
        }

    def multiply(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None = None
    ) -> Tensor:
        library = import_torchao("torchao.prototype.moe_training.mxfp8_linear")
        x_MI = _whole_rows(x_NI, MXFP8_BLOCK)
        y_MO: Tensor = library._to_mxfp8_then_scaled_mm(x_MI, weight_OI, **self.options)
        return y_MO[: len(x_NI)]

    def multiply_experts(
        self, rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        library = import_torchao("torchao.prototype.moe_training.mxfp8_grouped_mm")
        y_RO: Tensor = library._to_mxfp8_then_scaled_grouped_mm(
            rows_RI, weight_EOI.mT, ends_E, pad_token_groups_for_grouped_mm=True, **self.options
        )
        return y_RO


class _NVFP4Kernels:
    """torchao's products in NVFP4. Stochastic rounding draws from the device's generator, which is
    in checkpoints; under tensor parallelism, each shard has its own scale of the tensor."""

    def multiply(
        self, x_NI: Tensor, weight_OI: Tensor, group: ProcessGroup | None = None
    ) -> Tensor:
        library = import_torchao("torchao.prototype.moe_training.nvfp4_training.nvfp4_linear")
        seed = torch.zeros(1, dtype=torch.int64, device=x_NI.device)
        x_MI = _whole_rows(x_NI, _KERNEL_SIDES)
        y_MO: Tensor = library.nvfp4_linear(x_MI, weight_OI, sign_vector=SIGNS, sr_seed=seed)
        return y_MO[: len(x_NI)]

    def multiply_experts(
        self, rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        raise NotImplementedError


def reason_to_emulate() -> str | None:
    """Return the reason why this machine has no kernels for block formats; None if it has."""
    if not torch.cuda.is_available():
        return "this machine has no GPU"
    capability = torch.cuda.get_device_capability()
    return (
        f"{torch.cuda.get_device_name()} has compute capability "
        f"{'.'.join(map(str, capability))}, and torchao's kernels need {_CAPABILITY}"
        if capability[0] != _CAPABILITY
        else None
    )
