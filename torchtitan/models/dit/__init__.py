"""DiT with classes, in its published sizes, and a small one for digits of 8 x 8 pixels; trained by
`torchtitan.experiments.flow_matching`."""

from functools import partial

from torchtitan.components.diffusion.flow import FlowMatchingLoss
from torchtitan.models.dit.diffusers import FORMAT
from torchtitan.models.dit.model import DiTModel
from torchtitan.models.families import Family
from torchtitan.protocols import ShardingPlan

_latents = partial(DiTModel.Config, image_size=32, channels=4, n_classes=1000)
"""Latents of images of 256 x 256 pixels, with the classes of ImageNet."""

FLAVORS = {
    "debugmodel": DiTModel.Config(
        dim=64, n_layers=2, n_heads=4, image_size=8, channels=1, n_classes=10
    ),
    "S-2": _latents(dim=384, n_layers=12, n_heads=6),
    "B-2": _latents(dim=768, n_layers=12, n_heads=12),
    "L-2": _latents(dim=1024, n_layers=24, n_heads=16),
    "XL-2": _latents(dim=1152, n_layers=28, n_heads=16),
}

_SPLIT = {
    **{f"w{kind}": "columns" for kind in "qkv"},
    "wo": "rows to whole",
    "w1": "columns",
    "w2": "rows to whole",
}
PLAN = ShardingPlan(
    tensor={
        **dict.fromkeys(("patches", "time.*", "classes", "head.*", "layers.*.modulation"), "whole"),
        **{f"layers.*.{name}": style for name, style in _SPLIT.items()},
    },
    attention="layers.*.attend",
)

FORMATS = {"hf": FORMAT}
FAMILY = Family(
    module=__name__,
    flavors=FLAVORS,
    formats=FORMATS,
    sharding=PLAN,
    loss=FlowMatchingLoss.Config,
)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
