#!/usr/bin/env bash
# Guess: inside `with mode:`, a TorchFunctionMode sees every call of a torch function of this thread,
#   also the calls of a checkpointed layer that a backward pass inside the block repeats, as a
#   TorchDispatchMode does.
#
# Truth: with PyTorch 2.13, no TorchFunctionMode is active while the backward pass runs Python code:
#   neither in functions that `torch.utils.checkpoint` computes again nor in hooks of gradients. The
#   repeated layer calls the original functions: other numbers than in the forward pass, or other
#   operations, such as another kernel of attention, which selective checkpointing then reports as
#   "encountered during backward but not found in storage".
#
# What a trainer must do: enter the mode inside the checkpointed function, use a TorchDispatchMode, or
#   replace the function itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

calls = {"function": 0, "dispatch": 0}


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        calls["function"] += func is torch.sin
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        calls["dispatch"] += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


def main():
    print("torch", torch.__version__)

    def layer(x):
        return torch.sin(x).exp()

    x = torch.ones(3, requires_grad=True)
    with Function(), Dispatch():
        y = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()
    print("calls of sin that a mode saw, of 2:", calls)
    assert calls == {"function": 1, "dispatch": 2}

    calls["function"] = 0
    with Function():
        y = x.cos()
        y.register_hook(lambda gradient: torch.sin(gradient))
        y.sum().backward()
    print("calls of sin in a hook of a gradient that the mode saw, of 1:", calls["function"])
    assert calls["function"] == 0
    print("as described")


main()
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
