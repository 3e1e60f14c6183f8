"""Profiler traces and memory snapshots: files, contents, write errors, and validation."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import file_size_limit
from torchtitan.components.observe.profiling import Profiler
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.usefixtures("log")

CPU = torch.device("cpu")


def train(profiler: Profiler, first: int, last: int) -> None:
    model = torch.nn.Linear(8, 8)
    with profiler:
        for step in range(first, last + 1):
            model(torch.ones(2, 8)).sum().backward()
            profiler.step(step)


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_events(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    assert isinstance(events, list)
    return events


# 3: no step between a trace and the warmup of the next one
@pytest.mark.parametrize("active", [1, 2, 3])
def test_traces_contain_the_operators_of_their_steps(tmp_path: Path, active: int) -> None:
    config = Profiler.Config(enable_profiling=True, profile_freq=4, profiler_active=active)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a resumed run
        train(config.build(dump_folder=str(tmp_path), device=CPU, rank=3), first=11, last=19)
    assert list_files(tmp_path) == [
        "profile_traces/step-14/rank3.json",
        "profile_traces/step-18/rank3.json",
    ]
    for name in list_files(tmp_path):
        events = read_events(tmp_path / name)
        forward = [event for event in events if event.get("name") == "aten::addmm"]
        assert len(forward) == active
        assert forward[0]["args"]["Input Dims"][1:3] == [[2, 8], [8, 8]]
        assert any("AddmmBackward" in event.get("name", "") for event in events)
        assert any(event.get("name") == "[memory]" for event in events)


def test_a_disabled_profiler_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.profiler, "profile", lambda *_, **__: pytest.fail("the profiler was started")
    )
    train(Profiler.Config().build(dump_folder=str(tmp_path), device=CPU), first=1, last=25)
    assert list_files(tmp_path) == []


def test_a_run_too_short_for_a_trace_logs_why(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    config = Profiler.Config(enable_profiling=True, profile_freq=4)
    train(config.build(dump_folder=str(tmp_path), device=CPU), first=1, last=3)
    assert list_files(tmp_path) == []
    assert (
        "no trace was written, since --profiling.profile_freq is 4 and the run had only 3 steps"
        in log.text
    )


def test_an_error_in_the_loop_stops_the_profiler_and_propagates(tmp_path: Path) -> None:
    config = Profiler.Config(enable_profiling=True, profile_freq=2)
    for _ in range(2):  # PyTorch rejects a second profiler while one runs
        profiler = config.build(dump_folder=str(tmp_path), device=CPU)
        with pytest.raises(KeyError), profiler:
            profiler.step(1)
            raise KeyError
    assert list_files(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Profiler.Config(profile_freq=0), r"profile_freq is 0"),
        (Profiler.Config(profiler_active=0), r"profiler_active is 0"),
        (Profiler.Config(profiler_warmup=-1), r"profiler_warmup is -1"),
        (
            Profiler.Config(profile_freq=3, profiler_warmup=2, profiler_active=2),
            r"profile_freq must .* = 2 \+ 2, not 3",
        ),
        (
            Profiler.Config(enable_memory_snapshot=True),
            r"requires CUDA.*device is cpu.*enable_profiling",
        ),
    ],
)
def test_invalid_settings_are_rejected(
    tmp_path: Path, config: Profiler.Config, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        config.build(dump_folder=str(tmp_path), device=CPU)


@pytest.mark.parametrize("size", [0, 5000])
def test_an_incomplete_trace_is_removed_with_a_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture, size: int
) -> None:
    """PyTorch raises no error. The next trace is written normally."""
    profiler = Profiler.Config(enable_profiling=True, profile_freq=2).build(
        dump_folder=str(tmp_path), device=CPU
    )
    with file_size_limit(size):
        train(profiler, first=1, last=3)
    (record,) = log.records
    path = tmp_path / "profile_traces/step-2/rank0.json"
    assert record.levelname == "WARNING" and record.getMessage() == (
        f"could not write the trace {path}: the profiler wrote an incomplete file (is the disk "
        "full?); training continues"
    )
    assert list_files(tmp_path) == []
    train(profiler, first=4, last=5)
    assert list_files(tmp_path) == ["profile_traces/step-5/rank0.json"]
    assert f"wrote the trace {tmp_path}/profile_traces/step-5/rank0.json" in log.text


def test_an_unwritable_folder_gives_one_warning_per_trace(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Training continues."""
    (tmp_path / "profile_traces").touch()
    config = Profiler.Config(enable_profiling=True, profile_freq=2)
    train(config.build(dump_folder=str(tmp_path), device=CPU), first=1, last=5)
    traces = [f"{tmp_path}/profile_traces/step-{step}/rank0.json" for step in (2, 4)]
    assert [record.getMessage() for record in log.records] == [
        f"could not write the trace {trace}: Not a directory; training continues"
        for trace in traces
    ]


class TestMemorySnapshot:
    """Memory snapshots with a fake allocator history, so that the order of calls is tested without
    a GPU."""

    CONFIG = Profiler.Config(enable_memory_snapshot=True, profile_freq=2)

    @pytest.fixture(autouse=True)
    def history(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        history: list[bool] = []
        monkeypatch.setattr("torchtitan.components.observe.profiling.device_type", lambda: "cuda")
        monkeypatch.setattr(
            torch.cuda.memory,
            "_record_memory_history",
            lambda enabled="all", **_: history.append(enabled is not None),
        )
        monkeypatch.setattr(
            torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot")
        )
        return history

    def test_a_snapshot_is_written_every_profile_freq_steps(
        self, tmp_path: Path, history: list[bool]
    ) -> None:
        train(
            self.CONFIG.build(dump_folder=str(tmp_path), device=torch.device("cuda"), rank=1),
            first=1,
            last=5,
        )
        assert list_files(tmp_path) == [
            "memory_snapshot/step-2/rank1.pickle",
            "memory_snapshot/step-4/rank1.pickle",
        ]
        assert history == [True, False]

    def test_an_incomplete_snapshot_is_removed_with_a_warning(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        with file_size_limit(3):
            train(
                self.CONFIG.build(dump_folder=str(tmp_path), device=torch.device("cuda")),
                first=1,
                last=2,
            )
        assert list_files(tmp_path) == []
        (record,) = log.records
        path = tmp_path / "memory_snapshot/step-2/rank0.pickle"
        assert (
            record.getMessage()
            == f"could not write the memory snapshot {path}: File too large; training continues"
        )

    def test_a_snapshot_is_written_when_memory_runs_out(
        self, tmp_path: Path, history: list[bool]
    ) -> None:
        profiler = self.CONFIG.build(dump_folder=str(tmp_path), device=torch.device("cuda"))
        with pytest.raises(torch.OutOfMemoryError), profiler:
            profiler.step(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert list_files(tmp_path) == ["memory_snapshot/step-2-out-of-memory/rank0.pickle"]
        assert history == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the allocator history requires CUDA")
def test_a_snapshot_on_cuda(tmp_path: Path) -> None:
    config = Profiler.Config(enable_memory_snapshot=True, profile_freq=1)
    with config.build(dump_folder=str(tmp_path), device=torch.device("cuda")) as profiler:
        torch.ones(1000, device="cuda")
        profiler.step(1)
    assert list_files(tmp_path) == ["memory_snapshot/step-1/rank0.pickle"]
