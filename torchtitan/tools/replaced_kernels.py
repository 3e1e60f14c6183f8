"""`ReplacedKernels`: other implementations of PyTorch's operations on CPUs, for a while."""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

# on purpose
warnings.filterwarnings(
    "ignore", message=r"Warning only once for all operators", category=UserWarning
)


class ReplacedKernels:
    """Implementations of operations in `aten` for CPUs, which replace PyTorch's while any block of
    `block` is entered in this process. Compiled code calls its own.

    Args:
        choose: called when the first block is entered; returns name → implementation.
    """

    def __init__(self, choose: Callable[[], Mapping[str, Callable[..., object]]]):
        self._choose = choose
        # one for all blocks that the process is in; with it, its operations end
        self._libraries: list[torch.library.Library] = []
        self._entering = threading.Lock()  # threads may compute different models

    @contextmanager
    def block(self) -> Iterator[None]:
        """Replace the operations in the block."""
        libraries = self._libraries
        with self._entering:
            libraries.append(libraries[0] if libraries else self._replacing())
        try:
            yield
        finally:
            with self._entering:
                libraries.pop()

    def _replacing(self) -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL")
        for name, implementation in self._choose().items():
            library.impl(name, implementation, "CPU")
        return library
