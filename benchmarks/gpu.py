"""Speed of this project on one GPU, row by row, in at most ten minutes; started by
benchmarks/gpu.sh.

Each row runs in a process forked after the imports, so that a row that fails, hangs or runs out of
memory costs only itself. Its line of JSON is written at once, so that nothing is lost when time
ends: `row`, `seconds`, and either `result` or `error`. Rows that ran out of time are marked. The
first line describes the machine.

The rows are in gpu_rows.py. At toy size (without a GPU, or with --toy) their numbers mean nothing.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

IMPORT_START = time.perf_counter()

import torch  # noqa: E402
from gpu_rows import ROWS, Numbers, Size  # noqa: E402

from torchtitan.tools.device import device_description, device_type  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - IMPORT_START


def in_child(row: str, size: Size, connection: Connection) -> None:
    os.setpgid(0, 0)  # a group of its own, so that ending it also ends what it started
    os.dup2(2, 1)  # only lines of JSON on the output
    try:
        connection.send({"result": ROWS[row](size)})
    except BaseException as error:  # any error, also of a wrong option, is a result
        connection.send({"error": f"{type(error).__name__}: {error}"[:1000]})


def rounded(value: Any) -> Any:
    """Round the floats in a row to five digits."""
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run_row(row: str, size: Size, limit: float) -> Numbers:
    """Run a row in a process of its own, for at most `limit` seconds; return its line."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    started = time.perf_counter()
    process = context.Process(target=in_child, args=(row, size, theirs))
    process.start()
    theirs.close()
    line: Numbers = {"error": f"no result within {limit:.0f} s"}
    with contextlib.suppress(EOFError):
        if ours.poll(limit):
            line = {"error": "the process died"}
            line = ours.recv()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)
    process.join()
    return {"row": row, "seconds": round(time.perf_counter() - started, 1), **line}


def machine(size: Size) -> Numbers:
    """Describe the machine, in a process of its own: CUDA must not start before the rows are
    forked."""
    return {
        "device": device_description(size.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "toy": size.toy,
        "import_seconds": round(IMPORT_SECONDS, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="when time ends, remaining rows are skipped"
    )
    parser.add_argument(
        "--row_seconds", type=float, default=120.0, help="at most this many seconds per row"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("gpu-results.jsonl"), help="lines are appended to it"
    )
    parser.add_argument(
        "--toy", action="store_true", help="toy size, on the CPU; also without a GPU"
    )
    options = parser.parse_args()
    deadline = time.perf_counter() + 60 * options.minutes - IMPORT_SECONDS
    # the other check starts CUDA, and then no fork can
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    size = Size(toy=options.toy or device_type() != "cuda")
    if size.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ROWS["machine"] = machine
    with options.results.open("a") as results:
        for row in ("machine", *options.rows):
            remaining = deadline - time.perf_counter()
            if remaining > 5:
                line = run_row(row, size, min(remaining, options.row_seconds))
            else:
                line = {"row": row, "seconds": 0.0, "error": "no time remained"}
            text = json.dumps(rounded(line))
            print(text, flush=True)
            results.write(text + "\n")
            results.flush()


if __name__ == "__main__":
    main()
