"""Tensor parallelism by a class's own plan, as far as it is one of linear layers."""

import functools
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from torchtitan.models.transformers.description import build_class, transformers_config
from torchtitan.protocols.sharding import ShardingPlan, TensorSharding
from torchtitan.tools.patterns import without_numbers

_KINDS: Mapping[str, TensorSharding] = {
    "colwise": "columns",
    "rowwise": "rows to whole",
    "colwise_gather_output": "columns to whole",
    "rowwise_split_input": "whole to rows",
    "replicated_with_grad_allreduce": "heads",
}
"""Style in transformers → ours."""


def class_plan(document: Mapping[str, Any]) -> tuple[ShardingPlan, str]:
    """Return the plan of the class of a config.json, and why tensor parallelism is not supported; empty: it is."""
    return _class_plan(json.dumps(document, sort_keys=True, default=str))


@functools.cache
def _class_plan(document: str) -> tuple[ShardingPlan, str]:
    with torch.device("meta"):
        model = build_class(transformers_config(json.loads(document)))
    name, styles = type(model).__name__, dict(model.tp_plan or {})
    output, embedding, decoder = model.get_output_embeddings(), model.get_input_embeddings(), model.get_decoder()
    if output is None:
        return ShardingPlan(tensor={}, attention=""), f"{name} names no output layer"
    tensor: dict[str, TensorSharding] = {"head.output": "columns"} if output.weight is not embedding.weight else {}
    refused: set[str] = set()
    parts = set(decoder.modules())
    for path, module in model.named_modules():
        if module is output or module not in parts or not list(module.parameters(recurse=False)):
            continue
        style = next((style for pattern, style in styles.items() if fnmatchcase(path, pattern)), None)
        kind = _KINDS.get(style or "")
        if module is embedding:
            kind = "vocabulary to whole"
        elif style is None and "Norm" in type(module).__name__:
            kind = "whole"
        if kind is None:
            refused.add(f"{type(module).__name__} {without_numbers([path])[0]}")
        else:
            tensor["model." + re.sub(r"(?<=\.)\d+(?=\.)", "*", path)] = kind
    reason = ""
    if not {"colwise", "rowwise_split_input"} & set(styles.values()):
        reason = f"{name} has no plan for it in transformers"
    elif refused:
        reason = f"the plan of {name} in transformers does not split {', '.join(sorted(refused))} as a linear layer"
    return ShardingPlan(tensor={} if reason else tensor, attention=""), reason
