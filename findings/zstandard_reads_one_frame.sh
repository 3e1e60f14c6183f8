#!/usr/bin/env bash
# Guess: a reader of .zst files returns everything, like gzip, bz2 and lzma, which read on when a file
#   holds several compressed parts (made by `cat a.zst b.zst`, by appending, or by pzstd).
#
# Truth: it depends on the method. With zstandard 0.25, `ZstdDecompressor().decompress(data)` and
#   `read_to_iter(file)` return the first frame and drop the rest, without an error or a warning;
#   `stream_reader`, `copy_stream` and `zstandard.open` read all frames.
#
# What a trainer must do: read with `stream_reader(file, read_across_frames=True)` or with pyarrow, and
#   test each reader with a file of two frames: what is lost looks like a smaller dataset.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zstandard==0.25.0 pyarrow==24.0.0
cat > "$folder/try.py" <<'PYTHON'
import bz2
import gzip
import io
import lzma
from pathlib import Path

import pyarrow
import zstandard

PARTS = [b"row 1\nrow 2\n", b"row 3\nrow 4\n"]
compressor = zstandard.ZstdCompressor()
data = b"".join(compressor.compress(part) for part in PARTS)
Path("rows.zst").write_bytes(data)


def decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor()


def copied() -> bytes:
    target = io.BytesIO()
    decompressor().copy_stream(io.BytesIO(data), target)
    return target.getvalue()


FIRST = {
    "decompress": lambda: decompressor().decompress(data),
    "read_to_iter": lambda: b"".join(decompressor().read_to_iter(io.BytesIO(data))),
}
ALL = {
    "stream_reader": lambda: decompressor().stream_reader(io.BytesIO(data)).read(),
    "copy_stream": copied,
    "zstandard.open": lambda: zstandard.open("rows.zst", "rb").read(),
    "pyarrow": lambda: pyarrow.input_stream("rows.zst", compression="zstd").read(),
}
print("zstandard", zstandard.__version__, "pyarrow", pyarrow.__version__)
for module in (gzip, bz2, lzma):
    assert module.decompress(b"".join(map(module.compress, PARTS))) == b"".join(PARTS)
for name, read in {**FIRST, **ALL}.items():
    found = read()
    print(f"{name}: {found.count(bytes([10]))} of 4 rows")
    assert found == (PARTS[0] if name in FIRST else b"".join(PARTS))
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py
