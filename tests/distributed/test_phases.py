"""The clock of phases: a partition of the time, with marks of a device that is behind, and FSDP's
gathering."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchtitan.distributed import phases
from torchtitan.distributed.phases import GATHERING, PhaseClock, mark_gathering
from torchtitan.distributed.watchdog import Watchdog


def test_every_moment_belongs_to_one_phase():
    start, clock = time.perf_counter(), PhaseClock()
    watchdog = Watchdog(first_step_seconds=0, step_seconds=0, clock=clock)
    watchdog.phase("before a step, ignored")
    with watchdog.step(1):
        watchdog.phase("data")
        time.sleep(0.03)
        watchdog.phase("forward")
        with clock.during("validation"):
            time.sleep(0.02)
        time.sleep(0.01)
    seconds, elapsed = clock.seconds(), time.perf_counter() - start
    assert list(seconds) == [
        "start-up",
        "start of the step",
        "data",
        "forward",
        "validation",
        "between steps",
    ]
    assert (
        seconds["data"] >= 0.03
        and seconds["validation"] >= 0.02
        and 0.01 <= seconds["forward"] < seconds["data"]
    )
    # The clock begins and ends within the interval measured here, and loses nothing in between.
    assert elapsed - 0.005 < sum(seconds.values()) <= elapsed


def test_start_up_can_begin_with_the_process():
    clock = PhaseClock()
    before = clock.seconds()["start-up"]
    clock.begin_at(clock.begun - 5)
    assert (
        clock.seconds()["start-up"] == pytest.approx(before + 5, abs=0.1)
        and clock.begun <= time.time() - 5
    )


def test_marks_that_a_device_has_not_reached_count_later(monkeypatch):
    """A device that takes a second from mark to mark, and reaches them when told to."""
    device = SimpleNamespace(n_marks=0, reached=-1)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.number, device.n_marks = device.n_marks, device.n_marks + 1

        def query(self):
            return self.number <= device.reached

        def elapsed_time(self, end):
            assert end.query(), "reading would wait for the device"
            return 1000.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clock = PhaseClock(torch.device("cuda"))
    for name in ("data", "forward", "data"):
        clock.enter(name)
    assert clock.seconds() == {}  # marks 0 to 4; none is reached
    device.reached = 3
    assert clock.seconds() == {"start-up": 1.0, "data": 1.0, "forward": 1.0}
    device.reached = 5
    assert clock.seconds() == {"start-up": 1.0, "data": 3.0, "forward": 1.0}


def test_gathering_is_not_part_of_forward(workers):
    workers.run(check_gathering)


def check_gathering() -> None:
    clock, entered = PhaseClock(), []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    mark_gathering(model, clock)
    x, enter = torch.ones(2, 4), clock.enter

    def record(name: str) -> None:
        entered.append(name)
        enter(name)

    clock.enter = record
    model(x)
    assert entered == []  # in validation, for example
    clock.enter("forward")
    model(x).sum().backward()
    assert entered == ["forward", *[GATHERING, "forward"] * 3]
    assert clock.seconds()[phases.GATHERING] > 0
