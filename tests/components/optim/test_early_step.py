"""`optimizer.early_step_in_backward` against the same optimizer that steps after the backward pass;
CPU offload."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes import run_processes
from tests.training import lay_out, llama_config, read_metrics, tiny_config, train
from torchtitan.components.checkpoint import ModelState
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.components.optim.lr_scheduler import LRScheduler
from torchtitan.components.optim.optimizer import Optimizer, ParamGroup, check_early_step
from torchtitan.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.gradients import clip_grad_norm
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.tools.errors import UserError

STEPS = 4
VOCABULARY = 99
OPTIMIZERS = {
    "AdamW": {},
    "AdamW foreach": {"implementation": "foreach"},
    "AdamW for-loop": {"implementation": "for-loop"},
    "Adam": {"name": "Adam"},
    "SGD": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    "Muon": {"name": "Muon"},
}


def make_model(*, tie_embeddings: bool = False, **layout: Any) -> Llama3Model:
    """Build a model with fixed weights, parallelized with `layout` (see `divide`)."""
    with torch.device("meta"):
        model = llama_config(vocab_size=VOCABULARY, tie_embeddings=tie_embeddings).build()
    if layout:
        divide(model, **layout)
    model.to_empty(device="cpu")
    initialize_weights(model, 0)
    return model


def divide(
    model: nn.Module,
    *,
    mode: Any = "none",
    compile: bool = False,
    offload: bool = False,
    **degrees: int,
) -> None:
    lay_out(
        model,
        ParallelismConfig(**degrees),
        training=TrainingConfig(mixed_precision_param="float32", enable_cpu_offload=offload),
        activation_checkpoint=ActivationCheckpointConfig(mode=mode),
        compile=CompileConfig(enable=compile, backend="aot_eager"),
    )


class Run:
    """A model with its optimizer and schedule, trained as in the training loop."""

    def __init__(self, model: nn.Module, *, early: bool, **settings: Any):
        self.model, self.early = model, early
        self.optimizer = Optimizer.Config(early_step_in_backward=early, **settings).build(
            model_parts=[model]
        )
        schedule = LRScheduler.Config(warmup_steps=2, decay_type="cosine")
        self.schedule = schedule.build(optimizer=self.optimizer, training_steps=STEPS + 1)
        self.numbers: list[tuple[float, float]] = []

    def train(self, *steps: int) -> "Run":
        for step in steps:
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, VOCABULARY, (2, 24), generator=generator)
            loss = (
                self.model(
                    tokens, head=CrossEntropyLoss.Config(chunk_tokens=24).build(), labels_BL=tokens
                )
                / 48
            )
            loss.backward()
            norm = clip_grad_norm(self.model.parameters(), float("inf"))
            if self.early:
                assert norm == 0  # no gradient remains
                norm = self.optimizer.early_grad_norm()
            self.optimizer.step()
            self.schedule.step()
            self.numbers.append((loss.item(), norm.item()))
        return self


def assert_same_run(early: Run, normal: Run) -> None:
    """Check that weights and moments are bitwise equal. The norm sums parameters in a different
    order."""
    for (name, weight), expected in zip(
        early.model.named_parameters(), normal.model.parameters(), strict=True
    ):
        assert torch.equal(full(weight), full(expected)), name
    state, expected_state = early.optimizer.state_dict(), normal.optimizer.state_dict()
    assert state.keys() == expected_state.keys()
    for key, value in state.items():
        assert torch.equal(full(value), full(expected_state[key])), key
    losses, norms = zip(*early.numbers, strict=True)
    expected_losses, expected_norms = zip(*normal.numbers, strict=True)
    assert losses == expected_losses
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    assert min(norms) > 0.1


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --- one process
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_bitwise_equal(settings):
    groups = {
        "head": ParamGroup(pattern="output", lr=0.01, weight_decay=0.5),
        "norms": ParamGroup(pattern="norm"),
    }
    early, normal = (
        Run(make_model(), early=early, param_groups=groups, **settings).train(*range(STEPS))
        for early in (True, False)
    )
    assert_same_run(early, normal)


def test_tied_embeddings_are_updated_after_both_gradients():
    early, normal = (
        Run(make_model(tie_embeddings=True), early=early).train(*range(STEPS))
        for early in (True, False)
    )
    assert_same_run(early, normal)


def test_frozen_parameters_are_not_updated():
    runs = []
    for early in (True, False):
        model = make_model()
        model.tok_embeddings.requires_grad_(False)
        model.layers["0"].requires_grad_(False)
        runs.append(Run(model, early=early).train(*range(STEPS)))
    assert_same_run(*runs)
    assert torch.equal(runs[0].model.tok_embeddings.weight, make_model().tok_embeddings.weight)


def test_only_one_gradient_exists_at_a_time():
    model, counts = make_model(), []

    def count(parameter: nn.Parameter) -> None:
        counts.append(sum(other.grad is not None for other in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # runs before the hook of the optimizer
    Run(model, early=True).train(0)
    assert counts == [1] * len(list(model.parameters()))


def test_the_norm_keeps_no_gradient_alive():
    """Only the norm of each row is kept, not a view, whose storage would hold whole communicated
    gradients."""
    run = Run(make_model(), early=True).train(0)
    n_bytes = sum(norms.untyped_storage().nbytes() for norms in run.optimizer._row_norms)
    assert n_bytes <= 4 * sum(
        parameter.numel() // parameter.shape[-1] for parameter in run.model.parameters()
    )


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("early_first", [True, False])
def test_checkpoints_are_interchangeable(settings, early_first):
    straight = Run(make_model(), early=False, **settings).train(*range(STEPS))
    first = Run(make_model(), early=early_first, **settings).train(*range(2))
    second = Run(make_model(), early=not early_first, **settings)
    ModelState([second.model]).load_state_dict(ModelState([first.model]).state_dict())
    second.optimizer.load_state_dict(
        {key: value.clone() for key, value in first.optimizer.state_dict().items()}
    )
    second.schedule.load_state_dict(first.schedule.state_dict())
    second.numbers = list(first.numbers)
    assert_same_run(second.train(*range(2, STEPS)), straight)


def test_a_nonfinite_gradient_makes_the_norm_nonfinite():
    model = make_model()
    with torch.no_grad():
        model.head.norm.weight[3] = float("nan")
    assert not torch.tensor(Run(model, early=True).train(0).numbers).isfinite().any()


def test_the_trainer_gives_equal_updates(tmp_path):
    """The trainer calls `step` after the backward pass in both cases."""
    runs = {}
    for early in (True, False):
        folder = tmp_path / str(early)
        trainer = train(folder, training__max_norm="inf", optimizer__early_step_in_backward=early)
        runs[early] = (
            read_metrics(folder, "loss", "grad_norm"),
            list(trainer.model_parts[0].parameters()),
        )
    (early_numbers, early_weights), (numbers, weights) = runs[True], runs[False]
    assert [line[:2] for line in early_numbers] == [line[:2] for line in numbers]
    assert [line[2] for line in early_numbers] == pytest.approx(
        [line[2] for line in numbers], rel=1e-6
    )
    for weight, expected in zip(early_weights, weights, strict=True):
        assert torch.equal(weight, expected)


def test_the_trainer_configuration_is_checked(tmp_path):
    with pytest.raises(
        UserError, match=r"--optimizer\.early_step_in_backward cannot be combined with clipping"
    ):
        tiny_config(tmp_path, optimizer__early_step_in_backward=True).check(world_size=1)


# --- several processes
# ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "FSDP": {"data_parallel_shard_degree": 2},
    "FSDP, compiled": {"data_parallel_shard_degree": 2, "mode": "full", "compile": True},
    "FSDP, offloaded": {"data_parallel_shard_degree": 2, "offload": True},
    "DDP": {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 1,
        "mode": "selective",
    },
    "TP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1, "mode": "selective"},
}


def compare_in_layouts(folder: Path, layouts: list[str], optimizer: str) -> None:
    import torch.distributed as dist

    for layout in layouts:
        early, normal = (
            Run(make_model(**LAYOUTS[layout]), early=early, **OPTIMIZERS[optimizer]).train(0, 1)
            for early in (True, False)
        )
        assert_same_run(early, normal)
    (folder / f"rank {dist.get_rank()} has compared").touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "optimizer"),
    [
        (["FSDP", "TP"], "AdamW"),
        ([*LAYOUTS], "AdamW"),
        (["FSDP"], "Muon"),  # Muon communicates within its updates
    ],
    ids=["FSDP and TP", "all layouts", "Muon"],
)
def test_updates_of_two_processes_are_bitwise_equal(tmp_path, layouts, optimizer):
    run_processes(compare_in_layouts, 2, tmp_path, layouts, optimizer)
    assert len(list(tmp_path.iterdir())) == 2


def compare_offloaded(folder: Path) -> None:
    """Compare training, saving, resuming and clipping with offloaded FSDP weights against one
    process."""
    import torch.distributed as dist

    for settings in ({"implementation": "for-loop"}, OPTIMIZERS["Muon"]):
        whole = Run(make_model(), early=False, **settings).train(*range(2))
        run = Run(
            make_model(data_parallel_shard_degree=2, offload=True), early=False, **settings
        ).train(*range(2))
        # Averaging two equal gradients is exact; the norm sums in a different order.
        tolerance = 1e-6 if settings.get("name") != "Muon" else 1e-2  # Muon iterates in bfloat16
        assert torch.tensor(run.numbers).allclose(torch.tensor(whole.numbers), rtol=tolerance)
        saved = {key: value.clone() for key, value in run.optimizer.state_dict().items()}
        weights = {
            key: value.clone() for key, value in ModelState([run.model]).state_dict().items()
        }
        assert {value.device.type for value in (*saved.values(), *weights.values())} == {"cpu"}
        resumed = Run(
            make_model(data_parallel_shard_degree=2, offload=True), early=False, **settings
        )
        ModelState([resumed.model]).load_state_dict(weights)
        resumed.optimizer.load_state_dict(saved)
        resumed.schedule.load_state_dict(run.schedule.state_dict())
        run.train(2, 3)
        resumed.numbers = run.numbers[:2]
        assert_same_run(resumed.train(2, 3), run)
        parameters = list(run.model.parameters())
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        clip_grad_norm(parameters, 0.5)
        # torch divides by norm + 1e-6
        assert clip_grad_norm(parameters, 1.0).item() == pytest.approx(0.5, rel=1e-4)
    (folder / f"rank {dist.get_rank()} has compared").touch()


@pytest.mark.slow
def test_offloaded_weights_train_and_resume(tmp_path):
    run_processes(compare_offloaded, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


# --- configuration
# --------------------------------------------------------------------------------------------------


def valid_sections() -> dict[str, Any]:
    return {
        "training": TrainingConfig(local_batch_size=2, global_batch_size=8, max_norm=float("inf")),
        "parallelism": ParallelismConfig(),
    }


def conflicts() -> Iterator[tuple[str, str, Any, str]]:
    yield (
        "training",
        "global_batch_size",
        16,
        r"gradient accumulation \(--training\.global_batch_size 16 in passes of 8",
    )
    yield "training", "max_norm", 1.0, r"clipping \(--training\.max_norm 1\.0"
    yield "training", "on_nonfinite", "skip", r"--training\.on_nonfinite skip"
    yield "parallelism", "pipeline_parallel_degree", 2, r"--parallelism\.pipeline_parallel_degree 2"


@pytest.mark.parametrize(("section", "field", "value", "message"), conflicts())
def test_options_that_need_all_gradients_are_rejected(section, field, value, message):
    sections = valid_sections()
    setattr(sections[section], field, value)
    early = Optimizer.Config(early_step_in_backward=True)
    with pytest.raises(
        UserError, match=rf"--optimizer\.early_step_in_backward cannot be combined with {message}"
    ):
        check_early_step(early, **sections, data_parallel_degree=4)
    check_early_step(Optimizer.Config(), **sections, data_parallel_degree=4)
    check_early_step(early, **valid_sections(), data_parallel_degree=4)
