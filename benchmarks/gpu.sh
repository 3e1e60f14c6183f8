#!/usr/bin/env bash
# Measures this project on one GPU in at most ten minutes; a line of JSON after each row, in RESULTS and on the output.
#   benchmarks/gpu.sh [--rows NAME ...] [--minutes 10] [--results FILE]
# Without a GPU, or with --toy, every row runs at toy size: its numbers say only that the row works.
# The active environment is used as it is, also with another torch; PYTHON names another interpreter.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" "$root/benchmarks/gpu.py" "$@"
