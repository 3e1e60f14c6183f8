"""Single components in a custom loop, with torch's optimizers and schedules."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.components.checkpoint import CheckpointManager, ModelState
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer_state import OptimizerState
from torchtitan.config import ConfigManager
from torchtitan.distributed import initialize_weights
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.errors import UserError

STEPS, STOP, LR = 6, 3, 1e-2


def make_model() -> nn.Module:
    config = model_registry("debugmodel").model
    config.vocab_size, config.dim, config.ffn_dim, config.n_layers = 40, 32, 48, 1
    config.n_heads = config.n_kv_heads = 2
    model = config.build()
    initialize_weights(model, 0)
    return model


def titan_schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LRScheduler.Config(warmup_steps=2, decay_type="cosine").build(
        optimizer=optimizer, training_steps=STEPS
    )


def torch_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def train(
    make_optimizer, make_schedule, folder: Path | None, last_step: int
) -> tuple[int, list[tuple[float, float]]]:
    """Run, stop and rerun as a script does; return the first step, and rate and loss of each
    step."""
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer)
    checkpoints = None
    begin = 0
    if folder is not None:
        checkpoints = CheckpointManager.Config(enable=True, interval=STOP).build(
            dump_folder=str(folder),
            states={
                "model": ModelState([model]),
                "optimizer": optimizer,
                "lr_scheduler": schedule,
            },
        )
        begin = checkpoints.load()
    steps = []
    for step in range(begin + 1, last_step + 1):
        tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        steps.append((optimizer.param_groups[0]["lr"], loss.item()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if checkpoints:
            checkpoints.save(step)
    if checkpoints:
        checkpoints.close()
    return begin, steps


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    biases = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0}], lr=LR)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    """Has state that changes in a step without gradients."""
    return torch.optim.NAdam(model.parameters(), lr=LR)


@pytest.mark.parametrize("make_optimizer", [adamw, sgd, nadam])
@pytest.mark.parametrize("make_schedule", [titan_schedule, torch_schedule])
def test_torch_optimizer_resumes_exactly(make_optimizer, make_schedule, tmp_path):
    """Equals an uninterrupted loop without our checkpoints, bit for bit."""
    _, expected = train(make_optimizer, make_schedule, None, STEPS)
    begin, before = train(make_optimizer, make_schedule, tmp_path, STOP)
    assert (begin, before) == (0, expected[:STOP])
    begin, after = train(make_optimizer, make_schedule, tmp_path, STEPS)
    assert (begin, after) == (STOP, expected[STOP:])
    assert len({rate for rate, _ in expected}) > 3


def test_parameters_without_gradient_have_zero_moments():
    """Frozen parameters have no moments; existing moments and gradients are kept."""
    layers = nn.ModuleDict(
        {name: nn.Linear(2, 2, bias=False) for name in ("used", "unused", "frozen")}
    )
    layers["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LR)
    layers["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = optimizer.state[layers["used"].weight]["exp_avg"].clone()
    weights = {name: weight.clone() for name, weight in layers.named_parameters()}
    state = OptimizerState(layers, optimizer).state_dict()
    moments = {key: value for key, value in state.items() if key.startswith("state.")}
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert set(moments) == {
        f"state.{name}.weight.{kind}" for name in ("used", "unused") for kind in kinds
    }
    assert moments["state.used.weight.step"] == 1 and torch.equal(
        moments["state.used.weight.exp_avg"], before
    )
    assert not any(moments[f"state.unused.weight.{kind}"].any() for kind in kinds)
    assert layers["used"].weight.grad is not None and layers["unused"].weight.grad is None
    assert all(torch.equal(weights[name], weight) for name, weight in layers.named_parameters())
    assert optimizer.param_groups[0]["lr"] == LR


def test_optimizer_of_another_model_is_rejected(tmp_path):
    states = {"model": ModelState([make_model()]), "optimizer": adamw(make_model())}
    message = (
        r"state 'optimizer' is a torch\.optim\.AdamW, but no ModelState among the states "
        r"has its "
        r"parameters"
    )
    with pytest.raises(UserError, match=message):
        CheckpointManager.Config(enable=True).build(dump_folder=str(tmp_path), states=states)


def test_schedule_keeps_the_ratio_of_groups():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": LR}, {"params": [parameters[1]], "lr": LR / 4}]
    optimizer = torch.optim.SGD(groups)
    schedule = LRScheduler.Config(warmup_steps=4).build(optimizer=optimizer, training_steps=8)
    for expected in (0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0):
        assert [group["lr"] for group in optimizer.param_groups] == [
            LR * expected,
            LR / 4 * expected,
        ]
        assert schedule.lr == LR * expected
        schedule.step()


def test_configuration_manager_builds_the_parts():
    config = ConfigManager().parse_args(["--config", "debugmodel", "--model.n_layers", "3"]).config
    config.model_spec.model.vocab_size = 40
    assert len(config.model_spec.model.build().layers) == 3


def test_missing_vocabulary_size_is_reported():
    with pytest.raises(
        UserError, match=r"vocab_size is None.*config\.vocab_size = tokenizer\.vocab_size"
    ):
        model_registry("debugmodel").model.build()
