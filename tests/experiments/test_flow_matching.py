"""Flow matching (`--module flow_matching`): resuming, layouts, exports, adapters, images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.flux_reference import flux_velocity
from tests.training import flags, killed_in, read_metrics, run
from torchtitan.components.diffusion.sampler import euler, times_of
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.flow_matching.flux import class_texts
from torchtitan.experiments.flow_matching.trainer import FlowMatchingTrainer
from torchtitan.models.common.diffusion import from_patches
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

Image = pytest.importorskip("PIL.Image")

OPTIONS = {
    "training.steps": 4,
    "training.local_batch_size": 4,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "model.dim": 16,
    "callbacks.samples.per_class": 2,
    "callbacks.samples.steps": 2,
}
BUCKETS = FlowMatchingTrainer.measures_named


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder with 12 images of 8 x 8 random pixels, of two classes."""
    folder = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)
    for number, image in enumerate(pixels):
        path = folder / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def configuration(images: Path, dump: Path, config: str = "dit_debugmodel", **options: Any) -> Any:
    chosen = {
        **OPTIONS,
        "dataloader.dataset": images,
        "dump_folder": dump,
        **{name.replace("__", "."): value for name, value in options.items()},
    }
    words = ["--module", "flow_matching", "--config", config, *flags(chosen)]
    return ConfigManager().parse_args(words).config


def train(images: Path, dump: Path, config: str = "dit_debugmodel", **options: Any) -> Any:
    parsed = configuration(images, dump, config, **options)
    parsed.check(world_size=1)
    return run(parsed)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model_parts[0].named_parameters()}


def test_metrics_count_images_and_losses_by_time(images, tmp_path):
    size = 64  # some in each part of the time
    options = {"training__local_batch_size": size, "training__global_batch_size": size}
    trainer = train(images, tmp_path, training__steps=2, **options)
    lines = read_metrics(tmp_path, "loss", "n_images_seen", "images_per_second", *BUCKETS)
    assert [(step, seen) for step, _, seen, *_ in lines] == [(1, size), (2, 2 * size)]
    # The mean of the losses by time, weighted by the images in each, is the loss.
    _, loss, _, _, *of_times = lines[0]
    loader = trainer.config.dataloader.build(local_batch_size=size, seed=trainer.config.debug.seed)
    times = trainer.loss.times(next(loader)["uniform"][:, 0])
    counts = torch.histc(times, 4, 0, 1).tolist()
    total = sum(n * x for n, x in zip(counts, of_times, strict=True))
    assert total / size == pytest.approx(loss, rel=1e-5)


def test_killed_run_resumes_bit_for_bit(images, tmp_path):
    options = {"checkpoint__enable": True, "checkpoint__interval": 2}
    whole = train(images, tmp_path / "whole", **options)
    with killed_in(FlowMatchingTrainer, "train_step", 4):
        train(images, tmp_path / "killed", **options)
    resumed = train(images, tmp_path / "killed", **options)
    for name, value in weights_of(whole).items():
        assert torch.equal(value, weights_of(resumed)[name]), name
    for ours, theirs in zip(whole.ema.averages, resumed.ema.averages, strict=True):
        assert torch.equal(ours, theirs)
    numbers = ("loss", "grad_norm")
    assert read_metrics(tmp_path / "killed", *numbers) == read_metrics(tmp_path / "whole", *numbers)


def test_early_stopping_ends_the_run(images, tmp_path):
    options = {
        "validator__enable": True,
        "validator__dataset": images,
        "validator__freq": 1,
        "callbacks__earlystopping__metric": "validation_loss",
        "callbacks__earlystopping__min_delta": 1e9,  # nothing improves this much
        "callbacks__earlystopping__patience": 2,
    }
    trainer = train(images, tmp_path, training__steps=10, **options)
    assert trainer.step == 3
    assert trainer.early_end.startswith("validation_loss has not improved in 2 measurements")


def test_validation_repeats_its_times_and_noise(images, tmp_path):
    options = {"validator__enable": True, "validator__dataset": images, "validator__freq": 2}
    trainer = train(images, tmp_path, **options)
    first, second = (trainer.validator.validate() for _ in range(2))
    numbers = first.keys() - {"validation_time"}
    assert numbers > {"validation_loss"}
    assert [first[name] for name in numbers] == [second[name] for name in numbers]


EXPORTED = {
    "checkpoint__enable": True,
    "checkpoint__last_save_in_hf": True,
    "ema__for_export": True,
    "optimizer__lr": 1e-2,
}


def dit_velocities(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Return the velocities of both for three images, under times from 0 to 1."""
    classes = torch.tensor([0, 1, 1])
    return (
        lambda x, t: ours(x, t, classes=classes),
        lambda x, t: theirs(x, 1000 * t, classes).sample,
    )


def flux_velocities(ours: Any, theirs: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    conditions = {
        "text": torch.randn(3, 4, 32),
        "pooled": torch.randn(3, 32),
        "guidance": torch.full((3,), 2.5),
    }
    return (
        lambda x, t: ours(x, t, **conditions),
        lambda x, t: from_patches(flux_velocity(theirs, x, t, **conditions), 2, 8),
    )


def images_of(velocities: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of our sampler, and of the scheduler of diffusers, from the same noise."""
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=np.linspace(1, 0, 6)[:-1])
    torch.manual_seed(0)
    x = noise = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        for now in scheduler.timesteps:
            velocity = velocities[1](x, (now / 1000).expand(3))
            x = scheduler.step(velocity, now, x).prev_sample
        return euler(velocities[0], noise, times_of(5)), x


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dit", "flux"])
def test_exports_open_in_diffusers_and_generate_the_same_image(images, tmp_path, family):
    """Also adapters, merged and as their own folder, of a run that starts from the export."""
    diffusers = pytest.importorskip("diffusers")
    peft = pytest.importorskip("peft")
    kind, velocities, sizes = {
        "dit": (diffusers.DiTTransformer2DModel, dit_velocities, {}),
        "flux": (diffusers.FluxTransformer2DModel, flux_velocities, {"model__dim": 64}),
    }[family]
    train(images, tmp_path / "base", f"{family}_debugmodel", **EXPORTED, **sizes)
    base = tmp_path / "base" / "checkpoint" / "step-4"
    options = {**EXPORTED, **sizes, "checkpoint__initial_load_path": base}
    train(images, tmp_path / "lora", f"{family}_lora", **options)
    merged = tmp_path / "lora" / "checkpoint" / "step-4"

    results = {}
    for name, folder in {"base": base, "merged": merged}.items():
        ours, theirs = load_model(folder, device="cpu").model, kind.from_pretrained(folder)
        results[name], expected = images_of(velocities(ours, theirs))
        assert (results[name] - expected).abs().max() < 1e-4, name
    assert results["base"].std() > 0.1
    assert (results["merged"] - results["base"]).abs().max() > 0.01
    adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(base), merged / "adapter")
    ours = load_model(merged, device="cpu").model
    _, expected = images_of(velocities(ours, adapted))
    assert (results["merged"] - expected).abs().max() < 1e-4


def test_averages_are_exported(images, tmp_path):
    options = {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True}
    trainer = train(images, tmp_path, **options, ema__for_export=True)
    exported = load_model(tmp_path / "checkpoint" / "step-4", device="cpu").model
    for (name, p), average in zip(exported.named_parameters(), trainer.ema.averages, strict=True):
        assert torch.equal(p, average), name


def test_images_of_each_class_are_written_from_the_same_noise(images, tmp_path):
    trainer = train(images, tmp_path, callbacks__samples__freq=2)
    grids = [np.asarray(Image.open(tmp_path / "samples" / f"step-{n}.png")) for n in (2, 4)]
    assert grids[0].shape == (10 * 9, 2 * 9)
    assert not np.array_equal(*grids)
    (samples,) = (c for c in trainer.callbacks if type(c).__name__ == "Samples")
    assert torch.equal(samples.generate(), samples.generate())


def test_guidance_is_in_float32_and_training_goes_on_after_a_failure(images, tmp_path, monkeypatch):
    trainer = train(images, tmp_path, training__steps=1)
    (model,) = trainer.model_parts
    noise, classes = torch.randn(2, 1, 8, 8), {"classes": torch.tensor([0, 1])}
    seen = []

    def half(x, times_B, **conditions):
        seen.append(x.dtype)
        return torch.full_like(x, 1.0 if conditions["classes"].max() < 10 else 1.0039).bfloat16()

    monkeypatch.setattr(model, "forward", half)
    images_out = trainer.generate(noise, classes, torch.tensor([1.0, 0.5, 0.0]), 1.7)
    # Of the two neighbors 1 and 1.0078 in bfloat16; guidance adds 0.7 of their difference.
    without = torch.tensor(1.0039).bfloat16().item()
    expected = (noise - (without + 1.7 * (1 - without))).clamp(-1, 1)
    assert set(seen) == {torch.float32} and torch.allclose(images_out, expected, atol=1e-6)

    def fails(*args, **conditions):
        raise RuntimeError

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(RuntimeError):
        trainer.generate(noise, classes, torch.tensor([1.0, 0.0]), 1.0)
    assert model.training


def test_texts_of_classes_are_made_once():
    tables = class_texts(3, 8, 5, torch.device("cpu"))
    assert {name: table.shape for name, table in tables.items()} == {
        "text": (3, 4, 8),
        "pooled": (3, 5),
    }
    assert class_texts(3, 8, 5, torch.device("cpu"))["text"] is tables["text"]


def test_adapters_train_and_are_merged_in_the_export(images, tmp_path):
    options = {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True}
    train(images, tmp_path / "base", **options)
    base = tmp_path / "base" / "checkpoint" / "step-4"
    trainer = train(
        images, tmp_path / "lora", "dit_lora", checkpoint__initial_load_path=base, ema__decay=0.9
    )
    trained = {name for name, p in trainer.model_parts[0].named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    merged, plain = (
        load_model(folder, device="cpu").model.state_dict()
        for folder in (tmp_path / "lora" / "checkpoint" / "step-4", base)
    )
    assert not torch.equal(merged["layers.0.wq.weight"], plain["layers.0.wq.weight"])
    assert torch.equal(merged["layers.0.wq.bias"], plain["layers.0.wq.bias"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training__seq_len": 16}, "--training.seq_len is 16, but must be 1"),
        ({"model__image_size": 16}, r"\[1, 16, 16\].* the data has \[1, 8, 8\]"),
        ({"model__n_classes": 1}, "the data has 2 classes, and the model 1"),
        ({"hf_assets_path": "somewhere"}, "this model reads no text"),
        ({"loss__dropped_conditions": 1.0}, "--loss.dropped_conditions"),
    ],
)
def test_options_that_do_not_fit_are_refused(images, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(images, tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_degree": 2}, "pipeline_parallel_degree 2 must be 1 for DiTModel"),
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree 3 does not divide --model.n_heads"),
        ({"disable_loss_parallel": True}, "never divided among ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(images, tmp_path, options, message):
    options = {f"parallelism__{name}": value for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        configuration(images, tmp_path, **options).check(world_size=max(options.values()))


def test_dropped_conditions_are_those_of_no_class():
    from torchtitan.models import dit

    model = dit.FLAVORS["debugmodel"].build()
    conditions = model.without_conditions(
        {"classes": torch.tensor([3, 4])}, torch.tensor([True, False])
    )
    assert conditions["classes"].tolist() == [10, 4]
