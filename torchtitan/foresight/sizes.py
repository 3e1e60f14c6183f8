"""Models of one family in any size, with the proportions of its small flavor."""

import dataclasses
from types import ModuleType
from typing import Any

from torchtitan.foresight.scaling import Sizes
from torchtitan.foresight.transfer import on_meta
from torchtitan.tools.errors import UserError

_MULTIPLE = 8
"""Widths of feed-forward networks are rounded to it."""


def small_flavor(family: ModuleType) -> Any:
    """Return the configuration of a family's first small flavor, `debugmodel`. Raise `UserError`
    if it has none."""
    name = family.__name__.rpartition(".")[2]
    if "debugmodel" not in family.FLAVORS:
        raise UserError(f"{name} has no flavor debugmodel, whose proportions --config dial takes")
    model = family.model_registry("debugmodel").model
    has_sizes = all(hasattr(model, field) for field in ("n_layers", "n_heads", "ffn_dim"))
    if not has_sizes or getattr(model.rope, "short_factors", None):
        raise UserError(
            f"--config dial needs a decoder whose numbers all follow from its sizes, and {name} "
            "has others; choose another family"
        )
    return model


def sized(flavor: Any, sizes: Sizes) -> Any:
    """Return a flavor in another size: the same number of experts, kinds of layers and ratios of
    widths, with untied embeddings, since input and output have other rates."""
    ratio = sizes.width / flavor.dim
    heads = {"n_heads": sizes.heads, "n_kv_heads": sizes.heads}
    changed = {
        "dim": sizes.width,
        "n_layers": sizes.layers,
        **heads,
        "ffn_dim": _rounded(flavor.ffn_dim * ratio),
        "tie_embeddings": False,
        "head_dim": sizes.head_width,
        "query_pre_attn_scalar": sizes.head_width,
        "attention_multiplier": 1 / sizes.head_width,
        "global_head_dim": sizes.head_width,
        "num_global_key_value_heads": sizes.heads,
        "linear_num_key_heads": sizes.heads,
        "linear_num_value_heads": 2 * sizes.heads,
    }
    if hasattr(flavor, "kv_lora_rank"):  # whose heads have parts of other widths
        del changed["head_dim"]
    if hasattr(flavor, "moe"):
        widths = {"ffn_dim": flavor.moe.ffn_dim, "shared_ffn_dim": flavor.moe.shared_ffn_dim}
        wider = {name: _rounded(width * ratio) for name, width in widths.items() if width}
        changed["moe"] = dataclasses.replace(flavor.moe, **wider)
    known = {field.name for field in dataclasses.fields(flavor)}
    return dataclasses.replace(flavor, **{key: changed[key] for key in changed.keys() & known})


def _rounded(width: float) -> int:
    return max(_MULTIPLE, _MULTIPLE * round(width / _MULTIPLE))


def parameters_per_token(model: object) -> float:
    """Return the number of parameters that multiply every token, with the output head: a part of
    the experts, and no embedding that is only looked up."""
    flops: float = on_meta(model).flops_per_token(0)
    return flops / 6
