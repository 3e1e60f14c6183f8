#!/usr/bin/env bash
# Guess: a sample of a WebDataset archive is the files with one name before the extension, which is
#   what follows the last dot (`os.path.splitext`): `paper-1.5.txt` and `paper-1.7.txt` are two samples.
#
# Truth: webdataset 1.0 cuts names at the first dot, so that `0001.seg.png` may be a part of `0001`.
#   Versions, decimals and dates in names are then extensions: neighbors become one sample, which has no
#   "txt". `to_tuple("txt")` raises an error; a selection of the samples with "txt" passes it over without a
#   message. Two samples of the same version (`v1.0-a.txt`, `v1.0-b.txt`) also become one.
#
# What a trainer must do: cut at the first dot as webdataset does, say how many members had an
# extension that it does not read, and name samples without dots when it writes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q webdataset==1.0.2
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import importlib.metadata
import io
import os
import sys
import tarfile
import warnings

import webdataset

warnings.simplefilter("error")
warnings.simplefilter("ignore", ResourceWarning)
print("webdataset", importlib.metadata.version("webdataset"))
archive = f"{sys.argv[1]}/a.tar"


def archive_of(names):
    with tarfile.open(archive, "w") as file:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            file.addfile(info, io.BytesIO(name.encode()))
    return webdataset.WebDataset(archive, shardshuffle=False)


def samples(read):
    return [{key: value for key, value in sample.items() if key[:2] != "__"} for sample in read]


dotted = ["paper-1.5.txt", "paper-1.7.txt", "notes.txt"]
assert [os.path.splitext(name)[1] for name in dotted] == [".txt"] * 3
found = samples(archive_of(dotted))
print(found)
assert found == [{"5.txt": b"paper-1.5.txt", "7.txt": b"paper-1.7.txt"}, {"txt": b"notes.txt"}]
only = samples(archive_of(dotted).select(lambda sample: "txt" in sample))
print("with a txt:", only)
assert only == [{"txt": b"notes.txt"}]
try:
    list(archive_of(dotted).to_tuple("txt"))
except ValueError as error:
    print("to_tuple:", error)
else:
    raise AssertionError("no error")

versions = samples(archive_of(["v1.0-a.txt", "v1.0-b.txt"]))
print(versions)
assert versions == [{"0-a.txt": b"v1.0-a.txt", "0-b.txt": b"v1.0-b.txt"}]
parts = samples(archive_of(["0001.png", "0001.seg.png"]))
assert parts == [{"png": b"0001.png", "seg.png": b"0001.seg.png"}]
print("as described")
PYTHON
