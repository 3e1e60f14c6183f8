"""The transformer of FLUX.1 in its published sizes, and small ones; trained by
`torchtitan.experiments.flow_matching`."""

from functools import partial

from torchtitan.components.diffusion.flow import FlowMatchingLoss
from torchtitan.models.families import Family
from torchtitan.models.flux.diffusers import FORMAT
from torchtitan.models.flux.model import FluxModel
from torchtitan.protocols import ShardingPlan

_flux_1 = partial(FluxModel.Config, dim=3072, n_double=19, n_single=38, n_heads=24)

FLAVORS = {
    "debugmodel": FluxModel.Config(
        dim=64,
        n_double=1,
        n_single=2,
        n_heads=4,
        axes=[4, 6, 6],
        channels=1,
        image_size=8,
        text_dim=32,
        pooled_dim=32,
        guidance=True,
        n_classes=10,
    ),
    "small": FluxModel.Config(
        dim=512, n_double=4, n_single=8, n_heads=8, axes=[16, 24, 24], image_size=32
    ),
    "dev": _flux_1(guidance=True),
    "schnell": _flux_1(),
}

_PROJECTIONS = {
    **{f"projections.w{kind}": "columns" for kind in "qkv"},
    **{f"projections.{kind}_norm": "heads" for kind in "qk"},
    "modulation": "whole",
    "w1": "columns",
}
_OF_DOUBLE = {**_PROJECTIONS, "wo": "rows to whole", "w2": "rows to whole"}
_OF_SINGLE = {**_PROJECTIONS, "out": "rows to whole"}
PLAN = ShardingPlan(
    tensor={
        **dict.fromkeys(("patches", "text", "time.*", "guidance.*", "pooled.*", "head.*"), "whole"),
        **{f"double_blocks.*.*.{name}": style for name, style in _OF_DOUBLE.items()},
        **{f"single_blocks.*.{name}": style for name, style in _OF_SINGLE.items()},
    },
    attention="*_blocks.*.attend",
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
