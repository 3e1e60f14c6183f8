"""Settings of the process."""

import os
import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource
from torchtitan.tools.process import keep_freed_memory

keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, size = ctypes.c_void_p, [ctypes.c_void_p], 64 << 20
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pointer = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(pointer, 1, size)
    libc.free(pointer)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(
    ("configured", "is_kept"), [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False)]
)
def test_freed_memory_is_kept_unless_configured(configured, is_kept):
    """Pages that are written the second time are new ones only if they were returned to the
    kernel."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    command = [sys.executable, "-c", _FAULTS]
    output = subprocess.run(
        command, env=kept | configured, capture_output=True, text=True, check=True
    ).stdout
    first, second = map(int, output.split())
    assert (second < first / 100) == is_kept


_INTERRUPTED = """
import io, os, signal, sys
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.process import StopRequest

class Interrupted(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        if b"step 10" in bytes(data):
            os.kill(os.getpid(), signal.SIGTERM)
        return os.write(2, data)

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupted()), line_buffering=True)
init_logger()
stop = StopRequest()
logger.info("step 10")
assert stop.received
"""


def test_a_stop_during_a_write_is_logged():
    """Python calls the handler inside the write to standard error, which cannot begin another
    one."""
    printed = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=True
    ).stderr
    first, second = printed.splitlines()
    assert (
        first.endswith("INFO step 10")
        and "SIGTERM received: the run stops after this step" in second
    )
