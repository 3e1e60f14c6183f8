"""Runs the kernels of `fused_recurrences.KERNELS` on a CPU, by Triton's interpreter, and prints
their errors: `TRITON_INTERPRET=1 python -m tests.models.interpreted_kernels`, one line of JSON per
kernel, with the largest error of the result and of the gradient of each input, relative to the
largest value in float64.

The interpreter of Triton 3.7 lacks three things that these kernels need, added here: a choice
without a benchmark among the configurations of a kernel (the first), counters of loops that are
tensors, and, for Mamba's, a CUDA device. The part of mamba-ssm that needs its compiled extension is
not imported.
"""

import ast
import contextlib
import importlib
import json
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import ASTTransformer

from tests.models.test_attention import metadata_of
from torchtitan.models.common import fused_recurrences
from torchtitan.models.common.delta_net import gated_delta_rule
from torchtitan.models.common.mamba import selective_scan
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.recurrence import document_numbers

PACKED = [[66, 3, 1], [15, 55]]
"""Documents of two rows: one over two chunks, one within, short ones, one that ends a row."""
ROWS = [[20], [20]]
WIDTH = 16


def loop_over_tensors(self: Any, node: ast.For) -> ast.For:
    """Begin a loop over `range` with `i = to_tensor(i)`."""
    self.generic_visit(node)
    calls_range = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"
    if calls_range:
        name = ast.unparse(node.target)
        line = f"{name} = interpreter_semantic.to_tensor({name}, False)"
        node.body.insert(0, ast.parse(line).body[0])
    return node


def complete_interpreter() -> None:
    first: Any = lambda self, *args, config, **options: (0.0, 0.0, 0.0)  # noqa: E731
    Autotuner._bench = first
    ASTTransformer.visit_For = loop_over_tensors
    torch.cuda.device = lambda index: contextlib.nullcontext()  # type: ignore[assignment,misc]
    properties: Any = lambda device: types.SimpleNamespace(multi_processor_count=1)  # noqa: E731
    torch.cuda.get_device_properties = properties
    if spec := find_spec("mamba_ssm"):
        module = types.ModuleType("mamba_ssm")  # without what its __init__.py imports
        module.__spec__ = spec
        module.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["mamba_ssm"] = module


def inputs_of(name: str, n_rows: int, length: int) -> list[Tensor]:
    """Return random inputs in float64: a head of keys, or a group, for
    two heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shared = [F.normalize(draw(n_rows, length, 1, WIDTH), dim=-1) for _ in range(2)]
    values, per_head = draw(n_rows, length, 2, WIDTH), draw(n_rows, length, 2).sigmoid()
    if name == "selective scan of Mamba 2":
        return [values, per_head, -draw(2).exp(), *shared]
    if name == "Kimi delta attention":
        shared = [each.repeat_interleave(2, dim=2) for each in shared]
        return [*shared, values, -draw(n_rows, length, 2, WIDTH).exp(), per_head]
    return [*shared, values, -draw(n_rows, length, 2, 1).exp(), per_head]


def results(compute: Any, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [each.clone().requires_grad_() for each in inputs]
    out = compute(inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).type_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def errors_of(name: str, kernel: Any, function: Any, rows: list[list[int]]) -> list[float]:
    n_rows, length = len(rows), sum(rows[0])
    is_packed = any(len(lengths) > 1 for lengths in rows)
    attention = metadata_of(rows) if is_packed else AttentionMetadata.of_rows(n_rows, length)
    inputs = inputs_of(name, n_rows, length)
    documents_BL = document_numbers(inputs[0], attention)
    rule: Any = selective_scan if name == "selective scan of Mamba 2" else gated_delta_rule
    found = results(
        lambda each: kernel.adapt(function, each, documents_BL, attention),
        [each.float() for each in inputs],
    )
    exact = results(lambda each: rule(*each, documents_BL, None)[0], inputs)
    return [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, exact, strict=True)
    ]


def main() -> None:
    complete_interpreter()
    for name, kernels in fused_recurrences.KERNELS.items():
        for kernel in kernels:
            if find_spec(kernel.module.partition(".")[0]) is None:
                continue
            function = getattr(importlib.import_module(kernel.module), kernel.function)
            errors = {
                "packed": errors_of(name, kernel, function, PACKED),
                "rows": errors_of(name, kernel, function, ROWS),
            }
            line = {"kernel": kernel.function, "version": version(kernel.package), **errors}
            print(json.dumps({"recurrence": name, **line}), flush=True)


if __name__ == "__main__":
    main()
