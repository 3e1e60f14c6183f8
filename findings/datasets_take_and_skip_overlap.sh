#!/usr/bin/env bash
# Guess: stream.take(n) and stream.skip(n) divide a stream into validation and training data, without
#   a common row and without loss.
#
# Truth: in a DataLoader with workers, and after split_dataset_by_node, datasets 5.2 takes and skips
#   in each part of the files: n is divided by the number of parts. Both halves fit only if they are
#   read by the same number of workers and ranks. A validation set read without workers shares rows
#   with a training set read with two, and with three, other rows are in neither.
#
# What a trainer must do: give validation its own files or split; or choose its rows by a property of
#   the row, such as a hash of its text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 datasets==5.2.0 numpy==2.3.5
cat > "$folder/try.py" <<'PYTHON'
import warnings

import datasets
import torch
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


def read(stream, workers):
    rows = DataLoader(stream, batch_size=None, num_workers=workers)
    return sorted(row["row"] for row in rows)


if __name__ == "__main__":
    print("datasets", datasets.__version__, "torch", torch.__version__)
    table = datasets.Dataset.from_dict({"row": list(range(12))})
    stream = table.to_iterable_dataset(num_shards=3)
    validation = read(stream.take(6), 0)
    found = {}
    for workers in (0, 2, 3):
        training = read(stream.skip(6), workers)
        both = set(validation) & set(training)
        neither = set(range(12)) - set(validation) - set(training)
        found[workers] = sorted(both), sorted(neither)
        print(f"{workers} workers: in both {found[workers][0]}, in neither {found[workers][1]}")
        halves = read(stream.take(6), workers) + training
        assert sorted(halves) == list(range(12)), "with equal numbers of workers, the halves fit"
    assert found == {0: ([], []), 2: ([3], [6]), 3: ([2, 3], [8, 9])}, found
    print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
