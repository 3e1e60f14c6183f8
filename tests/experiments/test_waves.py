"""An architecture that the library does not know, without text and images (`tests/waves`): seams of
docs/extending.md suffice for training, resuming, exports, dry runs and layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import waves
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics, run
from tests.waves.config_registry import WaveTrainer
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.foresight.devices import DEVICES
from torchtitan.foresight.prediction import predict_from_reports
from torchtitan.models.pretrained import load_model


def configuration(dump: Path, **options: Any) -> Any:
    chosen = {"dump_folder": dump, "metrics.log_freq": 1}
    chosen |= {name.replace("__", "."): value for name, value in options.items()}
    words = ["--module", "tests.waves", "--config", "debugmodel", *flags(chosen)]
    return ConfigManager().parse_args(words).config


def numbers(dump: Path) -> list[tuple[Any, ...]]:
    return read_metrics(dump, "loss", "grad_norm", "n_waves_seen")


def test_killed_run_resumes_bit_for_bit_and_exports(tmp_path):
    options = {"checkpoint__last_save_in_hf": True, "ema__decay": 0.9}
    whole = run(configuration(tmp_path / "whole", **options))
    with killed_in(WaveTrainer, "train_step", 4):
        run(configuration(tmp_path / "killed", **options))
    run(configuration(tmp_path / "killed", **options))
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    exports = [tmp_path / name / "checkpoint" / "step-4" for name in ("whole", "killed")]
    first, second = (
        (folder / "diffusion_pytorch_model.safetensors").read_bytes() for folder in exports
    )
    assert first == second
    loaded = load_model(exports[0], device="cpu", family=waves).model
    x_BCT = torch.randn(3, 2, 32)
    inputs = x_BCT, torch.rand(3), torch.arange(3)
    with torch.no_grad():
        assert torch.equal(loaded(*inputs), whole.model_parts[0](*inputs))


def test_dry_run_counts_the_operations_and_waves_of_layouts(tmp_path):
    parallelism = {f"parallelism__{kind}_parallel_degree": 2 for kind in ("tensor", "context")}
    (alone,) = dry_run(configuration(tmp_path), 1)
    config = configuration(tmp_path, **parallelism)
    (divided,) = dry_run(config, 4)
    # what a rank computes of each signal, besides conditions and joined layers
    assert 0.2 < divided.executed_flops / alone.executed_flops < 0.5
    prediction = predict_from_reports(config, [divided], 4, DEVICES["h100"], 8)
    assert "waves/s per device, MFU" in str(prediction)


def train_layouts(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in ("tensor", "context"):
        options = {f"parallelism__{kind}_parallel_degree": 2, "checkpoint__enable": False}
        config = configuration(folder / kind, training__steps=2, **options)
        config.check(world_size=2)
        run(config)


@pytest.mark.slow
def test_layouts_equal_one_process(tmp_path):
    run(configuration(tmp_path / "one", training__steps=2, checkpoint__enable=False))
    run_processes(train_layouts, 2, tmp_path)
    expected = numbers(tmp_path / "one")
    for kind in ("tensor", "context"):
        for ours, theirs in zip(numbers(tmp_path / kind), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), kind  # sums in another order
