"""DiT, the diffusion transformer with classes (Peebles and Xie 2022, arXiv:2212.09748), as in
diffusers' `DiTTransformer2DModel`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import builds
from torchtitan.models.common.diffusion import (
    TIME_FEATURES,
    FullAttention,
    ImageModel,
    TwoLayers,
    flops_of,
    from_patches,
    modulated,
    time_features,
    to_patches,
    xavier,
    zeros,
)
from torchtitan.models.common.feed_forward import gelu_tanh
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.own_tokens import OwnTokens
from torchtitan.tools.errors import UserError


class DiTModel(ImageModel):
    """Predict the velocity of noisy images of a class: `model(images_BCHW, times_B,
    classes=classes_B)` → (B, C, H, W)."""

    @dataclass(kw_only=True, slots=True)
    class Config(ImageModel.Config):
        """Sizes of a DiT."""

        n_layers: int
        """Transformer blocks."""

        n_heads: int
        """Attention heads; divides dim. The feed-forward network has the width 4 dim."""

        n_classes: int
        """Classes; a further one means no class."""

        @builds(lambda: DiTModel)
        def build(self) -> object:
            """Build the model on the current device."""

        @property
        def n_patches(self) -> int:
            return (self.image_size // self.patch_size) ** 2

        def validate(self) -> None:
            ImageModel.Config.validate(self)
            self.check_sizes("n_layers")
            if self.dim % self.n_heads or self.dim % 4:
                raise UserError(
                    f"--model.dim {self.dim} must be a multiple of --model.n_heads {self.n_heads} "
                    "and, for positions in two dimensions, of 4"
                )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        dim = config.dim
        self.patches = xavier(config.channels * config.patch_size**2, dim)
        self.time = TwoLayers(TIME_FEATURES, dim)
        self.classes = with_initializers(
            nn.Embedding(config.n_classes + 1, dim), weight=TruncatedNormal(0.02)
        )
        self.layers = nn.ModuleDict({str(n): DiTBlock(config) for n in range(config.n_layers)})
        self.tokens = OwnTokens()
        self.head = DiTHead(config)

    def forward(self, images_BCHW: Tensor, times_B: Tensor, *, classes: Tensor) -> Tensor:
        """Return velocities, (B, C, H, W).

        Args:
            images_BCHW: noisy images.
            times_B: from 0 (data) to 1 (noise), float32.
            classes: (B,) int64; `n_classes` means no class.
        """
        config = self.config
        if tuple(images_BCHW.shape[1:]) != config.image_shape:
            raise UserError(
                f"images have the shape {list(images_BCHW.shape[1:])}, and the model needs "
                f"{list(config.image_shape)} (channels, height, width)"
            )
        dtype = self.patches.weight.dtype
        patches_BLD = self.patches(to_patches(images_BCHW.to(dtype), config.patch_size))
        x_BLD = self.tokens.take(patches_BLD + _positions(config, images_BCHW.device).to(dtype))
        # Times up to 1,000, as in the model's publication and in diffusers.
        features = time_features(times_B * 1000, divisor=127)
        condition_BD = self.time(features.to(dtype)) + self.classes(classes)
        for block in self.layers.values():
            x_BLD = block(x_BLD, condition_BD)
        patches_BLD = self.tokens.join(self.head(x_BLD, condition_BD))
        return from_patches(patches_BLD, config.patch_size, config.image_size)

    def without_conditions(
        self, conditions: Mapping[str, Tensor], dropped_B: Tensor
    ) -> dict[str, Tensor]:
        """Return the `classes` with no class where `dropped_B`."""
        return {"classes": conditions["classes"].masked_fill(dropped_B, self.config.n_classes)}

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{number}": block for number, block in self.layers.items()}

    def units(self) -> list[nn.Module]:
        return [*self.layers.values(), self.head]

    def flops_per_token(self, seq_len: int) -> float:
        """Return forward and backward operations per image."""
        config = self.config
        blocks: Any = list(self.layers.values())
        once = [self.time, self.head.modulation, *(block.modulation for block in blocks)]
        each = [self.patches, self.head.output, *(part for b in blocks for part in b.per_token())]
        return flops_of(
            nn.ModuleList(each), nn.ModuleList(once), config.n_patches, config.n_layers * config.dim
        )


class DiTBlock(nn.Module):
    """Attention, then a feed-forward network, whose inputs and results a condition modulates
    (adaLN-Zero): x (B, L, dim), condition (B, dim) → (B, L, dim)."""

    def __init__(self, config: DiTModel.Config):
        super().__init__()
        dim = config.dim
        self.head_dim = dim // config.n_heads
        self.modulation = zeros(dim, 6 * dim)
        self.wq, self.wk, self.wv, self.wo = (xavier(dim, dim) for _ in range(4))
        self.attend = FullAttention()
        self.w1, self.w2 = xavier(dim, 4 * dim), xavier(4 * dim, dim)

    def per_token(self) -> list[nn.Module]:
        """Return the layers that every patch passes."""
        return [self.wq, self.wk, self.wv, self.wo, self.w1, self.w2]

    def forward(self, x_BLD: Tensor, condition_BD: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition_BD)).chunk(6, dim=1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts
        normalized = modulated(x_BLD, shift, scale)
        q, k, v = (
            layer(normalized).unflatten(-1, (-1, self.head_dim))
            for layer in (self.wq, self.wk, self.wv)
        )
        x_BLD = x_BLD + gate[:, None] * self.wo(self.attend(q, k, v).flatten(2))
        # In diffusers, this norm has another epsilon than the others.
        normalized = modulated(x_BLD, ffn_shift, ffn_scale, eps=1e-5)
        return x_BLD + ffn_gate[:, None] * self.w2(gelu_tanh(self.w1(normalized)))


class DiTHead(nn.Module):
    """Modulated norm and projection to the pixels of patches: (B, L, dim) → (B, L, C size²)."""

    def __init__(self, config: DiTModel.Config):
        super().__init__()
        self.modulation = zeros(config.dim, 2 * config.dim)
        self.output = zeros(config.dim, config.channels * config.patch_size**2)

    def forward(self, x_BLD: Tensor, condition_BD: Tensor) -> Tensor:
        shift, scale = self.modulation(F.silu(condition_BD)).chunk(2, dim=1)
        return self.output(modulated(x_BLD, shift, scale))


def _positions(config: DiTModel.Config, device: torch.device) -> Tensor:
    """Return sines, then cosines, of each patch's column, then of its row, (L, dim) float32."""
    n, quarter = config.image_size // config.patch_size, config.dim // 4
    places = torch.arange(n, dtype=torch.float32, device=device).double()
    exponents = torch.arange(quarter, dtype=torch.float64, device=device) / quarter
    angles = places[:, None] * torch.exp(-math.log(10_000) * exponents)
    of_place = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = of_place.repeat_interleave(n, dim=0), of_place.repeat(n, 1)
    return torch.cat([columns, rows], dim=1).float()
