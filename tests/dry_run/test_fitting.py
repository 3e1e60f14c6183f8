"""The choice of activation checkpointing by dry runs and the memory of a GPU."""

import dataclasses
import logging
import os
from pathlib import Path

import pytest
import torch
import yaml

import torchtitan.cli.train as cli
from tests.processes import run_processes
from tests.training import read_metrics, tiny_config
from torchtitan.dry_run import fitting
from torchtitan.dry_run.report import reports_of
from torchtitan.experiments.preference import config_registry as preferences
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_8b_lora, llama3_debugmodel
from torchtitan.tools.errors import UserError
from torchtitan.tools.process import use_expandable_segments
from torchtitan.train import _check_same_mode


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return tiny_config(
        folder, model__n_layers=4, training__seq_len=512, activation_checkpoint__mode="auto"
    )


@pytest.fixture(scope="module")
def peaks(config) -> dict[str, int]:
    modes = ("none", "selective", "full")
    return {
        mode: next(reports_of(fitting.with_mode(config, mode), 1)).peak_reserved_bytes
        for mode in modes
    }


@pytest.mark.parametrize(
    ("fits", "chosen"), [("none", "none"), ("selective", "selective"), ("full", "full")]
)
def test_the_least_recomputation_that_fits(config, peaks, monkeypatch, caplog, fits, chosen):
    assert peaks["none"] > peaks["selective"] > peaks["full"]
    monkeypatch.setattr(fitting, "device_type", lambda: "cuda")
    monkeypatch.setattr(fitting, "total_memory", lambda: peaks[fits] / fitting.USABLE + 1)
    with caplog.at_level(logging.INFO):
        fitting_config = fitting.with_fitting_checkpoints(config, 1)
    expected = dataclasses.replace(config.activation_checkpoint, mode=chosen)
    assert fitting_config == dataclasses.replace(config, activation_checkpoint=expected)
    assert f"activation checkpointing: {chosen} " in caplog.text
    assert ("selective " + format(peaks["selective"] / 2**30, ".1f") in caplog.text) == (
        chosen != "none"
    )


def test_without_a_gpu_nothing_is_recomputed(config, monkeypatch):
    monkeypatch.setattr(fitting, "device_type", lambda: "cpu")
    assert fitting.with_fitting_checkpoints(config, 8).activation_checkpoint.mode == "none"


def test_the_launcher_decides_for_all_ranks(tmp_path, monkeypatch):
    """Ranks get the mode as an option, so that they cannot choose differently, and it is in the
    run's config.yaml."""
    monkeypatch.setenv("NGPU", "2")
    launched = []
    monkeypatch.setattr(cli, "launch", lambda args, **_: launched.append(args) or 0)
    args = ["--activation_checkpoint.mode", "auto", f"--dump_folder={tmp_path}"]
    assert cli.train(args) == 0
    assert launched == [[*args, "--activation_checkpoint.mode=none"]]
    monkeypatch.setenv("NGPU", "1")
    assert (
        cli.train([*args, "--training.steps=1", "--validator.no_enable", "--training.seq_len=32"])
        == 0
    )
    assert (
        yaml.safe_load((tmp_path / "config.yaml").read_text())["activation_checkpoint"]["mode"]
        == "none"
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", [2**60, 0])
def test_a_run_is_the_same_after_dry_runs_in_its_process(tmp_path, monkeypatch, memory):
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setattr(fitting, "device_type", lambda: "cuda")
    monkeypatch.setattr(fitting, "total_memory", lambda: memory)
    mode = "none" if memory else "full"
    for chosen in ("auto", mode):
        folder = f"--dump_folder={tmp_path / chosen}"
        words = [
            "--training.steps=2",
            "--validator.no_enable",
            "--training.seq_len=32",
            "--metrics.log_freq=1",
        ]
        assert cli.train([f"--activation_checkpoint.mode={chosen}", folder, *words]) == 0
    auto, explicit = (read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("auto", mode))
    assert auto == explicit and len(auto) == 2
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("auto", mode)]
    assert files[0] == files[1]
    assert (
        yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["activation_checkpoint"][
            "mode"
        ]
        == mode
    )


def choose_by_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    _check_same_mode("full")
    with pytest.raises(
        UserError, match=r"mode auto chose full and none on different hosts; set one of them"
    ):
        _check_same_mode("none" if rank else "full")
    (folder / f"rank {rank}").touch()


@pytest.mark.slow
def test_hosts_that_choose_differently_are_named(tmp_path):
    run_processes(choose_by_rank, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_allocator_grows_segments_unless_configured(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:128")
        monkeypatch.delenv(
            {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}.get(name, "PYTORCH_ALLOC_CONF"), False
        )
        use_expandable_segments()
        assert os.environ[name] == "max_split_size_mb:128" and "expandable" not in str(os.environ)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # restored after the test
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    use_expandable_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_an_optimizer_in_cpu_memory_needs_none_of_the_gpu(config):
    offloaded, plain = (
        next(
            reports_of(
                dataclasses.replace(
                    config, optimizer=dataclasses.replace(config.optimizer, name=name)
                ),
                1,
            )
        )
        for name in ("AdamWOffload", "AdamW")
    )
    assert offloaded.optimizer_bytes == plain.optimizer_bytes > 0
    assert (offloaded.peak["optimizer"], plain.peak["optimizer"]) == (0, plain.optimizer_bytes)
    assert offloaded.peak_bytes == plain.peak_bytes - plain.optimizer_bytes


@pytest.mark.parametrize("has_gpu", [True, False])
def test_published_configurations_compile_on_cuda_only(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for configuration in (llama3_8b, llama3_8b_lora):
        config = configuration()
        assert (config.compile.enable, config.activation_checkpoint.mode) == (has_gpu, "auto")
    assert not llama3_debugmodel().compile.enable


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo_debugmodel", "kto_debugmodel"])
def test_preferences_choose_by_dry_runs(name, monkeypatch):
    monkeypatch.setattr(fitting, "device_type", lambda: "cuda")
    monkeypatch.setattr(fitting, "total_memory", lambda: 2**40)
    config = getattr(preferences, name)()
    config.activation_checkpoint.mode = "auto"
    assert fitting.with_fitting_checkpoints(config, 1).activation_checkpoint.mode == "none"


def test_a_step_that_needs_values_is_selective(config, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no values")

    monkeypatch.setattr(fitting, "device_type", lambda: "cuda")
    monkeypatch.setattr(fitting, "total_memory", lambda: 2**40)
    monkeypatch.setattr(fitting, "reports_of", fail)
    assert fitting.with_fitting_checkpoints(config, 1).activation_checkpoint.mode == "selective"
    assert "cannot run this step (RuntimeError: no values)" in caplog.text
