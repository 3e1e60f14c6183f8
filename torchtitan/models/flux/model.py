"""The transformer of FLUX.1 (Black Forest Labs 2024), as in diffusers' `FluxTransformer2DModel`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

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
from torchtitan.protocols.initializer import Constant, with_initializers
from torchtitan.protocols.own_tokens import OwnTokens
from torchtitan.tools.errors import UserError, require

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each token, (L, 1, head width / 2) float32."""

_PLAIN_GUIDANCE = 1.0
"""Guidance of a training step, for models that guidance was distilled into."""


class FluxModel(ImageModel):
    """Predict the velocity of noisy latents under a text: `model(images_BCHW, times_B, text=…,
    pooled=…)` → (B, C, H, W)."""

    @dataclass(kw_only=True, slots=True)
    class Config(ImageModel.Config):
        """Sizes of a FLUX transformer."""

        n_double: int
        """Blocks with separate weights for text and image."""

        n_single: int
        """Blocks with the same weights for both, after those."""

        axes: list[int] = field(default_factory=lambda: [16, 56, 56])
        """Elements of a head that rotate with a token's index, row and column; even, and together
        the width of a head."""

        channels: int = 16
        """Channels of latents."""

        image_size: int = 128
        """Height and width of latents in training; the weights fit any size."""

        text_dim: int = 4096
        """Width of the states of the text encoder."""

        pooled_dim: int = 768
        """Width of the pooled text."""

        guidance: bool = False
        """Read the scale of guidance, which was distilled into the model (dev)."""

        n_classes: int = 1
        """Classes of data without captions; a fixed text represents each of them."""

        @builds(lambda: FluxModel)
        def build(self) -> object:
            """Build the model on the current device."""

        @property
        def n_layers(self) -> int:
            return self.n_double + self.n_single

        @property
        def layer_kinds(self) -> list[object]:
            """Kinds in turn, as far as both have layers, so that a model of the first few has
            both."""
            pairs = min(self.n_double, self.n_single)
            others = "double" if self.n_double > pairs else "single"
            return [*["double", "single"] * pairs, *[others] * (self.n_layers - 2 * pairs)]

        def with_layers(self, n_layers: int) -> Self:
            first = self.layer_kinds[:n_layers]
            return replace(self, n_double=first.count("double"), n_single=first.count("single"))

        def validate(self) -> None:
            ImageModel.Config.validate(self)
            self.check_sizes("text_dim", "pooled_dim")
            for name in ("n_double", "n_single"):
                value = getattr(self, name)
                require(0 <= value <= 2000, f"--model.{name}", value, "from 0 to 2,000")
            if self.dim != self.n_heads * sum(self.axes) or len(self.axes) != 3:
                raise UserError(
                    f"--model.axes {self.axes} must be three numbers whose sum is the width of a "
                    f"head, --model.dim {self.dim} / --model.n_heads {self.n_heads}"
                )
            require(all(n > 0 and n % 2 == 0 for n in self.axes), "--model.axes", self.axes, "even")

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        dim, patch = config.dim, config.channels * config.patch_size**2
        self.patches = xavier(patch, dim)
        self.text = xavier(config.text_dim, dim)
        self.time = TwoLayers(TIME_FEATURES, dim)
        self.guidance = TwoLayers(TIME_FEATURES, dim) if config.guidance else None
        self.pooled = TwoLayers(config.pooled_dim, dim)
        self.double_blocks = nn.ModuleDict(
            {str(n): DoubleBlock(config) for n in range(config.n_double)}
        )
        self.single_blocks = nn.ModuleDict(
            {str(n): SingleBlock(config) for n in range(config.n_single)}
        )
        self.tokens = OwnTokens()
        self.head = Head(dim, patch)

    def forward(
        self,
        images_BCHW: Tensor,
        times_B: Tensor,
        *,
        text: Tensor,
        pooled: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Return velocities, (B, C, H, W).

        Args:
            images_BCHW: noisy latents of any size.
            times_B: from 0 (data) to 1 (noise), float32.
            text: states of the text encoder, (B, T, text_dim).
            pooled: pooled text, (B, pooled_dim).
            guidance: scale of guidance, (B,), for models that read it; None: 1.
        """
        config = self.config
        height, width = (size // config.patch_size for size in images_BCHW.shape[2:])
        dtype = self.patches.weight.dtype
        image_BLD = self.patches(to_patches(images_BCHW.to(dtype), config.patch_size))
        # The type of hidden states rounds times before they are multiplied, as in diffusers.
        condition_BD = self._embed_scalar(self.time, times_B, dtype) + self.pooled(pooled.to(dtype))
        if self.guidance is not None:
            scale_B = torch.full_like(times_B, _PLAIN_GUIDANCE) if guidance is None else guidance
            condition_BD = condition_BD + self._embed_scalar(self.guidance, scale_B, dtype)
        text_BTD = self.text(text.to(dtype))
        rope = self._own_rope(text_BTD.shape[1], height, width, images_BCHW.device)
        text_BTD, image_BLD = self.tokens.take(text_BTD), self.tokens.take(image_BLD)
        for block in self.double_blocks.values():
            text_BTD, image_BLD = block(text_BTD, image_BLD, condition_BD, rope)
        x_BLD = torch.cat([text_BTD, image_BLD], dim=1)
        for block in self.single_blocks.values():
            x_BLD = block(x_BLD, condition_BD, rope)
        patches = self.head(x_BLD[:, text_BTD.shape[1] :], condition_BD)
        return from_patches(self.tokens.join(patches), config.patch_size, images_BCHW.shape[2])

    def _own_rope(self, n_text: int, height: int, width: int, device: torch.device) -> Rope:
        """Return the angles of this rank's tokens of text, then of its patches."""
        cos, sin = rope_of(self.config.axes, n_text, height, width, device)
        of_text, of_image = slice(n_text), slice(n_text, None)
        own = [
            torch.cat([self.tokens.take(angles[part], dim=0) for part in (of_text, of_image)])
            for angles in (cos, sin)
        ]
        return own[0], own[1]

    @staticmethod
    def _embed_scalar(layers: nn.Module, values_B: Tensor, dtype: torch.dtype) -> Tensor:
        embedding: Tensor = layers(time_features(values_B.to(dtype) * 1000, divisor=128).to(dtype))
        return embedding

    def without_conditions(
        self, conditions: Mapping[str, Tensor], dropped_B: Tensor
    ) -> dict[str, Tensor]:
        """Return the conditions with zeros instead of the text where `dropped_B`."""
        text, pooled = conditions["text"], conditions["pooled"]
        return {
            **conditions,
            "text": text.masked_fill(dropped_B[:, None, None], 0),
            "pooled": pooled.masked_fill(dropped_B[:, None], 0),
        }

    def blocks(self) -> dict[str, nn.Module]:
        return {
            f"{kind}.{number}": block
            for kind in ("double_blocks", "single_blocks")
            for number, block in getattr(self, kind).items()
        }

    def units(self) -> list[nn.Module]:
        return [*self.blocks().values(), self.head]

    def flops_per_token(self, seq_len: int) -> float:
        """Return forward and backward operations per image, without its text."""
        config, blocks = self.config, list[Any](self.blocks().values())
        once = [self.time, self.pooled, self.head.modulation]
        once += [part for block in blocks for part in block.per_sample()]
        once += [self.guidance] if self.guidance is not None else []
        each = [self.patches, self.head.output, *(p for b in blocks for p in b.per_patch())]
        n_patches = (config.image_size // config.patch_size) ** 2
        width = len(blocks) * config.dim
        return flops_of(nn.ModuleList(each), nn.ModuleList(once), n_patches, width)


def rope_of(axes: list[int], n_text: int, height: int, width: int, device: torch.device) -> Rope:
    """Return the angles of `n_text` tokens of text, at position 0 of every axis, and of `height` x
    `width` patches, at 0, their row and their column; with the base 10,000."""
    rows = torch.arange(height, device=device).repeat_interleave(width)
    columns = torch.arange(width, device=device).repeat(height)
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=1)
    places = F.pad(places, (0, 0, n_text, 0)).double()
    angles = torch.cat(
        [
            places[:, k, None]
            / 10_000 ** (torch.arange(0, n, 2, dtype=torch.float64, device=device) / n)
            for k, n in enumerate(axes)
        ],
        dim=1,
    )[:, None]
    return angles.cos().float(), angles.sin().float()


def rotated(x_BLHD: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of neighboring elements of heads."""
    cos, sin = rope
    real, imaginary = x_BLHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (real * cos - imaginary * sin, imaginary * cos + real * sin)
    return torch.stack(pairs, dim=-1).flatten(-2).type_as(x_BLHD)


class Projections(nn.Module):
    """Queries, keys and values of heads, with norms of queries and keys: (B, L, dim) → three times
    (B, L, heads, head width)."""

    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq, self.wk, self.wv = (xavier(dim, dim) for _ in range(3))
        self.q_norm, self.k_norm = (
            with_initializers(nn.RMSNorm(self.head_dim, eps=1e-6), weight=Constant(1.0))
            for _ in range(2)
        )

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x_BLD).unflatten(-1, (-1, self.head_dim)) for layer in (self.wq, self.wk, self.wv)
        )
        return self.q_norm(q), self.k_norm(k), v


class Stream(nn.Module):
    """The weights of a double block for text or for image."""

    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.modulation = zeros(dim, 6 * dim)
        self.projections = Projections(dim, n_heads)
        self.wo = xavier(dim, dim)
        self.w1, self.w2 = xavier(dim, 4 * dim), xavier(4 * dim, dim)

    def after_attention(self, x_BLD: Tensor, attended: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """Return the stream after attention and the feed-forward network."""
        gate, shift, scale, ffn_gate = parts
        x_BLD = x_BLD + gate[:, None] * self.wo(attended)
        hidden = self.w2(gelu_tanh(self.w1(modulated(x_BLD, shift, scale))))
        return x_BLD + ffn_gate[:, None] * hidden


class DoubleBlock(nn.Module):
    """Attention of text and image together, with separate weights: text (B, T, dim), image (B, L,
    dim), condition (B, dim) → text, image."""

    def __init__(self, config: FluxModel.Config):
        super().__init__()
        self.text = Stream(config.dim, config.n_heads)
        self.image = Stream(config.dim, config.n_heads)
        self.attend = FullAttention()

    def per_patch(self) -> list[nn.Module]:
        image = self.image
        return [image.projections, image.wo, image.w1, image.w2]

    def per_sample(self) -> list[nn.Module]:
        return [self.text.modulation, self.image.modulation]

    def forward(
        self, text_BTD: Tensor, image_BLD: Tensor, condition_BD: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        streams, xs = (self.text, self.image), (text_BTD, image_BLD)
        projected, others = [], []
        for stream, x in zip(streams, xs, strict=True):
            shift, scale, *rest = stream.modulation(F.silu(condition_BD)).chunk(6, dim=1)
            projected.append(stream.projections(modulated(x, shift, scale)))
            others.append(rest)
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*projected, strict=True))
        attended = self.attend(rotated(q, rope), rotated(k, rope), v).flatten(2)
        of_streams = attended.split([text_BTD.shape[1], image_BLD.shape[1]], dim=1)
        text, image = (
            stream.after_attention(*parts)
            for stream, *parts in zip(streams, xs, of_streams, others, strict=True)
        )
        return text, image


class SingleBlock(nn.Module):
    """Attention and feed-forward network side by side: x (B, T + L, dim), condition (B, dim) →
    x."""

    def __init__(self, config: FluxModel.Config):
        super().__init__()
        dim = config.dim
        self.modulation = zeros(dim, 3 * dim)
        self.projections = Projections(dim, config.n_heads)
        self.attend = FullAttention()
        self.w1 = xavier(dim, 4 * dim)
        # Its inputs are by heads, each with its share of the hidden features, so that tensor
        # parallelism can divide them.
        self.out = xavier(5 * dim, dim)

    def per_patch(self) -> list[nn.Module]:
        return [self.projections, self.w1, self.out]

    def per_sample(self) -> list[nn.Module]:
        return [self.modulation]

    def forward(self, x_BLD: Tensor, condition_BD: Tensor, rope: Rope) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(condition_BD)).chunk(3, dim=1)
        normalized = modulated(x_BLD, shift, scale)
        q, k, v = self.projections(normalized)
        attended_BLHD = self.attend(rotated(q, rope), rotated(k, rope), v)
        hidden = gelu_tanh(self.w1(normalized)).unflatten(2, (attended_BLHD.shape[2], -1))
        both = torch.cat([attended_BLHD, hidden], dim=3).flatten(2)
        return x_BLD + gate[:, None] * self.out(both)


class Head(nn.Module):
    """Modulated norm and projection to the values of patches: (B, L, dim) → (B, L, C size²)."""

    def __init__(self, dim: int, patch: int):
        super().__init__()
        self.modulation = zeros(dim, 2 * dim)
        self.output = zeros(dim, patch)

    def forward(self, x_BLD: Tensor, condition_BD: Tensor) -> Tensor:
        scale, shift = self.modulation(F.silu(condition_BD)).chunk(2, dim=1)
        return self.output(modulated(x_BLD, shift, scale))
