"""Print as JSON what the speed of a task, given as JSON, is relative to: the peak of matrix products in its precision,
and the operations per token."""

import json
import sys
from typing import Any

import torch
from task import Task

from torchtitan.models.llama3 import model_registry
from torchtitan.tools.device import device_description, peak_flops

REPEATS = 3
"""Measurements of the peak, of which the fastest counts."""


def main(text: str) -> None:
    task, cpu = Task(**json.loads(text)), torch.device("cpu")
    if task.model:
        from torchtitan.models.transformers.model import TransformersModel

        sizes: Any = TransformersModel.Config.of(task.document)
    else:
        sizes = model_registry("debugmodel").model
        for name, size in {**task.widths, "vocab_size": task.vocab_size}.items():
            setattr(sizes, name, size)
    with torch.device("meta"):
        flops_per_token = sizes.build().flops_per_token(task.seq_len)
    peak = max(peak_flops(cpu, getattr(torch, task.precision)) for _ in range(REPEATS))
    facts = {
        "peak_flops": peak.value,
        "peak_source": peak.source,
        "flops_per_token": flops_per_token,
        "device": device_description(cpu),
        "torch": torch.__version__,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
