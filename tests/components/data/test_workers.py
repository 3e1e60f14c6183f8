"""Persistent worker processes of the tests: a failure in one is reported and does not affect the
next run."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.equivalence.workers import WorkerFailure, Workers


def add_ranks(folder: Path) -> None:
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    (folder / f"{dist.get_rank()}: {total.item()}").touch()


def fail_on_second_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()


def die_on_second_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "message"),
    [(fail_on_second_rank, "ValueError: what went wrong"), (die_on_second_rank, "died")],
)
def test_failure_of_one_rank_is_reported_and_the_next_run_works(tmp_path, failing, message):
    with Workers(2) as workers:
        workers.run(add_ranks, tmp_path)
        start_time = time.monotonic()
        with pytest.raises(WorkerFailure) as error:
            workers.run(failing)
        assert "rank 1: " in str(error.value) and message in str(error.value)
        assert time.monotonic() - start_time < 30  # well below the timeout of a collective
        for path in tmp_path.iterdir():
            path.unlink()
        workers.run(add_ranks, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0: 3", "1: 3"}
