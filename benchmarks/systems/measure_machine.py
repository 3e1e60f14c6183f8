"""Print as JSON what the speed of a task, given as JSON, is relative to: the peak of matrix
products in its precision, and the operations per token."""

import json
import sys
from typing import Any

import torch
from task import EXPERTS, Task

from torchtitan.models.llama3 import model_registry
from torchtitan.tools.cpu_products import onednn_products
from torchtitan.tools.device import device_description, peak_flops

REPEATS = 3
"""Measurements of the peak; the fastest counts."""


def main(text: str) -> None:
    task, cpu = Task(**json.loads(text)), torch.device("cpu")
    facts = {"flops_per_token": expert_flops() if task.kind == "experts" else model_flops(task)}
    with onednn_products():  # the faster library of the two
        peak = max(peak_flops(cpu, getattr(torch, task.precision)) for _ in range(REPEATS))
    facts |= {
        "peak_flops": peak.value,
        "peak_source": peak.source,
        "device": device_description(cpu),
        "torch": torch.__version__,
    }
    print(json.dumps(facts))


def expert_flops() -> int:
    """Return the operations of forward and backward pass of the layer of experts, per token."""
    dim, hidden, n_experts, top_k = (
        EXPERTS[name] for name in ("dim", "hidden_dim", "n_experts", "top_k")
    )
    return 6 * (top_k * 3 * dim * hidden + n_experts * dim)


def model_flops(task: Task) -> float:
    """Return the operations of a training step, or of generation, per token."""
    if task.model:
        from torchtitan.models.transformers.model import TransformersModel

        sizes: Any = TransformersModel.Config.of(task.document)
    else:
        sizes = model_registry("debugmodel").model
        for name, size in {**task.widths, "vocab_size": task.vocab_size}.items():
            setattr(sizes, name, size)
    with torch.device("meta"):
        flops: float = sizes.build().flops_per_token(task.seq_len)
    # a backward pass computes twice a forward pass
    return flops / 3 if task.kind == "generate" else flops


if __name__ == "__main__":
    main(sys.argv[1])
