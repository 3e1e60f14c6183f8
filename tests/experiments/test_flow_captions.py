"""Flow matching on images with captions (`--config flux_captions`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.flux_encoders import T5_TOKENS, save_encoders
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics, run
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.flow_matching.captions import CaptionTrainer
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("diffusers")

pytestmark = pytest.mark.slow  # importing diffusers takes seconds


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with images of two sizes with captions, in `images`, and `encoders`."""
    folder = tmp_path_factory.mktemp("captions")
    (folder / "images").mkdir()
    random = np.random.default_rng(0)
    for number in range(9):
        shape = (8, 16, 3) if number % 3 == 0 else (8, 8, 3)
        path = folder / "images" / f"{number}.png"
        Image.fromarray(random.integers(0, 256, shape, np.uint8)).save(path)
        path.with_suffix(".txt").write_text("a red heron" if number % 2 else "the blue stork")
    save_encoders(folder / "encoders")
    return folder


def configuration(data: Path, dump: Path, **options: Any) -> Any:
    chosen = {
        "dataloader.dataset": data / "images",
        "dataloader.encoders": data / "encoders",
        "dataloader.buckets": ["8x8", "8x16"],
        "dataloader.caption_tokens": T5_TOKENS,
        "dump_folder": dump,
        "model.dim": 24,
        "model.n_heads": 2,
        "model.axes": [4, 4, 4],
        "model.n_double": 1,
        "model.n_single": 1,
        "model.channels": 2,
        "model.image_size": 4,
        "model.text_dim": 12,
        "model.pooled_dim": 16,
        "training.steps": 6,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 0,
        "metrics.log_freq": 1,
        "callbacks.samples.per_class": 2,
        "callbacks.samples.max_classes": 3,
        "callbacks.samples.steps": 2,
        "checkpoint.interval": 2,
        **{name.replace("__", "."): value for name, value in options.items()},
    }
    words = ["--module", "flow_matching", "--config", "flux_captions", *flags(chosen)]
    return ConfigManager().parse_args(words).config


def train(data: Path, dump: Path, **options: Any) -> Any:
    parsed = configuration(data, dump, **options)
    parsed.check(world_size=1)
    return run(parsed)


def test_killed_run_resumes_bit_for_bit_and_writes_images_of_captions(data, tmp_path):
    options = {"callbacks__samples__freq": 6}
    whole = train(data, tmp_path / "whole", **options)
    with killed_in(CaptionTrainer, "train_step", 4):
        train(data, tmp_path / "killed", **options)
    train(data, tmp_path / "killed", **options)
    numbers = ("loss", "grad_norm")
    assert read_metrics(tmp_path / "killed", *numbers) == read_metrics(tmp_path / "whole", *numbers)
    states = [
        load_model(tmp_path / name / "checkpoint" / "step-6", device="cpu").model.state_dict()
        for name in ("whole", "killed")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    # Decoded latents of 4 x 4 are images of 8 x 8.
    grid = np.asarray(Image.open(tmp_path / "whole" / "samples" / "step-6.png"))
    assert grid.shape == (3 * 9, 2 * 9, 3)
    assert whole.examples(3)["text"].shape == (3, T5_TOKENS, 12)


def test_two_ranks_encode_together_and_equal_a_single_process(data, tmp_path):
    """Relative to float32 sums in another order, over 4 steps."""
    options = {"training__steps": 4, "optimizer__name": "SGD"}
    train(data, tmp_path / "one", **options)
    cache = tmp_path / "cache"
    run_processes(
        train_ranks, 2, data, tmp_path / "two", {**options, "dataloader__cache_dir": cache}
    )
    rows = [read_metrics(tmp_path / name, "loss", "grad_norm") for name in ("one", "two")]
    assert np.array(rows[1]) == pytest.approx(np.array(rows[0]), rel=1e-5)
    assert len([path for path in (cache / "encoded_images").iterdir() if path.is_dir()]) == 2


def train_ranks(data: Path, dump: Path, options: dict[str, Any]) -> None:
    run(configuration(data, dump, **options))


def test_model_must_read_the_encoders(data, tmp_path):
    for options, message in (
        ({"model__text_dim": 11}, "--model.text_dim is 11, and .* gives 12"),
        ({"model__channels": 3}, "--model.channels is 3, and .* gives 2"),
        ({"dataloader__buckets": ["8x10"]}, "images of 8x10 pixels .* use multiples of 4"),
        ({"dataloader__buckets": ["16x8"]}, "--model.image_size 4 must be 8"),
        ({"parallelism__context_parallel_degree": 2}, "not divide the 7 tokens of a caption"),
        (
            {"parallelism__context_parallel_degree": 7},
            "not divide the 4 tokens of an image of 8x8 pixels",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(data, tmp_path, **options)
