"""Python's garbage collection, which a training loop times itself."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def automatic_garbage_collection_off() -> Iterator[None]:
    """Within, garbage is collected only where the program says so; afterwards as before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
