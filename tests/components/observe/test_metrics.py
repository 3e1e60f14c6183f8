"""Metrics of a run: measurements, exclusions, sinks, console output, and resuming."""

import importlib.util
import json
import logging
import math
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.commands import run_command
from tests.conftest import MEASUREMENT, PROJECT
from torchtitan.components.observe.metric_sinks import JsonLines, Sink
from torchtitan.components.observe.metrics import MetricsProcessor
from torchtitan.components.observe.tracking_sinks import MLflow, name_for_mlflow
from torchtitan.tools import device as device_facts
from torchtitan.tools.device import PeakFlops, memory_gib, peak_flops, published_peak
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.usefixtures("log")

CPU = torch.device("cpu")
PEAK = 1e12
KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_gib",
    "data_loading_fraction",
    "n_tokens_seen",
    "step_time",
}


class Clock:
    """Clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torchtitan.components.observe.metrics.peak_flops", lambda *_: PeakFlops(PEAK, "for tests")
    )


def build_metrics(
    folder: Path, config: MetricsProcessor.Config | None = None, **runtime: Any
) -> MetricsProcessor:
    defaults: dict[str, Any] = {
        "dump_folder": str(folder),
        "device": CPU,
        "compute_dtype": torch.float32,
        "flops_per_token": 6e9,
        "total_steps": 20,
    }
    processor = (config or MetricsProcessor.Config()).build(**(defaults | runtime))
    assert isinstance(processor, MetricsProcessor)
    return processor


def train(metrics: MetricsProcessor, first: int, last: int, clock: Clock | None = None) -> None:
    for step in range(first, last + 1):
        if clock:
            clock.sleep(1.0)
        metrics.count_tokens(100)
        metrics.log_step(
            step, loss=1 / step, grad_norm=0.1 * step, lr=1e-3 / 3, n_tokens_seen=100 * step
        )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


class TestNumbers:
    def test_a_line_contains_every_number_in_full_precision(self, tmp_path: Path) -> None:
        clock = Clock()
        metrics = build_metrics(
            tmp_path, MetricsProcessor.Config(log_freq=4), world_size=2, clock=clock
        )
        metrics.start(0)
        for step in range(1, 5):
            with metrics.timing_data():
                clock.sleep(0.5)
            clock.sleep(1.5)
            metrics.count_tokens(70)
            metrics.count_tokens(30)
            metrics.log_step(
                step, loss=2 / 3, grad_norm=0.1 + 0.2, lr=1e-5 / 3, n_tokens_seen=2**40 + step
            )
        metrics.close()

        first, fourth = read_lines(tmp_path / "metrics.jsonl")
        assert set(first) == set(fourth) == KEYS
        assert (first["step"], fourth["step"]) == (1, 4)
        assert (fourth["loss"], fourth["grad_norm"], fourth["lr"]) == (2 / 3, 0.1 + 0.2, 1e-5 / 3)
        assert fourth["n_tokens_seen"] == 2**40 + 4
        # Three steps of 2 s and 100 tokens each; 2 devices share 6e9 FLOP per token. Times are
        # exact in float64.
        assert fourth["step_time"] == 2.0
        assert fourth["tokens_per_second"] == 50.0
        assert fourth["data_loading_fraction"] == 0.25
        assert fourth["tflops"] == 6e9 * 50 / 2 / 1e12
        assert fourth["mfu"] == 100 * 6e9 * 50 / 2 / PEAK
        assert 0.05 < fourth["memory_gib"] < 100

    def test_excluded_time_does_not_count(self, tmp_path: Path) -> None:
        clock = Clock()
        metrics = build_metrics(tmp_path, MetricsProcessor.Config(log_freq=2), clock=clock)
        metrics.start(0)
        train(metrics, 1, 1, clock)
        for step in (2, 3, 4):
            with metrics.timing_data():
                clock.sleep(0.25)
            clock.sleep(0.75)
            metrics.count_tokens(100)
            with metrics.exclude():  # validation, which uses the same timers, with a save inside it
                with metrics.timing_data():
                    clock.sleep(50)
                metrics.count_tokens(12345)
                with metrics.exclude():
                    clock.sleep(100)
                metrics.log_validation(step, 3.5)
            metrics.log_step(step, loss=1.0, grad_norm=1.0, lr=1.0, n_tokens_seen=0)
        metrics.close()

        training = [line for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line]
        assert [line["step"] for line in training] == [1, 2, 4]
        for line in training[1:]:
            assert (
                line["tokens_per_second"],
                line["step_time"],
                line["data_loading_fraction"],
            ) == (100.0, 1.0, 0.25)

    def test_the_first_step_does_not_wait_for_the_measured_peak(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
    ) -> None:
        clock = Clock()

        def measured(*_: object) -> PeakFlops:
            clock.sleep(50)
            return PeakFlops(PEAK, "measured")

        monkeypatch.setattr("torchtitan.components.observe.metrics.peak_flops", measured)
        metrics = build_metrics(tmp_path, MetricsProcessor.Config(log_freq=1), clock=clock)
        metrics.start(0)
        assert clock() == 1000
        train(metrics, 1, 3, clock)
        metrics.close()
        assert clock() == 1053
        lines = read_lines(tmp_path / "metrics.jsonl")
        assert [line["step_time"] for line in lines] == [1, 1, 1]
        assert lines[0]["mfu"] == 100 * 6e9 * 100 / PEAK
        assert log.messages[-1].endswith("ETA 0:00:17")

    def test_an_exception_in_exclude_restores_the_timers(self, tmp_path: Path) -> None:
        clock = Clock()
        metrics = build_metrics(tmp_path, MetricsProcessor.Config(log_freq=1), clock=clock)
        metrics.start(0)
        with pytest.raises(StopIteration), metrics.exclude():
            clock.sleep(9)
            raise StopIteration
        train(metrics, 1, 1, clock)
        assert read_lines(tmp_path / "metrics.jsonl")[0]["step_time"] == 1.0

    def test_time_before_start_does_not_count(self, tmp_path: Path) -> None:
        clock = Clock()
        metrics = build_metrics(tmp_path, clock=clock)
        clock.sleep(100)
        metrics.start(7)
        train(metrics, 8, 10, clock)
        assert read_lines(tmp_path / "metrics.jsonl")[0]["step_time"] == 1.0

    def test_first_last_and_every_nth_step_are_logged(self, tmp_path: Path) -> None:
        metrics = build_metrics(tmp_path, total_steps=25)
        metrics.start(0)
        train(metrics, 1, 25)
        assert read_steps(tmp_path / "metrics.jsonl") == [1, 10, 20, 25]
        assert [step for step in range(1, 26) if metrics.should_log(step)] == [1, 10, 20, 25]

    @pytest.mark.parametrize("flush", [True, False])  # False: an error ended the loop
    def test_the_last_step_is_always_logged(self, tmp_path: Path, flush: bool) -> None:
        clock = Clock()
        metrics = build_metrics(tmp_path, clock=clock)
        metrics.start(0)
        train(metrics, 1, 13, clock)
        if flush:
            metrics.flush()
            assert read_steps(tmp_path / "metrics.jsonl") == [1, 10, 13]
        with metrics.exclude():  # the last validation and checkpoint
            clock.sleep(50)
        metrics.count_tokens(12345)  # of an unfinished step
        metrics.close()
        last = read_lines(tmp_path / "metrics.jsonl")[-1]
        assert set(last) == KEYS
        assert (last["step"], last["loss"], last["step_time"], last["tokens_per_second"]) == (
            13,
            1 / 13,
            1.0,
            100.0,
        )
        assert read_steps(tmp_path / "metrics.jsonl") == [1, 10, 13]

    def test_the_last_step_is_logged_once(self, tmp_path: Path) -> None:
        metrics = build_metrics(tmp_path)
        metrics.start(0)
        train(metrics, 1, 10)
        metrics.flush()
        metrics.close()
        assert read_steps(tmp_path / "metrics.jsonl") == [1, 10]

    def test_validation_has_a_separate_line(self, tmp_path: Path) -> None:
        metrics = build_metrics(tmp_path)
        metrics.start(0)
        metrics.log_validation(3, 2 / 3)
        metrics.log_validation(4, 0.5, accuracy=0.25)
        assert read_lines(tmp_path / "metrics.jsonl") == [
            {"step": 3, "validation_loss": 2 / 3},
            {"step": 4, "validation_loss": 0.5, "accuracy": 0.25},
        ]

    def test_nonfinite_numbers_are_null(self, tmp_path: Path) -> None:
        metrics = build_metrics(tmp_path)
        metrics.start(0)
        metrics.log_step(
            1, loss=math.nan, grad_norm=math.inf, lr=1.0, n_tokens_seen=5, reward=-math.inf
        )
        text = (tmp_path / "metrics.jsonl").read_text()
        line = json.loads(
            text, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON")
        )
        assert (line["loss"], line["grad_norm"], line["reward"], line["lr"]) == (
            None,
            None,
            None,
            1.0,
        )

    def test_a_missing_call_of_start_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"start\(step\)"):
            train(build_metrics(tmp_path), 1, 1)


class TestResume:
    def test_lines_after_the_checkpoint_are_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        metrics = build_metrics(tmp_path, MetricsProcessor.Config(log_freq=1))
        metrics.start(0)
        train(metrics, 1, 4)
        metrics.log_validation(4, 0.5)
        train(metrics, 5, 7)
        metrics.log_validation(7, 0.25)
        metrics.close()
        kept = path.read_text().splitlines()[:5]
        with open(path, "a") as file:
            file.write('{"step": 8, "loss": 0.12')  # killed while writing

        metrics = build_metrics(tmp_path, MetricsProcessor.Config(log_freq=1))
        metrics.start(4)
        assert path.read_text().splitlines() == kept
        train(metrics, 5, 6)
        metrics.close()
        assert read_steps(path) == [1, 2, 3, 4, 4, 5, 6]
        assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]

    def test_a_complete_last_line_without_newline_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}')
        metrics = build_metrics(tmp_path, MetricsProcessor.Config(log_freq=1))
        metrics.start(2)
        train(metrics, 3, 3)
        assert read_steps(path) == [1, 2, 3]

    def test_a_resumed_run_logs_the_same_steps_as_an_uninterrupted_run(
        self, tmp_path: Path
    ) -> None:
        for start in (0, 7):
            metrics = build_metrics(tmp_path)
            metrics.start(start)
            train(metrics, start + 1, 8 if start == 0 else 20)
            metrics.close()
        assert read_steps(tmp_path / "metrics.jsonl") == [1, 10, 20]

    @pytest.mark.parametrize(("resumed_from", "steps"), [(7, [1, 7, 10, 20]), (5, [1, 10, 20])])
    def test_the_last_line_of_a_stopped_run_is_kept_if_its_step_is_resumed(
        self, tmp_path: Path, resumed_from: int, steps: list[int]
    ) -> None:
        for start, last in ((0, 7), (resumed_from, 20)):
            metrics = build_metrics(tmp_path)
            metrics.start(start)
            train(metrics, start + 1, last)
            metrics.close()
        assert read_steps(tmp_path / "metrics.jsonl") == steps

    def test_resume_works_without_a_metrics_file(self, tmp_path: Path) -> None:
        metrics = build_metrics(tmp_path / "new" / "folder")
        metrics.start(9)
        train(metrics, 10, 10)
        assert read_steps(tmp_path / "new" / "folder" / "metrics.jsonl") == [10]

    def test_a_new_run_renames_the_old_file(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        for last in (10, 20, 1):
            metrics = build_metrics(tmp_path)
            metrics.start(0)
            train(metrics, 1, last)
            metrics.close()
        assert read_steps(tmp_path / "metrics-1.jsonl") == [1, 10]
        assert read_steps(tmp_path / "metrics-2.jsonl") == [1, 10, 20]
        assert read_steps(tmp_path / "metrics.jsonl") == [1]
        assert "renamed to metrics-2.jsonl" in log.text


class TestTensorBoard:
    CONFIG = MetricsProcessor.Config(log_freq=1, enable_tensorboard=True)

    @staticmethod
    def scalars(folder: Path) -> dict[tuple[int, str], float]:
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0})
        events.Reload()
        return {
            (e.step, tag): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)
        }

    @staticmethod
    def logged(path: Path) -> dict[tuple[int, str], float]:
        return {
            (line["step"], k): v
            for line in read_lines(path)
            for k, v in line.items()
            if k != "step"
        }

    def test_scalars_match_the_metrics_file(self, tmp_path: Path) -> None:
        metrics = build_metrics(tmp_path, self.CONFIG)
        metrics.start(0)
        train(metrics, 1, 3)
        metrics.log_validation(3, 0.7)
        before_close = self.scalars(tmp_path / "tb")
        metrics.close()
        # 1e-6 relative: TensorBoard stores single precision (2^-24 = 6e-8).
        assert before_close == pytest.approx(self.logged(tmp_path / "metrics.jsonl"), rel=1e-6)
        assert len(before_close) == 3 * (len(KEYS) - 1) + 1

    def test_a_resumed_run_purges_later_points(self, tmp_path: Path) -> None:
        for start, last in ((0, 6), (3, 4)):
            metrics = build_metrics(tmp_path, self.CONFIG)
            metrics.start(start)
            train(metrics, start + 1, last)
            metrics.close()
        points = self.scalars(tmp_path / "tb")
        assert sorted(step for step, tag in points if tag == "loss") == [1, 2, 3, 4]
        assert points == pytest.approx(self.logged(tmp_path / "metrics.jsonl"), rel=1e-6)

    def test_a_new_run_renames_the_old_folder(self, tmp_path: Path) -> None:
        for last in (2, 1):
            metrics = build_metrics(tmp_path, self.CONFIG)
            metrics.start(0)
            train(metrics, 1, last)
            metrics.close()
        assert {step for step, _ in self.scalars(tmp_path / "tb-1")} == {1, 2}
        assert {step for step, _ in self.scalars(tmp_path / "tb")} == {1}


class TestWandB:
    CONFIG = MetricsProcessor.Config(log_freq=1, enable_wandb=True)

    @pytest.fixture(autouse=True)
    def logged_in(self, monkeypatch):
        if importlib.util.find_spec("wandb"):
            import wandb

            wandb.teardown()  # it reads the environment once for the process
            monkeypatch.setattr("wandb.login", lambda **options: True)

    @pytest.mark.slow
    def test_values_are_logged_and_the_run_is_resumed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("wandb", reason="requires wandb")
        calls: list[dict[str, Any]] = []

        def init(**settings: Any) -> FakeRun:
            calls.append(settings)
            return FakeRun()

        monkeypatch.setattr("wandb.init", init)
        for start, last in ((0, 2), (1, 2), (0, 1)):
            metrics = build_metrics(tmp_path, self.CONFIG, run_config={"lr": 0.5})
            metrics.start(start)
            train(metrics, start + 1, last)
            metrics.close()
        assert [call["id"] for call in calls] == [None, FakeRun.id, None]
        assert [call["config"] for call in calls] == [{"lr": 0.5}] * 3
        assert [step for step, _ in FakeRun.logged] == [1, 2, 2, 1]
        assert all(set(values) == KEYS - {"step"} for _, values in FakeRun.logged)
        assert FakeRun.finished == 3

    @pytest.mark.slow
    def test_offline_mode_needs_no_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("wandb", reason="requires wandb")
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
            monkeypatch.setenv(name, value)
        metrics = build_metrics(tmp_path, self.CONFIG)
        metrics.start(0)
        train(metrics, 1, 2)
        metrics.close()
        assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
        assert read_steps(tmp_path / "metrics.jsonl") == [1, 2]

    def test_a_failed_login_keeps_the_files_of_the_earlier_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wandb = pytest.importorskip("wandb", reason="requires wandb")

        def init(**settings: Any) -> None:
            raise wandb.Error("not logged in")

        monkeypatch.setattr("wandb.init", init)
        for folder in (tmp_path, tmp_path / "tb"):
            folder.mkdir(exist_ok=True)
            (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        config = MetricsProcessor.Config(enable_wandb=True, enable_tensorboard=True)
        with pytest.raises(UserError, match=r"not logged in.*wandb login"):
            build_metrics(tmp_path, config).start(0)
        assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tb", "wandb"}
        assert read_steps(tmp_path / "metrics.jsonl") == [1]

    def test_a_missing_package_names_the_install_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(UserError, match="pip install wandb$"):
            build_metrics(tmp_path, self.CONFIG)

    def test_a_missing_login_is_found_before_the_model_is_built(self, monkeypatch):
        pytest.importorskip("wandb", reason="requires wandb")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        logins = []
        monkeypatch.setattr("wandb.login", lambda **options: bool(logins.append(options)))
        for mode in ("offline", "disabled"):
            settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
            monkeypatch.setattr("wandb.setup", lambda settings=settings: settings)
            self.CONFIG.check_logins()
        assert logins == []
        online = SimpleNamespace(settings=SimpleNamespace(mode="online"))
        monkeypatch.setattr("wandb.setup", lambda: online)
        self.CONFIG.validate()  # such as of a dry run, or of a host that sends no metrics
        assert logins == []
        with pytest.raises(UserError, match="not logged in; run `wandb login`, set WANDB_MODE"):
            self.CONFIG.check_logins()
        assert logins == [{"prompt": False, "verify": False}]
        monkeypatch.setattr("wandb.login", lambda **options: True)
        self.CONFIG.check_logins()

    def test_a_folder_named_wandb_is_not_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "wandb").mkdir()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        with pytest.raises(UserError, match="needs the package wandb"):
            self.CONFIG.validate()


def tracked(folder: Path, config: MetricsProcessor.Config, *spans: tuple[int, int]) -> None:
    """Log the steps of sessions: each after a step, up to another one."""
    for start, last in spans:
        secret = {"api_key": "abcdefgh", "lr": 0.5}
        metrics = build_metrics(folder, config, run_config={"optimizer": secret})
        metrics.start(start)
        train(metrics, start + 1, last)
        metrics.close()


@pytest.mark.parametrize(
    "name, allowed",
    [
        ("validation_loss/wiki text", "validation_loss/wiki text"),
        ("loss/fineweb-edu:sample@rev[train]", "loss/fineweb-edu_sample_rev_train_"),
        (
            "evaluation/gsm8k/exact_match,strict-match",
            "evaluation/gsm8k/exact_match_strict-match",
        ),
        ("loss//data/../a.jsonl", "loss/_/data/_/a.jsonl"),
    ],
)
def test_names_that_mlflow_takes(name: str, allowed: str) -> None:
    digest = "" if name == allowed else "_[0-9a-f]{8}"
    assert re.fullmatch(re.escape(allowed) + digest, name_for_mlflow(name))
    assert name_for_mlflow(allowed) == allowed


class TestMLflow:
    CONFIG = MetricsProcessor.Config(log_freq=1, enable_mlflow=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("store", ["file", "sqlite"])
    def test_a_resumed_run_continues(
        self, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mlflow = pytest.importorskip("mlflow", reason="requires mlflow")
        if store == "sqlite":
            pytest.importorskip("alembic", reason="requires mlflow, not mlflow-skinny")
        uri = tmp_path.as_uri() if store == "file" else f"sqlite:///{tmp_path / 'mlflow.db'}"
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
        tracked(tmp_path / "run", self.CONFIG, (0, 2), (2, 4))
        client = mlflow.MlflowClient(uri)
        experiment = client.get_experiment_by_name("mine")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED" and run.info.run_name == "run"
        assert run.data.params == {"optimizer.api_key": "***", "optimizer.lr": "0.5"}
        history = client.get_metric_history(run.info.run_id, "loss")
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [(point.step, point.value) for point in history] == [
            (line["step"], line["loss"]) for line in lines
        ]
        assert len(history) == 4
        tracked(tmp_path / "run", self.CONFIG, (0, 1))  # a new run
        assert len(client.search_runs([experiment.experiment_id])) == 2

    @pytest.mark.slow
    def test_an_infinite_loss_is_not_finite_in_a_database(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mlflow = pytest.importorskip("mlflow", reason="requires mlflow")
        pytest.importorskip("alembic", reason="requires mlflow, not mlflow-skinny")
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        tracker = MLflow(tmp_path, 0, {})
        for step, loss in enumerate([2.5, math.inf, -math.inf]):
            tracker.write(step, {"loss": loss})
        tracker.close()
        run_id = (tmp_path / "mlflow" / "run_id").read_text()
        history = mlflow.MlflowClient(uri).get_metric_history(run_id, "loss")
        assert [math.isfinite(point.value) for point in history] == [True, False, False]

    @pytest.mark.slow
    def test_a_store_that_does_not_open_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("mlflow", reason="requires mlflow")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
        with pytest.raises(UserError, match="MLflow does not start.*MLFLOW_TRACKING_URI"):
            tracked(tmp_path, self.CONFIG, (0, 1))
        assert not (tmp_path / "metrics.jsonl").exists()


class TestTrackio:
    CONFIG = MetricsProcessor.Config(log_freq=1, enable_trackio=True)

    @pytest.mark.slow
    def test_a_resumed_run_continues(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("trackio", reason="requires trackio")
        program = (
            "import json, sys\nfrom pathlib import Path\n"
            "from tests.components.observe.test_metrics import TestTrackio, tracked\n"
            f"tracked(Path({str(tmp_path / 'run')!r}), TestTrackio.CONFIG, (0, 2), (2, 4))\n"
            "import trackio\n"
            "runs = list(trackio.Api().runs('mine'))\n"
            "print(json.dumps([len(runs), runs[0].name]))\n"
        )
        environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "t"), "TRACKIO_PROJECT": "mine"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        printed = next(line for line in done.stdout.splitlines() if line.startswith("["))
        n_runs, name = json.loads(printed)
        assert n_runs == 1 and name.startswith("run-")
        database = sqlite3.connect(tmp_path / "t" / "mine.db")
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [(step, json.loads(values)["loss"]) for step, values in rows] == [
            (line["step"], line["loss"]) for line in lines
        ]
        assert len(rows) == 4


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_tracker_names_the_install_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    config = MetricsProcessor.Config(**{f"enable_{name}": True})
    with pytest.raises(UserError, match=f"needs the package {name}: pip install {name}$"):
        build_metrics(tmp_path, config)


class FakeRun:
    """Fake W&B run with the methods that this project uses."""

    id = "abc123"
    logged: list[tuple[int, dict[str, float]]] = []
    finished = 0

    def log(self, values: dict[str, float], step: int) -> None:
        FakeRun.logged.append((step, values))

    def finish(self) -> None:
        FakeRun.finished += 1


class TestSinks:
    def test_other_ranks_write_nothing(self, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
        log.set_level(logging.ERROR, logger="torchtitan")  # like `init_logger` on other ranks
        config = MetricsProcessor.Config(log_freq=1, enable_tensorboard=True)
        metrics = build_metrics(tmp_path / "out", config, rank=1, world_size=2)
        metrics.start(0)
        train(metrics, 1, 3)
        metrics.log_validation(3, 0.5)
        metrics.close()
        assert not (tmp_path / "out").exists()
        assert not log.records

    def test_another_rank_with_logging_prints_but_does_not_write(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        metrics = build_metrics(tmp_path / "out", rank=1, world_size=2)
        metrics.start(0)
        train(metrics, 1, 1)
        assert not (tmp_path / "out").exists()
        assert "loss  1.0000" in log.text

    def test_a_subclass_can_add_a_sink(self, tmp_path: Path) -> None:
        received: list[tuple[int, dict[str, float]]] = []

        class Memory(Sink):
            def write(self, step: int, values: Mapping[str, float]) -> None:
                received.append((step, dict(values)))

            def close(self) -> None:
                received.append((-1, {}))

        class MyMetrics(MetricsProcessor):
            def make_sinks(self, step: int) -> list[Sink]:
                return [*super().make_sinks(step), Memory()]

        metrics = build_metrics(tmp_path, MyMetrics.Config())
        assert isinstance(metrics, MyMetrics)
        metrics.start(0)
        train(metrics, 1, 10)
        metrics.close()
        assert [step for step, _ in received] == [1, 10, -1]
        assert {"step": 10, **received[1][1]} == read_lines(tmp_path / "metrics.jsonl")[1]

    def test_a_failing_sink_warns_once_and_others_continue(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        class Full(Sink):
            def write(self, step: int, values: Mapping[str, float]) -> None:
                raise OSError("No space left on device")

            def close(self) -> None:
                raise OSError("No space left on device")

        class MyMetrics(MetricsProcessor):
            def make_sinks(self, step: int) -> list[Sink]:
                return [Full(), *super().make_sinks(step)]

        metrics = build_metrics(tmp_path, MyMetrics.Config(log_freq=1))
        metrics.start(0)
        train(metrics, 1, 3)
        metrics.close()
        assert read_steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
        warnings = [record.message for record in log.records if record.levelno == logging.WARNING]
        assert warnings == [
            "Full cannot write metrics: No space left on device; training continues"
        ]

    def test_a_failed_write_leaves_no_partial_line(self, tmp_path: Path) -> None:
        """The write fails because the file size limit of the process is 30 bytes."""
        script = (
            "import resource, signal; from pathlib import Path; "
            "from torchtitan.components.observe.metric_sinks import JsonLines\n"
            f"sink = JsonLines(Path({str(tmp_path / 'm.jsonl')!r}), 0)\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))\n"
            "sink.write(1, {'loss': 1.0})\n"
            "try: sink.write(2, {'loss': 0.5})\n"
            "except OSError as error: print('OSError')\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))\n"
            "sink.write(3, {'loss': 0.25})\n"
        )
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        result = run_command(
            [sys.executable, "-c", script], env=environment, timeout=60, check=True
        )
        assert result.stdout == "OSError\n"
        assert read_lines(tmp_path / "m.jsonl") == [
            {"step": 1, "loss": 1.0},
            {"step": 3, "loss": 0.25},
        ]

    def test_lines_are_flushed_immediately(self, tmp_path: Path) -> None:
        sink = JsonLines(tmp_path / "m.jsonl", 0)
        sink.write(1, {"loss": 1.0})
        assert read_steps(tmp_path / "m.jsonl") == [1]

    def test_an_unwritable_dump_folder_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=f"metrics cannot be written to {tmp_path / 'file'}: "):
            build_metrics(tmp_path / "file").start(0)


class TestConsole:
    def test_the_console_line(self, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
        clock = Clock()
        metrics = build_metrics(tmp_path, total_steps=100, clock=clock)
        metrics.start(0)
        clock.sleep(500)  # the first step does not count for the ETA
        train(metrics, 1, 10, clock)
        metrics.log_validation(10, 1.25, accuracy=0.5)
        lines = [record.message for record in log.records]
        assert "MFU is relative to 1.00 TFLOP/s (for tests)" in lines[0]
        assert lines[1].endswith("ETA -")
        assert lines[2].startswith(
            "step  10/100  loss  0.1000  grad norm  1.0000  lr 3.33e-04      100 tokens/s    0.60 "
            "TFLOP/s  60.0% MFU  "
        )
        assert lines[2].endswith("GiB  ETA 0:01:30")
        assert lines[3] == "step  10/100  validation loss 1.2500  accuracy 0.5"

    def test_the_eta_includes_excluded_time(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        clock = Clock()
        metrics = build_metrics(
            tmp_path, MetricsProcessor.Config(log_freq=2), total_steps=4, clock=clock
        )
        metrics.start(0)
        train(metrics, 1, 1, clock)
        with metrics.exclude():
            clock.sleep(9)
        train(metrics, 2, 2, clock)
        assert log.messages[-1].endswith("ETA 0:00:20")

    def test_the_eta_uses_the_mean_step_time(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        clock = Clock()
        metrics = build_metrics(
            tmp_path, MetricsProcessor.Config(log_freq=1), total_steps=5, clock=clock
        )
        metrics.start(0)
        for step, seconds in ((1, 60), (2, 1), (3, 3)):
            clock.sleep(seconds)
            train(metrics, step, step)
        assert log.messages[-1].endswith("ETA 0:00:04")

    @pytest.mark.parametrize("terminal", [True, False])
    def test_only_a_terminal_gets_color(
        self,
        tmp_path: Path,
        log: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        terminal: bool,
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
        metrics = build_metrics(tmp_path)
        metrics.start(0)
        train(metrics, 1, 1)
        assert ("\033[" in log.messages[-1]) == terminal
        assert "\033[" not in (tmp_path / "metrics.jsonl").read_text()

    def test_custom_metrics_are_shown(self, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
        metrics = build_metrics(tmp_path)
        metrics.start(0)
        metrics.log_step(1, loss=1.0, grad_norm=1.0, lr=1.0, n_tokens_seen=1, reward=0.123456)
        assert log.messages[-1].endswith("reward 0.1235")
        assert read_lines(tmp_path / "metrics.jsonl")[0]["reward"] == 0.123456


class TestConfig:
    def test_log_freq_must_be_positive(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"metrics\.log_freq is 0"):
            build_metrics(tmp_path, MetricsProcessor.Config(log_freq=0))

    @pytest.mark.slow
    def test_importing_metrics_does_not_import_trackers(self) -> None:
        script = (
            "import sys, torchtitan.components.observe.metrics, "
            "torchtitan.components.observe.profiling\n"
            "print([name for name in ('tensorboard', 'wandb') if name in sys.modules])"
        )
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert result.stdout == "[]\n"


class TestDevice:
    def test_a_peak_is_measured_even_if_the_machine_pauses(self, monkeypatch):
        """As after a pause until the end of the measurement."""
        monkeypatch.setattr(device_facts, "_CPU_SECONDS", 0.0)
        assert peak_flops(torch.device("cpu"), torch.float32).value > 0

    @pytest.mark.parametrize(
        ("name", "peak"),
        [
            ("NVIDIA A100-SXM4-80GB", 312e12),
            ("NVIDIA H100 80GB HBM3", 989e12),
            ("NVIDIA H100 PCIe", 756e12),
            ("NVIDIA H100 NVL", 835e12),
            ("NVIDIA H200", 989e12),
            ("NVIDIA GB200", 2500e12),
            ("NVIDIA L4", 121e12),
            ("NVIDIA L40S", 362e12),
            ("AMD Instinct MI300X", 1307e12),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
            ("NVIDIA A1000", None),
            ("NVIDIA GeForce RTX 4090", None),
        ],
    )
    def test_published_peaks_by_device_name(self, name: str, peak: float | None) -> None:
        assert published_peak(name) == peak

    def test_a_gpu_uses_the_published_peak_in_bfloat16_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        monkeypatch.setattr(
            device_facts, "_measured_peak", lambda device, dtype: PeakFlops(1.0, "measured")
        )
        cuda = torch.device("cuda")
        assert peak_flops(cuda, torch.bfloat16) == (989e12, "published for NVIDIA H200")
        assert peak_flops(cuda, torch.float32) == (1.0, "measured")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T0")
        assert peak_flops(cuda, torch.bfloat16) == (1.0, "measured")

    @pytest.fixture
    def measuring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The default measurement, which `conftest` shortens."""
        for name, value in zip(("_CPU_SECONDS", "_CPU_SIZES"), MEASUREMENT, strict=True):
            monkeypatch.setattr(device_facts, name, value)

    @pytest.mark.usefixtures("measuring")
    def test_the_fastest_product_is_the_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = {512: 0.001, 1024: 0.002, 2048: 1.0}
        monkeypatch.setattr(
            device_facts, "_product_seconds", lambda factors: seconds[factors.shape[1]]
        )
        # A product of n x n matrices takes n^2 dot products of n multiplications and n additions.
        expected = (
            1024**2 * (1024 + 1024) / 0.002,
            "measured: 1024x1024 matrix product in bfloat16",
        )
        assert peak_flops(CPU, torch.bfloat16) == expected

    @pytest.mark.slow
    @pytest.mark.usefixtures("measuring")
    def test_the_peak_of_a_cpu_is_measured(self) -> None:
        random_state = torch.get_rng_state()
        start = time.perf_counter()
        peak = peak_flops(CPU, torch.float32)
        took = time.perf_counter() - start
        assert torch.equal(torch.get_rng_state(), random_state), (
            "the measurement changed the random state"
        )
        # A fraction of a second on idle cores; it must stay bounded on busy ones.
        assert took < 5.0

        a = torch.rand(1024, 1024)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        reference = 2 * 1024**3 / min(times)
        # Within a factor of 8, since other processes may use the cores; a wrong unit is off by
        # more.
        assert reference / 8 < peak.value < reference * 8

    @pytest.mark.slow
    def test_memory_is_the_peak_of_this_process(self) -> None:
        before = memory_gib(CPU)
        block = torch.ones(2**28)  # 1 GiB, written
        peak = memory_gib(CPU)
        del block
        # The peak never falls, also not when memory is freed.
        assert before <= peak == pytest.approx(memory_gib(CPU), abs=1e-3)
        assert peak > 1.0

        code = (
            "from torchtitan.tools.device import memory_gib; import torch; "
            "print(memory_gib(torch.device('cpu')))"
        )
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        if sys.platform == "linux":  # ru_maxrss would report this test's 1 GiB
            assert 0.05 < float(child.stdout) < 1.0


def test_the_console_shows_the_rewards_of_preferences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = build_metrics(tmp_path)
    metrics.start(0)
    rewards = {
        "rewards/chosen": 0.1,
        "rewards/margins": 0.25,
        "rewards/accuracies": 0.75,
        "expert_load/layers.0": 2.0,
    }
    metrics.log_step(1, loss=1.0, grad_norm=0.1, lr=1e-3, n_tokens_seen=100, **rewards)
    metrics.close()
    line = next(record.getMessage() for record in caplog.records if "step " in record.getMessage())
    assert "  margin 0.25  accuracy 0.75" in line and "/layers" not in line and "chosen" not in line
    assert rewards.items() <= read_lines(tmp_path / "metrics.jsonl")[0].items()
