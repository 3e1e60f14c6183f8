"""The learning-rate schedule against formulas and the schedulers of PyTorch and transformers."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.conftest import PROJECT
from tests.test_docs import documented_class
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer, ParamGroup
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.usefixtures("log")

PEAK = 0.5


def make_optimizer(**groups: ParamGroup) -> Optimizer:
    return Optimizer.Config(name="SGD", lr=PEAK, param_groups=groups).build(
        model_parts=[nn.Linear(2, 3)]
    )


def make_scheduler(training_steps: int, **settings) -> LRScheduler:
    return LRScheduler.Config(**settings).build(
        optimizer=make_optimizer(), training_steps=training_steps
    )


def curve(scheduler: LRScheduler, n_steps: int) -> list[float]:
    """Return the learning rate of the optimizer in each of the first `n_steps` steps, relative to
    the peak."""
    rates = []
    for _ in range(n_steps):
        (group,) = scheduler.optimizer.param_groups
        assert group["lr"] == scheduler.lr
        rates.append(group["lr"] / PEAK)
        scheduler.step()
    return rates


def torch_curve(build_scheduler, n_steps: int) -> list[float]:
    """Return the learning rate of a PyTorch scheduler in each of the first `n_steps` steps,
    relative to the peak."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = build_scheduler(optimizer)
    rates = []
    for _ in range(n_steps):
        rates.append(optimizer.param_groups[0]["lr"] / PEAK)
        optimizer.step()
        scheduler.step()
    return rates


def interpolate(knots: list[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between `knots`; constant outside them."""
    for (x0, y0), (x1, y1) in zip(knots, knots[1:], strict=False):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return knots[0][1] if x < knots[0][0] else knots[-1][1]


def expected_curve(n_steps, warmup, total, decay, shape, floor):
    """Return the expected rates of steps n = 1, 2, ...: linear from 0 at n = 0 to the peak at n =
    warmup; the progress of the decay is 0 at its first step and 1 at the step after the last
    one."""
    rates = []
    for n in range(1, n_steps + 1):
        progress = interpolate([(total - decay + 1, 0.0), (total + 1, 1.0)], n)
        shapes = {
            "linear": 1 - progress,
            "sqrt": 1 - progress**0.5,
            "cosine": math.cos(progress * math.pi / 2) ** 2,
        }
        rates.append(
            interpolate([(0, 0.0), (warmup, 1.0)], n) * (floor + (1 - floor) * shapes[shape])
        )
    return rates


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("min_lr_factor", [0.0, 0.1])
@pytest.mark.parametrize(("decay_ratio", "decay"), [(None, 15), (0.25, 5), (1.0, 15), (0.0, 0)])
def test_warmup_stable_decay(decay_type, min_lr_factor, decay_ratio, decay):
    """Without a ratio, the decay begins after the warmup. It never begins before the warmup
    ends."""
    settings = {
        "warmup_steps": 5,
        "decay_ratio": decay_ratio,
        "decay_type": decay_type,
        "min_lr_factor": min_lr_factor,
    }
    rates = curve(make_scheduler(20, **settings), 24)
    if decay == 0:
        expected = expected_curve(24, 5, 24, 0, decay_type, 1.0)
    else:
        expected = expected_curve(24, 5, 20, decay, decay_type, min_lr_factor)
    assert rates == pytest.approx(expected, abs=1e-12)  # float64 rounding
    assert rates[3] < rates[4] == rates[5] == 1.0


def test_without_warmup_the_rate_starts_at_the_peak():
    assert curve(make_scheduler(4, warmup_steps=0), 4) == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("decay_type", ["linear", "cosine"])
def test_decay_matches_torch_schedulers(decay_type):
    schedulers = torch.optim.lr_scheduler
    if decay_type == "linear":
        theirs = partial(schedulers.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=30)
    else:
        theirs = partial(schedulers.CosineAnnealingLR, T_max=30, eta_min=0.1 * PEAK)
    expected = torch_curve(theirs, 30)
    ours = make_scheduler(30, warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1)
    # PyTorch multiplies from step to step, and so rounds 30 times.
    assert curve(ours, 30) == pytest.approx(expected, rel=1e-12)


def test_points_match_torch_schedulers():
    schedulers = torch.optim.lr_scheduler
    steps = partial(schedulers.MultiStepLR, milestones=[3, 7], gamma=0.5)
    ours = make_scheduler(10, warmup_steps=0, points=["3:0.5", "7:0.25"], min_lr_factor=0.1)
    assert curve(ours, 12) == torch_curve(steps, 12)
    line = partial(schedulers.LinearLR, start_factor=1.0, end_factor=0.2, total_iters=8)
    ours = make_scheduler(10, warmup_steps=0, points=["8:0.2"], points_between="linear")
    assert curve(ours, 10) == pytest.approx(torch_curve(line, 10), rel=1e-12)


def test_warmup_multiplies_points():
    ours = make_scheduler(6, warmup_steps=4, points=["0:0.5", "2:1.0", "5:0.1"])
    assert curve(ours, 7) == pytest.approx([0.125, 0.25, 0.75, 1.0, 1.0, 0.1, 0.1])


def test_groups_have_their_own_points():
    """A group's points multiply the schedule's rate, also after a resumption."""
    groups = {"late": ParamGroup(pattern="bias", lr_points=["0:0", "2:0.5"])}

    def build():
        optimizer = make_optimizer(**groups)
        return LRScheduler.Config(warmup_steps=0).build(optimizer=optimizer, training_steps=4)

    def rates(scheduler):
        return sorted(group["lr"] / PEAK for group in scheduler.optimizer.param_groups)

    scheduler, found = build(), []
    for _ in range(4):
        found.append(rates(scheduler))
        scheduler.step()
    assert found == [[0, 1.0], [0, 0.75], [0.25, 0.5], [0.125, 0.25]]
    resumed = build()
    resumed.load_state_dict({"steps_taken": 2, "unit": "steps"})
    assert rates(resumed) == found[2]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["x:1"], "is not like 1000:0.5"),
        (["10"], "is not like 1000:0.5"),
        (["1.5:1"], "is not like 1000:0.5"),
        (["10:-1"], "is not like 1000:0.5"),
        (["10:nan"], "is not like 1000:0.5"),
        (["10:1", "10:0.5"], "do not ascend"),
    ],
)
def test_malformed_points_are_reported(points, message):
    with pytest.raises(UserError, match=message):
        LRScheduler.Config(points=points).validate()
    with pytest.raises(UserError, match=message):
        Optimizer.Config(param_groups={"a": ParamGroup(pattern="x", lr_points=points)}).validate()


@pytest.mark.parametrize(
    ("settings", "name", "theirs"),
    [
        ({}, "get_linear_schedule_with_warmup", {}),
        ({"decay_type": "cosine"}, "get_cosine_schedule_with_warmup", {}),
        ({"decay_ratio": 0.25}, "get_wsd_schedule", {"num_decay_steps": 5, "decay_type": "linear"}),
        (
            {"decay_type": "power", "decay_power": 3.0},
            "get_polynomial_decay_schedule_with_warmup",
            {"power": 3.0, "lr_end": 0.0},
        ),
    ],
)
def test_matches_transformers_schedules(settings, name, theirs):
    """In transformers, the warmup begins at 0 and the peak is in the step after it; we skip the
    step at 0."""
    get_schedule = getattr(pytest.importorskip("transformers"), name)
    lengths = {"num_warmup_steps": 5, "num_training_steps": 20}
    expected = torch_curve(lambda optimizer: get_schedule(optimizer, **lengths, **theirs), 20)
    ours = curve(make_scheduler(20, warmup_steps=5, **settings), 20)
    assert ours == pytest.approx(expected[1:6] + expected[5:], rel=1e-12)  # float64 rounding
    from_zero = curve(make_scheduler(20, warmup_steps=5, warmup_from_zero=True, **settings), 20)
    assert from_zero == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("ratio", "warmup_steps"), [(0.0, 0), (0.03, 1), (0.1, 2), (0.11, 3)])
def test_a_ratio_is_rounded_up_as_in_transformers(ratio, warmup_steps):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(warmup_steps=ratio, report_to="none")
    assert arguments.get_warmup_steps(20) == warmup_steps
    expected = curve(make_scheduler(20, warmup_steps=warmup_steps), 20)
    assert curve(make_scheduler(20, warmup_ratio=ratio, warmup_steps=9), 20) == expected


def test_warmup_matches_torch():
    """The rate rises linearly to the peak."""
    theirs = torch.optim.lr_scheduler.LinearLR
    expected = torch_curve(
        lambda optimizer: theirs(optimizer, start_factor=1 / 7, total_iters=6), 9
    )
    ours = curve(make_scheduler(9, warmup_steps=7, decay_ratio=0.0), 9)
    assert ours == pytest.approx(expected, rel=1e-12)  # PyTorch multiplies from step to step


def test_the_documented_inverse_square_root_matches_transformers():
    documented = documented_class(PROJECT / "docs" / "extending.md", "InverseSquareRoot")
    ours = documented.Config(warmup_steps=5, timescale=8).build(
        optimizer=make_optimizer(), training_steps=20
    )
    transformers = pytest.importorskip("transformers")
    get_schedule = partial(transformers.get_inverse_sqrt_schedule, num_warmup_steps=5, timescale=8)
    expected = torch_curve(get_schedule, 20)
    assert curve(ours, 20) == pytest.approx(expected[1:6] + expected[5:], rel=1e-12)


def test_a_shorter_run_follows_the_curve_of_total_steps():
    settings = {"warmup_steps": 4, "decay_ratio": 0.5}
    stopped_early = curve(make_scheduler(12, total_steps=20, **settings), 12)
    assert stopped_early == curve(make_scheduler(20, **settings), 20)[:12]


def test_the_rate_is_constant_after_the_schedule():
    rates = curve(make_scheduler(10, total_steps=4, warmup_steps=0, min_lr_factor=0.25), 10)
    assert rates[4:] == [0.25] * 6


def test_a_warmup_longer_than_the_schedule_is_shortened_with_a_warning(log):
    assert curve(make_scheduler(4, warmup_steps=9), 4) == [0.25, 0.5, 0.75, 1.0]
    (message,) = log.messages
    assert "warmup_steps (9) exceeds the length of the schedule (4)" in message


def test_a_warmup_as_long_as_the_schedule_ends_at_the_peak(log):
    assert curve(make_scheduler(4, warmup_steps=4), 4) == [0.25, 0.5, 0.75, 1.0]
    assert log.messages == []


def test_the_schedule_scales_the_learning_rate_of_each_group():
    optimizer = make_optimizer(bias=ParamGroup(pattern="bias", lr=PEAK / 8))
    scheduler = LRScheduler.Config(warmup_steps=3, min_lr_factor=0.1).build(
        optimizer=optimizer, training_steps=10
    )
    factors = []
    for _ in range(10):
        rates = {len(group["params"][0].shape): group["lr"] for group in optimizer.param_groups}
        assert rates[1] == rates[2] / 8
        assert rates[2] == scheduler.lr
        factors.append(scheduler.factor(scheduler.steps_taken))
        scheduler.step()
    # the last warmup step and the first decay step both have the peak rate
    assert len(set(factors)) == 9


def test_the_schedule_applies_to_both_optimizers_of_muon():
    model = nn.ModuleDict({"layer": nn.Linear(3, 2), "output": nn.Linear(2, 3, bias=False)})
    optimizer = Optimizer.Config(name="Muon", lr=PEAK, param_groups={}).build(model_parts=[model])
    assert len(optimizer.optimizers) == 2
    LRScheduler.Config(warmup_steps=4).build(optimizer=optimizer, training_steps=10)
    assert [group["lr"] for group in optimizer.param_groups] == [PEAK / 4] * 2


def test_resume_continues_the_curve():
    settings = {"warmup_steps": 3, "decay_ratio": 0.5, "decay_type": "cosine"}
    straight = curve(make_scheduler(12, **settings), 12)
    stopped = make_scheduler(12, **settings)
    before = curve(stopped, 7)
    resumed = make_scheduler(12, **settings)
    resumed.load_state_dict(stopped.state_dict())
    assert before + curve(resumed, 5) == straight


def test_resume_uses_the_configured_curve():
    """A checkpoint holds the position in the schedule, not its shape."""
    stopped = make_scheduler(10, warmup_steps=2)
    curve(stopped, 6)
    longer = make_scheduler(30, warmup_steps=2, decay_type="sqrt")
    longer.load_state_dict(stopped.state_dict())
    assert curve(longer, 24) == curve(make_scheduler(30, warmup_steps=2, decay_type="sqrt"), 30)[6:]


def test_set_length_applies_unless_total_steps_is_set():
    stopped = make_scheduler(20, warmup_steps=2)
    curve(stopped, 6)
    resumed = make_scheduler(20, warmup_steps=2)
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_length(13)
    assert curve(resumed, 7) == curve(make_scheduler(13, warmup_steps=2), 13)[6:]
    fixed = make_scheduler(20, total_steps=30)
    fixed.set_length(13)
    assert fixed.total_steps == 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, r"--lr_scheduler\.warmup_steps is -1"),
        ({"total_steps": 0}, r"--lr_scheduler\.total_steps is 0"),
        ({"decay_ratio": 1.5}, r"--lr_scheduler\.decay_ratio is 1\.5, but must be in \[0, 1\]"),
        (
            {"min_lr_factor": -0.1},
            r"--lr_scheduler\.min_lr_factor is -0\.1, but must be in \[0, 1\]",
        ),
        (
            {"min_lr_factor": float("nan")},
            r"--lr_scheduler\.min_lr_factor is nan, but must be in \[0, 1\]",
        ),
    ],
)
def test_invalid_values_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        LRScheduler.Config(**settings).validate()


def test_tokens_give_the_same_curve_as_steps_of_equal_size():
    """With 32 tokens per step, the rates equal the rates of the schedule in steps, bit for bit."""
    shape = {"decay_ratio": 0.4, "decay_type": "cosine", "min_lr_factor": 0.1}
    in_steps = make_scheduler(50, warmup_steps=8, **shape)
    in_tokens = make_scheduler(50 * 32, unit="tokens", warmup_steps=8 * 32, **shape)
    in_tokens.set_length(50 * 32, step_size=32)
    for _ in range(60):
        assert in_tokens.lr == in_steps.lr == in_tokens.optimizer.param_groups[0]["lr"]
        in_steps.step()
        in_tokens.step(32, step_size=32)


def test_curve_in_tokens_does_not_depend_on_the_sizes_of_steps():
    """Interpolated between the ends of the phases; a step in the warm-up has the rate of its last
    token."""
    scheduler = make_scheduler(1000, unit="tokens", warmup_steps=100)
    sizes, position = [10, 30, 20, 40, 100, 300, 250, 250], 0
    for size in sizes:
        scheduler.step(0, step_size=size)
        expected = (
            min(1.0, (position + size) / 100) if position < 100 else 1 - (position - 100) / 900
        )
        assert scheduler.lr / PEAK == pytest.approx(expected, rel=1e-12)  # float64
        position += size
        scheduler.step(size)


def test_another_unit_is_not_resumed():
    saved = make_scheduler(10, unit="tokens").state_dict()
    with pytest.raises(
        UserError,
        match="--lr_scheduler.unit steps: the run to resume has --lr_scheduler.unit tokens",
    ):
        make_scheduler(10).load_state_dict(saved)
