"""Factors of initial values and of rates, by parameter."""

import dataclasses

import pytest
import torch

from tests.training import llama_config
from torchtitan.components.optim.initial_scale import InitialScale, Scale
from torchtitan.components.optim.optimizer import Optimizer, ParamGroup
from torchtitan.distributed import initialize_weights
from torchtitan.models.qwen3_5 import FLAVORS
from torchtitan.tools.errors import UserError

SCALES = {
    "head": Scale(pattern=r"^head\.output", factor=0.5),
    "norms": Scale(pattern="norm", factor=3.0),
    "unused": Scale(pattern="head", factor=7.0),  # the first pattern that matches counts
}


def test_selected_values_are_multiplied_and_others_kept():
    plain, scaled = llama_config().build(), llama_config().build()
    InitialScale.Config(scales={**SCALES}).build().convert(scaled)
    for model in (plain, scaled):
        initialize_weights(model, seed=4)
    theirs = dict(plain.named_parameters())
    for name, values in scaled.named_parameters():
        factor = 0.5 if name == "head.output.weight" else 3.0 if "norm" in name else 1.0
        # one rounding more: the standard deviation is multiplied, not the values
        torch.testing.assert_close(values, factor * theirs[name], rtol=1e-6, atol=0.0)


def test_other_distributions_are_refused():
    config = dataclasses.replace(FLAVORS["debugmodel"], vocab_size=99)
    with torch.device("meta"):
        model = config.build()
    every = InitialScale.Config(scales={"all": Scale(pattern="conv", factor=2.0)})
    with pytest.raises(UserError, match=r"of layers.0.attention.conv_q.weight are Uniform"):
        every.build().convert(model)
    norms = InitialScale.Config(scales={"all": Scale(pattern="ffn_norm", std=0.1)})
    with pytest.raises(UserError, match=r"of layers.0.ffn_norm.weight are Constant; only normal"):
        norms.build().convert(model)
    for name in ("factor", "std"):
        wrong = InitialScale.Config(scales={"all": Scale(pattern=".", **{name: 0.0})})
        with pytest.raises(UserError, match=rf"scales.all.{name} is 0.0"):
            wrong.validate()


def test_a_standard_deviation_can_be_set():
    plain, scaled = llama_config().build(), llama_config().build()
    scales = {"outputs": Scale(pattern="attention.wo", std=0.04, factor=0.5)}
    InitialScale.Config(scales=scales).build().convert(scaled)
    for model in (plain, scaled):
        initialize_weights(model, seed=4)
    theirs = dict(plain.named_parameters())
    for name, values in scaled.named_parameters():
        if "attention.wo" in name:  # 4,096 values or more: within 3 standard errors
            assert float(values.detach().std()) == pytest.approx(0.02, rel=0.04)
        else:
            torch.testing.assert_close(values, theirs[name], rtol=0.0, atol=0.0)


def test_factors_follow_the_rate_and_the_decay_of_the_optimizer():
    groups = {
        "head": ParamGroup(pattern="head", lr_factor=0.25, weight_decay_factor=4.0),
        "own": ParamGroup(pattern="wq", lr=0.1, lr_factor=0.5),
    }
    config = Optimizer.Config(lr=0.02, weight_decay=0.3, param_groups=groups)
    optimizer = config.build(model_parts=[llama_config().build()])
    found = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {(0.02 * 0.25, 0.3 * 4.0), (0.1 * 0.5, 0.3), (0.02, 0.3)}
    groups["head"].lr_factor = -1.0
    with pytest.raises(UserError, match="--optimizer.param_groups.head.lr_factor is -1.0"):
        config.validate()
