"""Blocks of code in which no compiled module runs."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_lock = threading.Lock()
_stance = ExitStack()
_n_blocks = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as if they were not compiled. PyTorch's stance is one for all threads,
    whose blocks may overlap: it returns when the last of them ends."""
    global _n_blocks
    with _lock:
        if _n_blocks == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _n_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _n_blocks -= 1
            if _n_blocks == 0:
                _stance.close()
