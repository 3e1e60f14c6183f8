#!/usr/bin/env bash
# Guess: `ndarray.tofile(path)` raises OSError if the disk is full, as `open(path, "wb").write(...)`
# does.
# Truth: the bytes of a small array wait in a buffer of C's stdio, and the error of the last flush
# is lost: the call returns, and the file is short. Larger arrays do raise.
# A trainer must write arrays with Python's file objects (`file.write(array.tobytes())`, then flush
# and fsync), and compare the size of the file before it counts a shard, a cache or a checkpoint as
# complete.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6
cat >"$folder/try.py" <<'PYTHON'
import os
import resource
import sys

import numpy as np

# A limit of file sizes refuses bytes as a full disk does (Python ignores the signal SIGXFSZ).
SOFT, HARD = resource.getrlimit(resource.RLIMIT_FSIZE)
array, path = np.arange(5), "array.bin"


def attempt(write) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, HARD))
    try:
        write()
    except OSError as error:
        return f"raises {error.strerror}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SOFT, HARD))
    return f"returns; the file has {os.path.getsize(path)} of {array.nbytes} bytes"


def with_file_object() -> None:
    with open(path, "wb") as file:
        file.write(array.tobytes())


found = [attempt(lambda: array.tofile(path)), attempt(with_file_object)]
print(f"numpy {np.__version__}: tofile {found[0]}")
print(f"Python's file object {found[1]}")
sys.exit(found != ["returns; the file has 10 of 40 bytes", "raises File too large"])
PYTHON
cd "$folder" && venv/bin/python try.py
