"""Weights in bfloat16 without a wide copy: rounding of updates, drift over 2,000 steps against
float64, memory, and resumption."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.processes import run_processes
from tests.training import read_metrics, tiny_config, train
from torchtitan.components.optim.adamw_few_bits import make_adamw_few_bits
from torchtitan.components.optim.bf16_weights import RoundedAdamW, rounded_stochastically
from torchtitan.components.optim.optimizer import Optimizer
from torchtitan.config import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.tools.errors import UserError

STEPS = 2000


def test_stochastic_rounding_gives_neighbors_with_the_right_mean():
    """A mean of n choices errs by at most 5 standard errors, each at most half a step."""
    torch.manual_seed(0)
    n = 4000
    fractions = torch.tensor([0.01, 0.25, 0.5, 0.9])
    base = torch.tensor([1.0, -1.0, 2.0**-126, 3.3e38]).bfloat16().float()
    gap = torch.tensor([2.0**-7, -(2.0**-7), 2.0**-133, 2.0**120])
    wide = (base[:, None] + fractions * gap[:, None]).flatten()
    places = torch.arange(16)
    draws = torch.stack(
        [rounded_stochastically(wide, torch.tensor(float(step)), places) for step in range(n)]
    )
    assert draws.dtype == torch.bfloat16
    chosen = (draws.double() - base.double().repeat_interleave(4)) / gap.double().repeat_interleave(
        4
    )
    assert set(chosen.unique().tolist()) == {0.0, 1.0}
    exact = (wide.double().view(4, 4) - base[:, None]) / gap[:, None]
    assert (chosen.mean(dim=0).view(4, 4) - exact).abs().max() <= 5 * 0.5 / n**0.5
    # numbers of bfloat16, infinities and NaN are kept
    kept = torch.tensor([1.0, -0.0, torch.inf, -torch.inf, torch.nan])
    rounded = rounded_stochastically(kept, torch.tensor(1.0), torch.arange(5)).float()
    assert torch.equal(rounded[:4], kept[:4]) and rounded[4].isnan()


def test_choices_do_not_depend_on_the_layout():
    wide, step = torch.randn(64, 48), torch.tensor(7.0)
    places = torch.arange(64 * 48).view(64, 48)
    whole = rounded_stochastically(wide, step, places)
    part = rounded_stochastically(wide[10:20].clone(), step, places[10:20])
    assert torch.equal(whole[10:20], part)
    assert not torch.equal(whole, rounded_stochastically(wide, torch.tensor(8.0), places))
    neighbors = (whole.float() - wide)[:, 1:] * (whole.float() - wide)[:, :-1]
    spread = neighbors.std() / neighbors.numel() ** 0.5
    assert neighbors.mean().abs() < 5 * spread


def test_equal_weights_choose_independently():
    """A quarter of 10,000 equal numbers moves up, within 5 standard errors; at the next step, a
    quarter of those."""
    numbers = torch.full((100, 100), 1 + 2.0**-9)
    indices = torch.arange(10_000).view(100, 100)
    first, second = (
        rounded_stochastically(numbers, torch.tensor(step), indices) > 1 for step in (1.0, 2.0)
    )
    for moved_up, share in ((first, 1 / 4), (second, 1 / 4), (first & second, 1 / 16)):
        assert moved_up.double().mean().item() == pytest.approx(share, abs=5 * 0.5 / 100)


def shards_of_a_step(folder: Path) -> None:
    """Update a sharded matrix of equal weights, and write it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for dim in (0, 1):
        start = distribute_tensor(torch.ones(10, 6).bfloat16(), mesh, [Shard(dim)])
        weight = nn.Parameter(start)
        weight.grad = torch.ones_like(weight)
        RoundedAdamW([{"params": [weight]}], rounding="stochastic", lr=1e-3).step()
        whole = weight.detach().full_tensor()
        if rank == 0:
            torch.save(whole, folder / f"{size}_{dim}.pt")


@pytest.mark.slow
def test_shards_are_rounded_as_the_whole(tmp_path: Path):
    for size in (1, 2):
        run_processes(shards_of_a_step, size, tmp_path)
    files = [torch.load(tmp_path / f"{size}_{dim}.pt") for size in (1, 2) for dim in (0, 1)]
    assert len(files[0].unique()) == 2 and all(torch.equal(files[0], each) for each in files)


@pytest.mark.slow
def test_many_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, with a compiler's backend that generates no code."""
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: contextlib.nullcontext())
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    weights = [nn.Parameter(torch.ones(n, 3).bfloat16()) for n in range(1, 11)]
    optimizer = make_adamw_few_bits(
        [{"params": weights}], bits=8, rounding="stochastic", lr=1e-2, weight_decay=0.0
    )
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all((weight < 1).any() for weight in weights)
    torch.compiler.reset()


class Matrix(nn.Module):
    def __init__(self, start: Tensor):
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False, dtype=start.dtype)
        self.layer.weight.data = start.clone()


def moved(name: str, dtype: torch.dtype, rounding: str) -> Tensor:
    """Return the change of a matrix of numbers between 1 and 2 after 2,000 updates of about 1e-4
    each, in float64. Half a step of such a number in bfloat16 is 4e-3."""
    generator = torch.Generator().manual_seed(0)
    start = (1 + torch.rand(64, 64, generator=generator)).bfloat16()
    drift = torch.randn(64, 64, generator=generator)
    model = Matrix(start.to(dtype))
    config = Optimizer.Config(
        name=name, lr=1e-4, weight_decay=0.0, rounding=rounding, param_groups={}
    )
    optimizer = config.build(model_parts=[model])
    for _ in range(STEPS):
        gradient = drift + torch.randn(64, 64, generator=generator)
        model.layer.weight.grad = gradient.bfloat16().to(dtype)
        optimizer.step()
    return model.layer.weight.detach().double() - start.double()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("AdamW", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("AdamW8bit", "AdamW4bit", "Muon")
        ),
    ],
)
def test_drift_over_2000_steps(name):
    """In float64 the matrix moves by 0.1 on average. Rounding to nearest does not move it at all.
    The error of 2,000 stochastic roundings is a random walk with a mean of 0; Kahan's is below a
    step of the pair, 2⁻¹⁶. Rounded moments add their own errors, the same in both."""
    exact = moved("Muon" if name == "Muon" else "AdamW", torch.float64, "nearest")
    size = exact.abs().mean()
    direction = exact.sign()
    assert size > 0.02
    # errors of few bits: of Adam's step, by the rounding of moments
    own = {"AdamW": 1e-3, "AdamW8bit": 0.03, "AdamW4bit": 0.3, "Muon": 0.02}[name]
    nearest = moved(name, torch.bfloat16, "nearest")
    assert nearest.abs().mean() < 0.05 * size  # lost
    for rounding in ("stochastic", "kahan"):
        error = moved(name, torch.bfloat16, rounding) - exact
        assert (error * direction).mean().abs() <= (own + 0.01) * size, rounding
        if rounding == "kahan":
            # the weight without its second number is rounded once
            assert error.norm() <= (own + 2e-2) * exact.norm() + 2.0**-8 * 64
        else:
            # steps of 2⁻⁷, taken with probability update / step
            walk = (size * 2.0**-7) ** 0.5
            assert error.norm() / 64 <= 1.2 * walk + own * exact.norm() / 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("AdamW", "kahan"),
        ("AdamW8bit", "stochastic"),
        ("AdamW4bit", "kahan"),
        ("Muon", "stochastic"),
    ],
)
def test_resuming_is_exact(tmp_path: Path, name: str, rounding: str):
    options: dict[str, Any] = {
        "optimizer__name": name,
        "optimizer__rounding": rounding,
        "training__dtype": "bfloat16",
        "lr_scheduler__total_steps": 4,
        "checkpoint__enable": True,
    }
    train(tmp_path / "whole", **options)
    for count in (2, 4):
        train(tmp_path / "stopped", **options, training__steps=count)
    whole, stopped = (
        read_metrics(tmp_path / folder, "loss", "grad_norm") for folder in ("whole", "stopped")
    )
    assert stopped == whole


def bytes_of_process(config: Any) -> int:
    """Return the bytes of weights and optimizer states of a model in this process."""
    config.model_spec.model.vocab_size = 2048
    model = config.model_spec.model.build().to(getattr(torch, config.training.dtype))
    optimizer = config.optimizer.build(model_parts=[model])

    def stored(tensor: Tensor) -> int:
        inner = [
            getattr(tensor, name) for name in ("codes", "scale", "qmap") if hasattr(tensor, name)
        ]
        return sum(each.nbytes for each in inner or [tensor])

    states = [each for one in optimizer.optimizers for each in one.state.values()]
    moments = [x for state in states for name, x in state.items() if name != "step"]
    return sum(map(stored, [*model.parameters(), *moments]))


@pytest.mark.slow
def test_memory_per_parameter(tmp_path):
    """Bytes of the weight, moments and rounding error of one parameter; few bits have a scale of 4
    bytes per 256 or 128 values. Tables and norms of the tiny model with other sizes add at most
    5 %."""
    cases = {
        ("float32", "AdamW", "nearest"): 4 + 8,
        ("bfloat16", "AdamW", "nearest"): 2 + 4,
        ("bfloat16", "AdamW", "stochastic"): 2 + 8,
        ("bfloat16", "AdamW", "kahan"): 2 + 8 + 2,
        ("bfloat16", "AdamW8bit", "stochastic"): 2 + 2 + 8 / 256,
        ("bfloat16", "AdamW8bit", "kahan"): 2 + 2 + 8 / 256 + 2,
        ("bfloat16", "AdamW4bit", "stochastic"): 2 + 1 + 8 / 128,
    }
    for (dtype, name, rounding), expected in cases.items():
        config = tiny_config(
            tmp_path,
            model__n_kv_heads=8,
            training__dtype=dtype,
            optimizer__name=name,
            optimizer__rounding=rounding,
        )
        (report,) = dry_run(config, 1)
        predicted = (report.parameter_bytes + report.optimizer_bytes) / report.parameters
        measured = bytes_of_process(config) / report.parameters
        assert predicted == pytest.approx(expected, rel=0.05), (dtype, name, rounding)
        assert measured == pytest.approx(predicted, rel=0.01), (dtype, name, rounding)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "kahan is for weights in bfloat16, and --training.dtype is float32"),
        (
            {"training.dtype": "bfloat16", "optimizer.name": "SGD"},
            "kahan is not supported by --optimizer.name SGD; set one of AdamW,",
        ),
    ],
)
def test_unsupported_rounding_is_rejected(options, message):
    words = [f"--{key}={value}" for key, value in options.items()]
    config = ConfigManager().parse_args([*words, "--optimizer.rounding", "kahan"]).config
    with pytest.raises(UserError, match=message):
        config.check(1)
