#!/usr/bin/env bash
# Guess: reading a .zst file of which the end is missing (a broken download, a full disk) raises an
#   error, as gzip does with EOFError: "Compressed file ended before the end-of-stream marker".
#
# Truth: the streaming readers of zstandard 0.25 (`stream_reader`, `copy_stream`, `read_to_iter`,
#   `zstandard.open`), and fsspec 2026.2 on top of them, return what is there and then the end of the
#   file: a third of the text is missing, and nothing says so. Only `decompress` raises. pyarrow raises
#   "Truncated compressed stream".
#
# What a trainer must do: read .zst files with pyarrow, or check that the last frame is complete; do
#   not rely on a broken last row, since plain text has none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zstandard==0.25.0 fsspec==2026.2.0 pyarrow==24.0.0
cat > "$folder/try.py" <<'PYTHON'
import gzip
import io
import random
from pathlib import Path

import fsspec
import pyarrow
import zstandard

random.seed(0)
text = "".join(f"{random.random()}\n" for _ in range(100_000)).encode()
data = zstandard.ZstdCompressor().compress(text)
cut = data[: len(data) * 2 // 3]
Path("cut.txt.zst").write_bytes(cut)
packed = gzip.compress(text)
Path("cut.txt.gz").write_bytes(packed[: len(packed) * 2 // 3])


def decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor()


def copied() -> bytes:
    target = io.BytesIO()
    decompressor().copy_stream(io.BytesIO(cut), target)
    return target.getvalue()


SILENT = {
    "stream_reader": lambda: decompressor().stream_reader(io.BytesIO(cut)).read(),
    "copy_stream": copied,
    "read_to_iter": lambda: b"".join(decompressor().read_to_iter(io.BytesIO(cut))),
    "zstandard.open": lambda: zstandard.open("cut.txt.zst", "rb").read(),
    "fsspec": lambda: fsspec.open("cut.txt.zst", "rb", compression="infer").open().read(),
}
LOUD = {
    "decompress": lambda: decompressor().decompress(cut),
    "pyarrow": lambda: pyarrow.input_stream("cut.txt.zst", compression="zstd").read(),
    "gzip": lambda: gzip.open("cut.txt.gz").read(),
}
print("zstandard", zstandard.__version__, "fsspec", fsspec.__version__)
for name, read in SILENT.items():
    found = read()
    print(f"{name}: {len(found)} of {len(text)} bytes, no error")
    assert text.startswith(found) and 0.5 < len(found) / len(text) < 0.8
for name, read in LOUD.items():
    try:
        read()
    except (zstandard.ZstdError, OSError, EOFError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
    else:
        raise SystemExit(f"{name} raised nothing")
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py
