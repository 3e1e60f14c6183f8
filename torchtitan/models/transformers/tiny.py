"""Tiny clones of models: their class in transformers, with a shrunk configuration that keeps every
mechanism."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from transformers import PretrainedConfig

from torchtitan.models.transformers.description import build_class, forward_arguments
from torchtitan.models.transformers.images import absent_images
from torchtitan.models.transformers.per_layer import PerLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=torch.nn.Module)

HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
VOCABULARY = 128
POSITIONS = 256
WINDOW = 8

# Token ids of a tiny model that are ordinary text: special ids are below or above.
TEXT_IDS = range(8, 64)

CLONE_TOLERANCE = 1e-4
"""Largest change of a logit in a trial, relative to the largest logit: far above rounding, far
below mistakes."""

_LEAST_GRADIENT = 1e-3
"""Gradients below this part of the model's largest one are compared with this part: some are zero
up to rounding."""

# Names of integer fields → largest value; the first match counts. None keeps the value, perhaps of
# a scalar.
_LIMITS: list[tuple[str, int | None]] = [
    (
        r".*floor.*|index_topk|.*_budget|rel_extent|compress_rates.*|"
        r".*(window|chunk_(size|len)).*|.*block_size",
        WINDOW,
    ),
    (r"unpadded_vocab_size", VOCABULARY - 8),
    (r".*vocab.*|num_embeddings|codebook_size|num_centroids", VOCABULARY),
    # Of few index heads, scores are often all zero, and the choice among equal ones is arbitrary.
    (
        r".*(theta|scal(ar|ing|e_)|multiplier|factor|_cap|beta|freq|kernel|limit|_base|"
        r"inference).*|index_n_heads",
        None,
    ),
    (r".*per_tok(en)?|.*top_?k(_experts)?|moe_k|index_kpool", 2),
    (r".*n_groups?|num_expert_group|topk_group|o_groups", 1),
    (r".*experts|.*expert_num", 4),
    (r"(mamba_(n|num)|n_mamba)_heads", 2 * HIDDEN // HEAD_DIM),
    (r".*heads|n_head", HEADS),
    (r"qk_head_dim|attention_head_dim", 2 * HEAD_DIM),
    (r".*(head_?dim|d_head|dim_head|head_size)|kv_channels|d_kv|patch_size", HEAD_DIM),
    (r".*(rank|state|state_size)|rotary_dim", 8),
    (
        r".*(positions?|position_embeddings|seq_len|seq_length|model_max_length|n_ctx|"
        r"context_length)",
        POSITIONS,
    ),
    (r"mamba_d_ssm|attention_hidden_size", 2 * HIDDEN),
    (r".*feature_layer", -1),
    (r".*(intermediate|ffn|ff_|mlp).*(size|dim)(_mlp)?|d_ff|dff|dim_ff|n_inner", 96),
    (
        r".*(size|sizes|size_per_layer_input|dim|width|channels|embd|d_model|length|patches|"
        r"tokens)|d_.*",
        HIDDEN,
    ),
]
_results: dict[str, Any] = {}


def trial(compute: Callable[P, T]) -> Callable[P, T]:
    """Run a function of a model's description on the CPU, without gradients, and once per
    description."""

    @functools.wraps(compute)
    def compute_once(*args: P.args, **kwargs: P.kwargs) -> T:
        assert not any(map(callable, args)), "a function's name tells no models apart"
        key = json.dumps((compute.__name__, args, kwargs), sort_keys=True, default=str)
        if key not in _results:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
                _results[key] = compute(*args, **kwargs)
        result: T = _results[key]
        return result

    return compute_once


def text_inputs(
    model: "PreTrainedModel", tokens_BL: torch.Tensor, **optional: object
) -> dict[str, object]:
    """Return the arguments of a class for tokens of text: those of `optional` that it takes, and
    types of tokens."""
    optional |= {"use_cache": False, "mm_token_type_ids": torch.zeros_like(tokens_BL)}  # no images
    takes = forward_arguments(model)
    inputs = {name: value for name, value in optional.items() if name in takes}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        # The decoder takes it, and would otherwise fill a cache, also when a block is recomputed.
        inputs["use_cache"] = False
    return {"input_ids": tokens_BL, **absent_images(model, tokens_BL), **inputs}


def random_clone(
    config: PretrainedConfig, implementation: str | dict[str, str] | None = None
) -> "PreTrainedModel":
    """Build a tiny clone, in a `trial`, with reproducible weights, so large that each part changes
    the logits."""
    torch.manual_seed(0)
    return randomize(build_class(tiny_config(config), implementation).eval())


def randomize(model: M) -> M:
    """Draw weights so large that each part changes the logits, in a `trial`."""
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.normal_(std=max(parameter.shape[1:]) ** -0.5)
    return model


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a model by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def changed_result(
    logits: torch.Tensor,
    expected: torch.Tensor,
    found: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
) -> str:
    """Return what differs between a trial, with `logits` and `found` gradients, and the whole
    model: "" if nothing differs by more than `CLONE_TOLERANCE`."""
    change = float((logits - expected).abs().max() / expected.abs().max())
    if not change <= CLONE_TOLERANCE:
        return f"its logits by {change:.1e}"
    most = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        scale = max(gradient.abs().max(), _LEAST_GRADIENT * most)
        if name not in found or not (found[name] - gradient).abs().max() <= CLONE_TOLERANCE * scale:
            return f"the gradient of {name}"
    return ""


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of the same class that builds a model of about 100,000 parameters.
    Sizes, windows, and counts of heads and experts shrink. One layer of each kind stays; the
    per-layer fields together define the kind. Flags and scalars, such as soft caps, keep their
    values. Special token ids move out of `TEXT_IDS`."""
    values = config.to_dict()
    _shrink(values, config, {})
    return type(config)(**values)


def _shrink(values: dict[str, Any], config: PretrainedConfig, special_ids: dict[int, int]) -> None:
    for name in ("quantization_config", "auto_map", "dtype", "id2label", "label2id"):
        values.pop(name, None)
    layers = PerLayer.of(values)
    layers.keep(values, layers.one_of_each_kind())
    old = dict(values)
    for name, value in old.items():
        part = vars(config).get(name)
        if isinstance(part, PretrainedConfig):
            _shrink(value, part, special_ids)
        elif name == "use_cache":
            values[name] = False
        elif re.fullmatch(r".*(token_id|token_index|_ids?)", name) and "layer" not in name:
            values[name] = _special_id(value, special_ids)
        elif name == "vocabulary_map" and value:
            images = [token for token in value if token.startswith(("IMGIMG", "<|visual token"))][
                :4
            ]
            values[name] = {
                token: _special_id(value[token], special_ids) for token in ["<image>", *images]
            }
        elif name != "per_layer_config":
            values[name] = _smaller(name, value, old)
    for overrides in (values.get("per_layer_config") or {}).values():
        for name, value in overrides.items():
            overrides[name] = _relative(name, value, old.get(name), values.get(name))
    _fit(values, old)


def _smaller(name: str, value: object, old: Mapping[str, Any]) -> object:
    """Return the value of a field for a tiny model; `old` holds the fields of the real one."""
    if isinstance(value, (list, tuple)):
        return [_smaller(name, item, old) for item in value]
    if isinstance(value, dict):
        return {key: _smaller(f"{name}.{key}", item, old) for key, item in value.items()}
    if type(value) is not int:
        return value
    if name.endswith("heads_per_layer"):
        return _relative(name, value, old[name.removesuffix("_per_layer")], HEADS)
    if groups := re.fullmatch(r"(.*)(key_value|kv|key)_(n_)?heads", name):
        queries = {
            old.get(groups[1] + other)
            for other in ("attention_heads", "heads", "n_heads", "value_heads")
        }
        return HEADS if value in queries else min(value, HEADS // 2)
    if (
        "qk_rope_head_dim" in old
        and re.fullmatch(r"(qk_|v_|index_)?.*head_dim", name)
        and "linear" not in name
    ):
        # these widths are sums of each other
        return value * HEAD_DIM // (old["qk_rope_head_dim"] or 4 * HEAD_DIM)
    limit = next((limit for names, limit in _LIMITS if re.fullmatch(names, name)), None)
    return value if limit is None else min(value, limit)


def _relative(name: str, value: object, old: object, new: object) -> object:
    """Return the value of a field of one layer, if the other layers have `old` in the real model
    and `new` here."""
    if type(value) is not int or type(old) is not int or type(new) is not int or value == old:
        return new
    if "dim" in name and new * value % old == 0:
        return new * value // old
    return 2 * new if value > old else max(new // 2, 1)


def _special_id(value: object, special_ids: dict[int, int]) -> object:
    """Return an id outside `TEXT_IDS`, the same one for the same `value`."""
    if isinstance(value, (list, tuple)):
        return [_special_id(item, special_ids) for item in value]
    if type(value) is not int or value < TEXT_IDS.start:
        return value
    return special_ids.setdefault(value, VOCABULARY - 1 - len(special_ids))


def _fit(values: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Fit the fields that several sizes determine."""
    if "expand" in values and "num_heads" in values:
        values["num_heads"] = values["expand"] * HIDDEN // HEAD_DIM
    if values.get("mamba_d_ssm"):
        values["mamba_d_ssm"] = values["mamba_n_heads"] * values["mamba_d_head"]
    if "qk_head_dim" in values:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    parameters = values.get("rope_parameters") or {}
    ropes = [rope for rope in parameters.values() if isinstance(rope, dict)] or [parameters]
    for place in (values, *ropes):  # YaRN and others scale by the ratio of the two maxima
        key = "original_max_position_embeddings"
        original = place.get(key)
        if original:
            place[key] = max(
                POSITIONS * old.get(key, original) // old["max_position_embeddings"], 2
            )
    for rope in ropes:
        width = values.get("head_dim") or HEAD_DIM
        rotary = int(
            width
            * (rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0)
        )
        pairs = (rotary + 1) // 2
        if rotary % 2:
            values["partial_rotary_factor"] = rope["partial_rotary_factor"] = 2 * pairs / width
        if axes := len(rope.get("mrope_section") or ()):
            share = (pairs + 1) // axes
            rope["mrope_section"] = [share] * (axes - 1) + [pairs - share * (axes - 1)]
        for name in rope.keys() & {"short_factor", "long_factor"}:
            rope[name] = rope[name][:pairs]
