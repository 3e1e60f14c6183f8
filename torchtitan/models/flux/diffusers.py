"""Weights and config.json of diffusers' `FluxTransformer2DModel`."""

from collections.abc import Mapping

from torchtitan.models.common.config_reader import ConfigReader
from torchtitan.models.flux.model import FluxModel
from torchtitan.protocols import ExternalFormat, StateDictAdapter
from torchtitan.protocols.state_dict_adapter import (
    Columns,
    Grouped,
    Identity,
    KeyMapping,
    Transform,
)
from torchtitan.tools.errors import UserError

CLASS = "FluxTransformer2DModel"

_PATCH = 2
"""Pipelines of diffusers cut latents into patches of 2 x 2, so the file does not name it."""

_ENDS = {
    "patches": "x_embedder",
    "text": "context_embedder",
    **{f"time.linear_{k}": f"time_text_embed.timestep_embedder.linear_{k}" for k in (1, 2)},
    **{f"pooled.linear_{k}": f"time_text_embed.text_embedder.linear_{k}" for k in (1, 2)},
    "head.modulation": "norm_out.linear",
    "head.output": "proj_out",
}
_GUIDANCE = {
    f"guidance.linear_{k}": f"time_text_embed.guidance_embedder.linear_{k}" for k in (1, 2)
}
_DOUBLE = {
    "image.modulation": "norm1.linear",
    "text.modulation": "norm1_context.linear",
    **{f"image.projections.w{kind}": f"attn.to_{kind}" for kind in "qkv"},
    **{f"text.projections.w{kind}": f"attn.add_{kind}_proj" for kind in "qkv"},
    "image.wo": "attn.to_out.0",
    "text.wo": "attn.to_add_out",
    "image.w1": "ff.net.0.proj",
    "image.w2": "ff.net.2",
    "text.w1": "ff_context.net.0.proj",
    "text.w2": "ff_context.net.2",
}
_DOUBLE_NORMS = {
    **{f"image.projections.{kind}_norm": f"attn.norm_{kind}" for kind in "qk"},
    **{f"text.projections.{kind}_norm": f"attn.norm_added_{kind}" for kind in "qk"},
}
_SINGLE = {
    "modulation": "norm.linear",
    **{f"projections.w{kind}": f"attn.to_{kind}" for kind in "qkv"},
    "w1": "proj_mlp",
    "out": "proj_out",
}
_SINGLE_NORMS = {f"projections.{kind}_norm": f"attn.norm_{kind}" for kind in "qk"}


def _adapter(config: FluxModel.Config) -> StateDictAdapter:
    by_heads = Columns(Grouped(config.n_heads, (1, 4)))

    def columns(layer: str) -> Transform:
        is_by_heads = layer.startswith("single_blocks.") and layer.endswith(".out")
        return by_heads if is_by_heads else Identity()

    layers = dict(_ENDS, **(_GUIDANCE if config.guidance else {}))
    norms: dict[str, str] = {}
    kinds = (
        ("double_blocks", "transformer_blocks", config.n_double, _DOUBLE, _DOUBLE_NORMS),
        ("single_blocks", "single_transformer_blocks", config.n_single, _SINGLE, _SINGLE_NORMS),
    )
    for ours, theirs, n_blocks, of_block, norms_of_block in kinds:
        for number in range(n_blocks):
            for rows, table in ((layers, of_block), (norms, norms_of_block)):
                rows |= {f"{ours}.{number}.{a}": f"{theirs}.{number}.{b}" for a, b in table.items()}
    both = [KeyMapping(f"{a}.bias", f"{b}.bias") for a, b in layers.items()]
    both += [KeyMapping(f"{a}.weight", f"{b}.weight", columns(a)) for a, b in layers.items()]
    weights = [KeyMapping(f"{a}.weight", f"{b}.weight") for a, b in norms.items()]
    return StateDictAdapter([*both, *weights], n_layers=config.n_double)


def _to_external(config: FluxModel.Config) -> dict[str, object]:
    if config.patch_size != _PATCH:
        raise UserError(
            f"--model.patch_size {config.patch_size}: diffusers cuts latents into patches of "
            f"{_PATCH} x {_PATCH}; export a checkpoint of our own (--to dcp)"
        )
    return {
        "_class_name": CLASS,
        "patch_size": 1,  # of latents that are already cut into patches
        "in_channels": config.channels * _PATCH**2,
        "out_channels": None,
        "num_layers": config.n_double,
        "num_single_layers": config.n_single,
        "attention_head_dim": config.dim // config.n_heads,
        "num_attention_heads": config.n_heads,
        "joint_attention_dim": config.text_dim,
        "pooled_projection_dim": config.pooled_dim,
        "guidance_embeds": config.guidance,
        "axes_dims_rope": config.axes,
    }


def _from_external(document: Mapping[str, object]) -> FluxModel.Config:
    reader = ConfigReader("config.json", document)
    heads, width = (
        reader.whole_number(key) for key in ("num_attention_heads", "attention_head_dim")
    )
    n_values = reader.whole_number("in_channels")
    if n_values % _PATCH**2:
        raise reader.wrong(
            "in_channels", n_values, f"a multiple of {_PATCH**2}, the values of a patch"
        )
    for key, value in (("out_channels", n_values), ("patch_size", 1)):
        if document.get(key) not in (value, None):
            raise reader.wrong(key, document[key], f"{value}, the only value computed here")
    axes = document.get("axes_dims_rope", [16, 56, 56])
    if not (isinstance(axes, list) and len(axes) == 3 and all(type(n) is int for n in axes)):
        raise reader.wrong("axes_dims_rope", axes, "three whole numbers")
    return FluxModel.Config(
        dim=heads * width,
        n_double=reader.whole_number("num_layers", least=0),
        n_single=reader.whole_number("num_single_layers", least=0),
        n_heads=heads,
        axes=axes,
        channels=n_values // _PATCH**2,
        text_dim=reader.whole_number("joint_attention_dim"),
        pooled_dim=reader.whole_number("pooled_projection_dim"),
        guidance=reader.flag("guidance_embeds", False),
    )


FORMAT = ExternalFormat(
    adapter=_adapter,
    to_external=_to_external,
    from_external=_from_external,
    model_types={CLASS: CLASS},
    library="diffusers",
)
