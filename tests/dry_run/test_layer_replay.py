"""Dry runs that replay equal layers report what dry runs of all layers do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import report
from torchtitan.dry_run.fake_trainer import FakeTrainer
from torchtitan.dry_run.layer_replay import LayerReplay
from torchtitan.dry_run.report import RankReport, reports_of
from torchtitan.models.common.blocks import PreNormBlock
from torchtitan.tools.equal_layers import facts_of_layer

SEVEN_LAYERS = ["--model.n_layers", "7"]
LLAMA = ["--module", "llama3", "--config", "debugmodel", *SEVEN_LAYERS]


@pytest.fixture
def made(monkeypatch) -> list[LayerReplay]:
    """Return the list of all layer replays that dry runs make."""
    made: list[LayerReplay] = []
    original = LayerReplay.__init__

    def record(self: LayerReplay, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(LayerReplay, "__init__", record)
    return made


def run(options: list[str], world_size: int) -> RankReport:
    (found,) = reports_of(ConfigManager().parse_args(options).config, world_size)
    return found


CASES = {
    # equal layers, and how many of them a dry run replays
    "one process": (1, [*LLAMA, "--training.mixed_precision_param", "bfloat16"], 0),
    "none": (2, [*LLAMA, "--activation_checkpoint.mode", "none"], 5),
    "full": (2, [*LLAMA, "--activation_checkpoint.mode", "full"], 5),
    "every second": (
        2,
        [
            *(*LLAMA, "--activation_checkpoint.mode", "selective"),
            *("--activation_checkpoint.selective_option", "2"),
        ],
        3,
    ),
    "two micro-batches": (2, [*LLAMA, "--training.global_batch_size", "32"], 10),
    "CP": (4, [*LLAMA, "--parallelism.context_parallel_degree", "2"], 5),
    "TP": (4, [*LLAMA, "--parallelism.tensor_parallel_degree", "2"], 0),
    "QLoRA": (2, ["--config", "llama3_debugmodel_qlora", *SEVEN_LAYERS], 4),
    "experts": (2, ["--module", "qwen3_5", "--config", "qwen3_5_moe_debugmodel", *SEVEN_LAYERS], 4),
    # windows in every second layer, which the arguments tell
    "windows": (2, ["--module", "gemma", "--config", "gemma2_debugmodel", *SEVEN_LAYERS], 3),
    # the last layers that compute keys and values also return them
    "shared keys": (
        2,
        ["--module", "gemma4", "--config", "gemma4_small_debugmodel", "--model.n_layers", "6"],
        None,
    ),
}


@pytest.mark.filterwarnings("error:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == "full" else pytest.mark.slow) for name in CASES]
)
def test_replayed_layers_change_nothing(made, monkeypatch, case):
    """Compare memory, communication and each kind of kernel exactly."""
    world_size, options, n_replayed = CASES[case]
    found = run(options, world_size)
    assert n_replayed is None or made[-1].replayed == n_replayed
    monkeypatch.setattr(FakeTrainer, "replays_layers", False)
    made.clear()
    assert run(options, world_size) == found
    assert not made


def test_layers_with_other_effects_are_computed(made, monkeypatch):
    """The last layer multiplies once more, which its fields do not tell."""
    original, calls = PreNormBlock.forward, []

    def forward(self: PreNormBlock, x_BLD: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        result = original(self, x_BLD, *args, **kwargs)
        return result * 2 if self is last[0] else result

    last: list[nn.Module] = []
    replay = LayerReplay.__init__

    def find_last(self: LayerReplay, model: Any, *args: Any) -> None:
        last[:] = list(model.blocks().values())[-1:]
        replay(self, model, *args)

    monkeypatch.setattr(PreNormBlock, "forward", forward)
    monkeypatch.setattr(LayerReplay, "__init__", find_last)
    simulated: list[dict[str, Any]] = []
    simulate = report._simulate

    def note(*args: Any, **options: Any) -> RankReport:
        simulated.append(options)
        return simulate(*args, **options)

    monkeypatch.setattr(report, "_simulate", note)
    run([*LLAMA, "--activation_checkpoint.mode", "none"], 1)
    assert [*simulated[-1]] == ["replays_layers"]
    assert len(calls) > 7


def test_facts_of_layers():
    """Layers are equal if they differ in their number only, also in what lists say about it."""

    class Config:
        num_hidden_layers = 3

        def __init__(self) -> None:
            self.windows = [4, 4, None]

    class Layer(nn.Module):
        def __init__(self, config: Config, layer_idx: int, width: int = 2) -> None:
            super().__init__()
            self.config, self.layer_idx = config, layer_idx
            self.linear = nn.Linear(width, width)

    config = Config()
    with torch.device("meta"):
        first, second, third = (Layer(config, index) for index in range(3))
        wide, frozen = Layer(config, 0, width=3), Layer(config, 0).requires_grad_(False)
    facts = facts_of_layer(first, 0)
    assert facts_of_layer(second, 1) == facts
    for other, index in ((third, 2), (wide, 0), (frozen, 0), (first.eval(), 0)):
        assert facts_of_layer(other, index) != facts
