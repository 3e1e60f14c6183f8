#!/usr/bin/env bash
# Guess: inside `with mode:`, a TorchFunctionMode sees every call of a torch function of this thread,
#   also the calls of a checkpointed layer that a backward pass inside the block repeats, as a
#   TorchDispatchMode does.
#
# Truth: with PyTorch 2.13, no TorchFunctionMode is active while the backward pass runs Python code:
#   neither in functions that `torch.utils.checkpoint` computes again nor in hooks of gradients. The
#   repeated layer calls the original functions, and the gradients are of other numbers than the forward
#   pass computed, without an error. Selective checkpointing reports operations that differ as "encountered
#   during backward but not found in storage".
#
# What a trainer must do: enter the mode inside the checkpointed function, use a TorchDispatchMode, or
#   replace the function itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

calls = {"function": 0, "dispatch": 0}


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        calls["function"] += func is torch.sin
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        calls["dispatch"] += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


class Replace(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.cos if func is torch.sin else func
        return func(*args, **(kwargs or {}))


def layer(x):
    return torch.sin(x).exp()


def with_mode(x):
    with Replace():
        return layer(x)


def checkpointed(function, context_fn=noop_context_fn):
    return functools.partial(checkpoint, function, use_reentrant=False, context_fn=context_fn)


def gradient(function):
    x = torch.ones(3, requires_grad=True)
    with Replace():
        function(x).sum().backward()
    return x.grad[0].item()


def main():
    print("torch", torch.__version__)
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

    found = [gradient(one) for one in (layer, checkpointed(layer), checkpointed(with_mode))]
    print("gradient with a function replaced; checkpointed; with the mode inside:", found)
    assert found[1] != found[0] == found[2]
    saved = [torch.ops.aten.sin.default, torch.ops.aten.cos.default]
    try:
        selective = functools.partial(create_selective_checkpoint_contexts, saved)
        gradient(checkpointed(layer, selective))
    except RuntimeError as error:
        print(error)
        assert "encountered during backward but not found in storage" in str(error)
    else:
        raise AssertionError("no error")
    print("as described")


main()
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
