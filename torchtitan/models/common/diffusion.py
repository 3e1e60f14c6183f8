"""Parts that transformers of diffusion share: their configuration, features of times, patches,
modulation, attention."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.common.feed_forward import make_linear
from torchtitan.protocols import BaseModel
from torchtitan.protocols.initializer import Constant, Uniform, with_initializers
from torchtitan.protocols.model import count_elements
from torchtitan.tools.errors import UserError, require

TIME_FEATURES = 256
"""Sines and cosines of a time."""

_NO_PIPELINE = "its condition goes to every block; use FSDP or HSDP, which divide the weights too"


class ImageModel(BaseModel):
    """A transformer of the patches of images, which predicts velocities: `model(images_BCHW,
    times_B, …)` → (B, C, H, W)."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Sizes of a transformer of images."""

        n_heads: int
        """Attention heads; divides dim."""

        image_size: int
        """Height and width of images, in pixels (or of latents)."""

        channels: int
        """Channels of images (or of latents)."""

        patch_size: int = 2
        """Height and width of a patch, the model's token; divides image_size."""

        n_classes: int
        """Classes of images."""

        vocab_size: int | None = 0
        """The model reads no tokens."""

        @property
        def image_shape(self) -> tuple[int, int, int]:
            """Channels, height and width of images."""
            return self.channels, self.image_size, self.image_size

        def validate(self) -> None:
            self.check_sizes("dim", "n_heads", "image_size", "channels", "n_classes")
            if not 1 <= self.patch_size <= self.image_size or self.image_size % self.patch_size:
                raise UserError(
                    f"--model.patch_size {self.patch_size} does not divide --model.image_size "
                    f"{self.image_size}"
                )

        def check_sizes(self, *names: str) -> None:
            """Raise `UserError` unless the options with these names are sizes."""
            for name in names:
                value = getattr(self, name)
                require(1 <= value <= 2**24, f"--model.{name}", value, "from 1 to 2^24")

        @property
        def divides_samples(self) -> bool:
            return True

        @property
        def tensor_parallel_sizes(self) -> dict[str, int]:
            return {"n_heads": self.n_heads}

        def unsupported_parallelisms(self) -> dict[str, str]:
            return {"pipeline_parallel_degree": _NO_PIPELINE}

    splits_sequences = False


def xavier(n_in: int, n_out: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer with uniform weights (Glorot and Bengio 2010) and biases of 0."""
    bound = math.sqrt(6 / (n_in + n_out))
    biases = {"bias": Constant(0.0)} if bias else {}
    layer = nn.Linear(n_in, n_out, bias=bias)
    return with_initializers(layer, weight=Uniform(-bound, bound), **biases)


def zeros(n_in: int, n_out: int) -> nn.Linear:
    """Return a linear layer whose result is 0 at the start (adaLN-Zero, arXiv:2212.09748)."""
    return with_initializers(nn.Linear(n_in, n_out), weight=Constant(0.0), bias=Constant(0.0))


def time_features(times_B: Tensor, *, divisor: int) -> Tensor:
    """Return cosines, then sines, of times at the 128 frequencies 10,000^(-k / `divisor`), float32
    (B, 256)."""
    half = TIME_FEATURES // 2
    exponents = torch.arange(half, dtype=torch.float32, device=times_B.device)
    frequencies = torch.exp(-math.log(10_000) * exponents / divisor)
    angles = times_B.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TwoLayers(nn.Module):
    """`linear_2(silu(linear_1 x))`, the embedding of a time or of pooled text: (B, n_in) → (B,
    dim)."""

    def __init__(self, n_in: int, dim: int):
        super().__init__()
        self.linear_1 = make_linear(n_in, dim, 0.02, bias=True)
        self.linear_2 = make_linear(dim, dim, 0.02, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


def modulated(x_BLD: Tensor, shift_BD: Tensor, scale_BD: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the normalized rows of x times 1 + scale, plus shift (adaLN, arXiv:2212.09748)."""
    normalized = F.layer_norm(x_BLD, x_BLD.shape[-1:], eps=eps)
    return normalized * (1 + scale_BD[:, None]) + shift_BD[:, None]


class FullAttention(nn.Module):
    """Attention of every query to all keys. It has no weights; it is a module so that hooks can
    attach to it."""

    def forward(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        """Queries (B, L, heads, head width), keys and values (B, S, heads, head width) → (B, L,
        heads, head width)."""
        q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def to_patches(images_BCHW: Tensor, size: int) -> Tensor:
    """Cut images into patches of `size` x `size` pixels, row by row: (B, C, H, W) → (B, H W /
    size², C size²)."""
    return F.pixel_unshuffle(images_BCHW, size).flatten(2).transpose(1, 2)


def from_patches(patches_BLD: Tensor, size: int, height: int) -> Tensor:
    """Reverse `to_patches`, for images of `height` pixels."""
    rows = patches_BLD.transpose(1, 2).unflatten(2, (height // size, -1))
    return F.pixel_shuffle(rows, size)


def flops_of(
    per_token: nn.Module, per_sample: nn.Module, n_tokens: int, attention_width: int
) -> float:
    """Return forward and backward operations of a sample of `n_tokens`, as
    `Decoder.flops_per_token` counts them.

    Args:
        per_token: layers that each token passes.
        per_sample: layers that a sample passes once.
        attention_width: width of all heads of all layers together.
    """
    weights = sum(
        (6 if trained else 4) * elements * n
        for module, n in ((per_token, n_tokens), (per_sample, 1))
        for elements, trained in count_elements(module)
    )
    return weights + 12.0 * attention_width * n_tokens**2
