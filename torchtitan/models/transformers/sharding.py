"""Tensor parallelism by a class's own plan, if it only splits linear layers. Each rank has whole
experts, or those that expert parallelism gives it."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from torchtitan.models.transformers.context import ATTENTION
from torchtitan.models.transformers.description import build_class, transformers_config
from torchtitan.models.transformers.experts import fused_experts
from torchtitan.models.transformers.tiny import trial
from torchtitan.protocols.sharding import ShardingPlan, TensorSharding
from torchtitan.tools.patterns import without_numbers

_KINDS: Mapping[str | None, TensorSharding] = {
    "colwise": "columns",
    "rowwise": "rows to whole",
    "colwise_gather_output": "columns to whole",
    "rowwise_split_input": "whole to rows",
    "replicated_with_grad_allreduce": "heads",
}
"""Style in transformers → ours."""


@trial
def class_plan(document: Mapping[str, object]) -> tuple[ShardingPlan, str]:
    """Return the sharding plan for a config.json, and why tensor parallelism is not supported ("":
    it is)."""
    with torch.device("meta"):
        model = build_class(transformers_config(document))
    name = type(model).__name__
    styles = dict(model.tp_plan or {})
    refused = set[str]()
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if output is None:
        return ShardingPlan(tensor={}, attention=ATTENTION), f"{name} names no output layer"
    tensor: dict[str, TensorSharding] = (
        {} if output.weight is embedding.weight else {"head.output": "columns"}
    )
    inside = set(model.get_decoder().modules())
    owners = {
        path: module
        for path, module in model.named_modules()
        if module is not output and list(module.parameters(recurse=False))
    }
    style_of = {
        path: next((style for pattern, style in styles.items() if fnmatchcase(path, pattern)), None)
        for path in owners
    }
    experts = fused_experts(model)
    # Modules around experts get the whole hidden states.
    around_experts = tuple(f"{path.rpartition('.')[0]}." for path in experts)
    split_inside = {path.rpartition(".")[0] for path in owners if style_of[path] == "colwise"}
    for path, module in owners.items():
        if module not in inside:  # each rank reads all images
            tensor[_pattern(path)] = "copy"
            continue
        style = style_of[path]
        kind = _KINDS.get(style)
        if module is embedding:
            kind = "vocabulary to whole"
        elif path in experts or (style is None and path.startswith(around_experts)):
            kind = "copy"
        elif style is None and "Norm" in type(module).__name__:
            # of the whole hidden states, not of heads that ranks divide
            kind = None if path.rpartition(".")[0] in split_inside else "whole"
        if kind is None:
            refused.add(f"{type(module).__name__} {without_numbers([path])[0]}")
        else:
            tensor[_pattern(path)] = kind
    reason = ""
    if not {"colwise", "rowwise_split_input"} & set(styles.values()):
        reason = f"{name} has no plan for it in transformers"
    elif refused:
        reason = (
            f"the plan of {name} in transformers does not split {', '.join(sorted(refused))} as a "
            "linear layer"
        )
    return ShardingPlan(tensor={} if reason else tensor, attention=ATTENTION), reason


def _pattern(path: str) -> str:
    """Return the name of a module of the class in a plan, for all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", f"model.{path}")
