"""A small U-ViT (arXiv:2209.12152) on signals: patches of time are tokens, and the first blocks are
connected to the last."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.configurable import builds
from torchtitan.models.common.diffusion import FullAttention, xavier
from torchtitan.protocols.initializer import TruncatedNormal, with_initializers
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.own_tokens import OwnTokens
from torchtitan.tools.errors import UserError

TIME_FEATURES = 32


class UViT(BaseModel):
    """Predict the velocity of noisy signals of a class: `model(x_BCT, times_B, classes_B)` → (B, C,
    T)."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Sizes of a U-ViT."""

        vocab_size: int | None = 0
        n_layers: int = 3
        """Blocks, an odd number."""
        n_heads: int = 4
        length: int = 32
        channels: int = 2
        patch: int = 4
        n_classes: int = 3

        @builds(lambda: UViT)
        def build(self) -> Any:
            """Build the model on the current device."""

        def validate(self) -> None:
            if self.n_layers % 2 == 0:
                raise UserError(f"--model.n_layers {self.n_layers} must be odd")

        @property
        def divides_samples(self) -> bool:
            return True

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            return {"n_heads": self.n_heads}

    splits_sequences = False
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        dim, width = config.dim, config.channels * config.patch
        middle = config.n_layers // 2
        self.places = nn.Parameter(torch.empty(config.length // config.patch, dim))
        with_initializers(self, places=TruncatedNormal(0.02))
        self.patches, self.output = xavier(width, dim), xavier(dim, width)
        self.time = xavier(TIME_FEATURES, dim)
        self.classes = with_initializers(
            nn.Embedding(config.n_classes, dim), weight=TruncatedNormal(0.02)
        )
        self.layers = nn.ModuleDict(
            {str(n): Block(dim, config.n_heads, is_late=n > middle) for n in range(config.n_layers)}
        )
        self.tokens = OwnTokens()

    def forward(self, x_BCT: Tensor, times_B: Tensor, classes_B: Tensor) -> Tensor:
        config = self.config
        octaves = torch.arange(TIME_FEATURES // 2, device=x_BCT.device)
        angles = times_B[:, None] * 2 ** (octaves / 2)
        features = torch.cat([angles.cos(), angles.sin()], dim=1).to(self.places.dtype)
        condition_BD = self.time(features) + self.classes(classes_B)
        n_signals, _, length = x_BCT.shape
        patches = x_BCT.reshape(n_signals, config.channels, length // config.patch, config.patch)
        rows = patches.movedim(2, 1).flatten(2)
        x_BLD = self.tokens.take(self.patches(rows.to(self.places.dtype)) + self.places)
        kept: list[Tensor] = []
        for n, block in enumerate(self.layers.values()):
            if n < config.n_layers // 2:
                kept.append(x_BLD)
            x_BLD = block(x_BLD, condition_BD, kept.pop() if n > config.n_layers // 2 else None)
        rows = self.tokens.join(self.output(F.layer_norm(x_BLD, x_BLD.shape[-1:])))
        patches = rows.reshape(n_signals, -1, config.channels, config.patch)
        return patches.movedim(1, 2).flatten(2)

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{n}": block for n, block in self.layers.items()}

    def units(self) -> list[nn.Module]:
        return list(self.layers.values())

    def flops_per_token(self, seq_len: int) -> float:
        """Return forward and backward operations per signal."""
        config = self.config
        n_tokens = config.length // config.patch
        attention = 12.0 * config.n_layers * config.dim * n_tokens**2
        return 6.0 * n_tokens * sum(p.numel() for p in self.layers.parameters()) + attention


class Block(nn.Module):
    """Attention and a feed-forward network: (B, L, dim) → (B, L, dim). A late one also reads the
    input of an early one."""

    def __init__(self, dim: int, n_heads: int, *, is_late: bool):
        super().__init__()
        self.width = dim // n_heads
        self.joined = xavier(2 * dim, dim) if is_late else None
        self.wq, self.wk, self.wv, self.wo = (xavier(dim, dim) for _ in range(4))
        self.attend = FullAttention()
        self.w1, self.w2 = xavier(dim, 4 * dim), xavier(4 * dim, dim)

    def forward(self, x_BLD: Tensor, condition_BD: Tensor, early_BLD: Tensor | None) -> Tensor:
        if self.joined is not None:
            assert early_BLD is not None
            x_BLD = self.joined(torch.cat([x_BLD, early_BLD], dim=2))
        normalized = F.layer_norm(x_BLD + condition_BD[:, None], x_BLD.shape[-1:])
        q, k, v = (
            layer(normalized).unflatten(2, (-1, self.width))
            for layer in (self.wq, self.wk, self.wv)
        )
        x_BLD = x_BLD + self.wo(self.attend(q, k, v).flatten(2))
        hidden = F.gelu(self.w1(F.layer_norm(x_BLD, x_BLD.shape[-1:])))
        x_BLD = x_BLD + self.w2(hidden)
        return x_BLD
