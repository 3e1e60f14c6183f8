"""The loss and the sampler of flow matching."""

import math

import pytest
import torch

from torchtitan.components.diffusion.flow import FlowMatchingLoss, buckets
from torchtitan.components.diffusion.sampler import euler, guided, times_of


def test_times_have_a_logit_normal_distribution():
    """The share of times below t is the normal distribution's at (log(t / (1 - t)) - mean) / std."""
    loss = FlowMatchingLoss.Config(time_mean=0.5, time_std=1.3).build()
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    times = loss.times(uniform.float())
    for t in (0.01, 0.3, 0.5, 0.9):
        z = (math.log(t / (1 - t)) - 0.5) / 1.3
        share = (1 + math.erf(z / math.sqrt(2))) / 2
        assert float((times < t).double().mean()) == pytest.approx(share, abs=2e-4)


def test_loss_is_zero_for_the_velocity_of_the_path():
    torch.manual_seed(0)
    loss = FlowMatchingLoss.Config().build()
    x, noise, times = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3), torch.rand(4)
    now, later = (loss.at_time(x, noise, t.double()) for t in (times, times + 0.125))
    assert loss.losses(((later - now) / 0.125).float(), x, noise).max() < 1e-10
    expected = (noise - x).double().square().mean(dim=(1, 2, 3))
    assert torch.allclose(loss.losses(torch.zeros_like(x), x, noise).double(), expected)


def test_euler_follows_a_straight_path_exactly():
    x, noise = torch.randn(3, 5), torch.randn(3, 5)
    reached = euler(lambda _, times: noise - x, noise, times_of(7, shift=3.0))
    assert torch.allclose(reached, x, atol=1e-6)


def test_guidance_extrapolates():
    velocity = guided(lambda x, t: x + 1, lambda x, t: x - 1, 3.0)
    assert torch.equal(velocity(torch.zeros(2), torch.zeros(2)), torch.full((2,), 5.0))


def test_buckets_divide_the_time_equally():
    times = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.999, 1.0])
    assert buckets(times).tolist() == [0, 0, 1, 2, 3, 3]


@pytest.mark.slow
def test_sampler_equals_the_scheduler_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    times = times_of(9, shift=3.0)
    # Its `shift` changes given sigmas too, so give those before it.
    scheduler.set_timesteps(sigmas=times_of(9)[:-1].numpy())
    assert torch.allclose(scheduler.sigmas, times, atol=1e-7)
    x = noise = torch.randn(2, 3)
    for now in scheduler.timesteps:
        x = scheduler.step(torch.sin(x) + now / 1000, now, x).prev_sample
    ours = euler(lambda x, t: torch.sin(x) + t[:, None], noise, times)
    assert torch.allclose(ours, x, atol=1e-6)
