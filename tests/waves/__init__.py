"""An architecture outside the library, as docs/extending.md describes it: no text, no images."""

from typing import Any

from torchtitan.components.diffusion.flow import FlowMatchingLoss
from torchtitan.models.families import Family
from torchtitan.protocols import ExternalFormat, ShardingPlan, StateDictAdapter
from torchtitan.protocols.state_dict_adapter import KeyMapping

from .model import UViT

CLASS = "WaveUViT"
FLAVORS = {"debugmodel": UViT.Config(dim=16)}

_LAYERS = {
    **{f"w{kind}": "columns" for kind in "qkv1"},
    "wo": "rows to whole",
    "w2": "rows to whole",
    "joined": "whole",
}
PLAN = ShardingPlan(
    tensor={
        "": "copy",
        **dict.fromkeys(("patches", "classes", "time", "output"), "whole"),
        **{f"layers.*.{name}": style for name, style in _LAYERS.items()},
    },
    attention="layers.*.attend",
)


def _adapter(config: UViT.Config) -> StateDictAdapter:
    layers = [f"{name}.{part}" for name in _LAYERS for part in ("weight", "bias")]
    ends = [
        f"{name}.{part}" for name in ("patches", "time", "output") for part in ("weight", "bias")
    ]
    names = ["places", "classes.weight", *ends]
    for n in range(config.n_layers):
        is_late = n > config.n_layers // 2
        names += [f"layers.{n}.{one}" for one in layers if is_late or not one.startswith("joined")]
    rows = [KeyMapping(name, f"transformer.{name}") for name in names]
    return StateDictAdapter(rows, n_layers=config.n_layers)


_KEYS = ("dim", "n_layers", "n_heads", "length", "channels", "patch", "n_classes")


def _to_external(config: UViT.Config) -> dict[str, Any]:
    return {"_class_name": CLASS, **{key: getattr(config, key) for key in _KEYS}}


FORMATS = {
    "hf": ExternalFormat(
        adapter=_adapter,
        to_external=_to_external,
        from_external=lambda document: UViT.Config(**{key: document[key] for key in _KEYS}),
        model_types={CLASS: CLASS},
        library="diffusers",
    )
}
FAMILY = Family(
    module=__name__,
    flavors=FLAVORS,
    formats=FORMATS,
    sharding=PLAN,
    loss=FlowMatchingLoss.Config,
)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
