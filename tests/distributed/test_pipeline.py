"""Pipeline parallelism: stages, valid numbers of micro-batches, and gradients of every schedule."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tests.distributed.test_parallel_dims import fake_rank
from tests.processes import run_processes
from tests.training import llama_config
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.pipeline import Pipeline, PipelinePlan, take_stage
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

SINGLE = ("GPipe", "1F1B")
V = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES: tuple[Any, ...] = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V)
VOCABULARY, LENGTH, DIM = 31, 8, 16


def model_config(n_layers: int = 4, **options: Any) -> Llama3Model.Config:
    return llama_config(vocab_size=VOCABULARY, dim=DIM, n_layers=n_layers, **options)


def make_plan(
    model: Llama3Model.Config | None = None, local_batch_size: int = 8, **options: Any
) -> PipelinePlan:
    """Build a plan for two ranks; `options` are fields of `ParallelismConfig` without
    `pipeline_parallel_`."""
    modules_per_stage = options.pop("module_fqns_per_model_part", None)
    settings = {
        f"pipeline_parallel_{name}": value for name, value in {"degree": 2, **options}.items()
    }
    config = ParallelismConfig(module_fqns_per_model_part=modules_per_stage, **settings)
    return PipelinePlan.from_config(config, model or model_config(), local_batch_size)


def count_layers(plan: PipelinePlan) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in plan.stages]


# --- stages
# --------------------------------------------------------------------------------------------------


def test_embedding_and_head_count_as_one_layer_each():
    plan = make_plan(schedule="Interleaved1F1B")
    assert plan.stages == (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3",),
        ("head",),
    )


@pytest.mark.parametrize(
    ("n_layers", "options", "expected"),
    [
        (4, {}, [2, 2]),
        (5, {}, [3, 2]),
        (4, {"first_stage_less_layers": 0, "last_stage_less_layers": 0}, [2, 2]),
        (4, {"first_stage_less_layers": 0, "last_stage_less_layers": 2}, [3, 1]),
        (6, {"first_stage_less_layers": 2, "last_stage_less_layers": 0}, [2, 4]),
        (4, {"schedule": "Interleaved1F1B", "layers_per_stage": 1}, [0, 1, 1, 1, 1, 0]),
        (8, {"schedule": "LoopedBFS", "layers_per_stage": 3}, [2, 3, 2, 1]),
        (30, {"degree": 4, "schedule": "ZBVZeroBubble"}, [3, 4, 4, 4, 4, 4, 4, 3]),
    ],
)
def test_layers_per_stage(n_layers, options, expected):
    assert count_layers(make_plan(model_config(n_layers), **options)) == expected


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_contain_all_modules_in_order_and_are_balanced(degree, schedule):
    # enough layers to balance the heaviest first or last stage
    for n_layers in range(4 * degree, 24):
        for first, last in ((0, 0), (1, 1), (0, 2), (2, 1)):
            model = model_config(n_layers)
            weights = {"first_stage_less_layers": first, "last_stage_less_layers": last}
            plan = make_plan(model, degree=degree, schedule=schedule, **weights)
            listed = [name for stage in plan.stages for name in stage]
            assert listed == model.pipeline_modules()
            loads = count_layers(plan)
            loads[0], loads[-1] = loads[0] + first, loads[-1] + last
            assert max(loads) - min(loads) <= 1


def test_each_stage_is_on_one_rank():
    for schedule in SCHEDULES:
        for degree in (2, 4):
            plan = make_plan(model_config(12), degree=degree, schedule=schedule)
            stages = sorted(stage for rank in range(degree) for stage in plan.stages_of_rank(rank))
            assert stages == list(range(len(plan.stages)))
    assert make_plan(schedule="ZBVZeroBubble").stages_of_rank(0) == [0, 3]
    assert make_plan(schedule="LoopedBFS").stages_of_rank(0) == [0, 2]


def test_stages_by_name():
    parts = ["tok_embeddings", "layers.0,layers.1, layers.2", "layers.3", "head"]
    plan = make_plan(schedule="Interleaved1F1B", module_fqns_per_model_part=parts)
    assert plan.stages == (
        ("tok_embeddings",),
        ("layers.0", "layers.1", "layers.2"),
        ("layers.3",),
        ("head",),
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            ["tok_embeddings,layers.0,layers.1", "layers.2,layers.3,heads"],
            "'heads' is not a part of the model",
        ),
        (
            ["tok_embeddings,layers.0", "layers.2,layers.3,head"],
            "must list each part of the model once",
        ),
        (
            ["tok_embeddings,layers.0,layers.0,layers.1", "layers.2,layers.3,head"],
            "each part of the model once",
        ),
        (
            ["tok_embeddings,layers.1,layers.0", "layers.2,layers.3,head"],
            "in this order: tok_embeddings, layers.0",
        ),
        (["tok_embeddings,layers.0,layers.1,layers.2,layers.3,head", ""], "a stage is empty"),
        (["tok_embeddings", "layers.0,layers.1,layers.2,layers.3", "head"], "3 stages for 2 ranks"),
    ],
)
def test_invalid_stages_by_name_are_rejected(parts, message):
    with pytest.raises(UserError) as error:
        make_plan(module_fqns_per_model_part=parts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            {"n_layers": 2},
            {"degree": 4, "schedule": "LoopedBFS"},
            "2 layers are too few for 8 pipeline stages",
        ),
        (
            {},
            {"microbatch_size": 3},
            "microbatch_size 3 does not divide --training.local_batch_size 8",
        ),
        (
            {},
            {"schedule": "LoopedBFS", "layers_per_stage": 2},
            "pipeline_parallel_layers_per_stage 2 gives 3 stages",
        ),
        (
            {},
            {"schedule": "1F1B", "layers_per_stage": 1},
            "1F1B needs one stage per rank, but there are 6 stages",
        ),
        (
            {},
            {"schedule": "LoopedBFS", "layers_per_stage": 3},
            "LoopedBFS needs the same number of stages, at least two, on each rank",
        ),
        (
            {},
            {"schedule": "DualPipeV", "layers_per_stage": 1},
            "DualPipeV needs two stages per rank, but there are 6",
        ),
        (
            {},
            {"microbatch_size": 8},
            "1F1B with 2 stages on 2 ranks needs at least 2 micro-batches",
        ),
        (
            {},
            {"schedule": "InterleavedZeroBubble", "local_batch_size": 5},
            "InterleavedZeroBubble with 4 stages on 2 ranks needs a multiple of 2 micro-batches, "
            "but --training.local_batch_size / --parallelism.pipeline_parallel_microbatch_size is "
            "5",
        ),
    ],
)
def test_invalid_plans_are_rejected(model, options, message):
    with pytest.raises(UserError) as error:
        make_plan(model_config(**model), **options)
    assert message in str(error.value)


# --- schedules
# --------------------------------------------------------------------------------------------------


def torch_accepts(schedule: str, degree: int, n_microbatches: int) -> bool:
    """Return True if the schedule class of PyTorch accepts the number of micro-batches. Requires
    rank 0 of a process group of size `degree`."""
    kind = get_schedule_class(schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    n_stages = degree if single else 2 * degree
    indices = [0] if single else [0, n_stages - 1 if schedule in V else degree]
    stages = [
        PipelineStage(nn.Linear(2, 2), index, n_stages, torch.device("cpu")) for index in indices
    ]
    try:
        kind(
            stages[0] if single else stages,
            n_microbatches=n_microbatches,
            loss_fn=lambda loss, _: loss,
        )
    except ValueError:
        return False
    return True


def plan_accepts(schedule: str, degree: int, n_microbatches: int) -> bool:
    try:
        make_plan(
            model_config(12), local_batch_size=n_microbatches, degree=degree, schedule=schedule
        )
    except UserError:
        return False
    return True


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accepted_numbers_of_micro_batches_match_torch(schedule, degree):
    with fake_rank(0, degree):
        for number in range(1, 14):
            assert plan_accepts(schedule, degree, number) == torch_accepts(
                schedule, degree, number
            ), number


def test_torch_accepts_returns_both_results():
    with fake_rank(0, 2):
        assert torch_accepts("1F1B", 2, 2)
        assert not torch_accepts("1F1B", 2, 1)


# --- model parts
# --------------------------------------------------------------------------------------------------


def test_a_stage_contains_its_modules_under_their_names():
    with torch.device("meta"):
        model = model_config().build()
    names = {name for name, _ in model.named_parameters()}
    plan = make_plan(schedule="Interleaved1F1B")
    stages = [take_stage(model, stage) for stage in plan.stages]
    names_by_stage = [[name for name, _ in stage.named_parameters()] for stage in stages]
    assert sum(names_by_stage, []) == [name for name, _ in model.named_parameters()]
    assert len(sum(names_by_stage, [])) == len(names)
    assert list(stages[1].layers) == ["1", "2"]
    assert stages[1].tok_embeddings is None and stages[1].head is None
    assert {name for name, _ in model.named_parameters()} == names  # the model itself is unchanged


def test_the_last_stage_has_a_copy_of_a_tied_embedding():
    config = model_config(tie_embeddings=True)
    plan = make_plan(config)
    assert [name for stage in plan.stages for name in stage] == config.pipeline_modules()
    first, last = (take_stage(config.build(), plan.modules_of_stage(stage)) for stage in (0, 1))
    names = [{name for name, _ in stage.named_parameters()} for stage in (first, last)]
    assert names[0] & names[1] == {"tok_embeddings.weight"}
    for stage in (first, last):
        initialize_weights(stage, 0)
    assert torch.equal(first.tok_embeddings.weight, last.tok_embeddings.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_consecutive_stages_match_the_model(tied):
    config = model_config(tie_embeddings=tied)
    model = config.build()
    initialize_weights(model, 0)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    plan, hidden = make_plan(config, schedule="Interleaved1F1B"), tokens
    for stage in range(len(plan.stages)):
        hidden = take_stage(model, plan.modules_of_stage(stage))(
            hidden, AttentionMetadata.of_rows(2, LENGTH)
        )
    torch.testing.assert_close(hidden, model(tokens), rtol=0, atol=0)


# --- gradients
# --------------------------------------------------------------------------------------------------


def make_batch(samples: int) -> dict[str, Any]:
    """Return a batch with packed documents and a different number of ignored labels in each
    sample."""
    generator = torch.Generator().manual_seed(samples)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = tokens.roll(-1, dims=1)
    for row in range(samples):
        labels[row, : row % LENGTH] = -100
    # different documents in each micro-batch
    ends = [min(3 + row, LENGTH - 1) for row in range(samples)]
    positions = torch.stack(
        [torch.cat([torch.arange(end), torch.arange(LENGTH - end)]) for end in ends]
    )
    attention = replace(AttentionMetadata.from_positions(positions), window=5)
    return {"input": tokens, "labels": labels, "attention": attention}


def run_whole_model(
    batch: dict[str, Any], scale: float, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    model = model_config(**options).build()
    initialize_weights(model, 0)
    loss = CrossEntropyLoss.Config().build()
    value = model(batch["input"], batch["attention"], head=loss, labels_BL=batch["labels"]) * scale
    value.backward()
    return value.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def run_schedules(folder: Path, numbers: tuple[int, ...], tied: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    runs = 0
    for schedule in SCHEDULES:
        for number in numbers:
            if plan_accepts(schedule, 2, number):
                compare_with_whole_model(mesh, number, schedule, tie_embeddings=tied)
                runs += 1
    (folder / f"{dist.get_rank()}").write_text(str(runs))


def compare_with_whole_model(mesh: Any, samples: int, schedule: str, **options: Any) -> None:
    batch, scale, config = make_batch(samples), 0.37, model_config(**options)
    plan = make_plan(config, local_batch_size=samples, schedule=schedule)
    stages = plan.stages_of_rank(dist.get_rank())
    parts = [take_stage(config.build(), plan.modules_of_stage(stage)) for stage in stages]
    for part in parts:
        initialize_weights(part, 0)
    pipeline = Pipeline(
        plan,
        parts,
        mesh=mesh,
        device=torch.device("cpu"),
        hidden=torch.empty(1, LENGTH, DIM, device="meta", requires_grad=True),
        head=CrossEntropyLoss.Config().build(),
    )
    expected, gradients = run_whole_model(batch, scale, **options)
    for _ in range(2):  # the second pass accumulates gradients
        loss = pipeline.forward_backward(batch, lambda summed: summed * scale)
        assert_scalar_on_last(loss, expected, pipeline)
        assert_scalar_on_last(pipeline.forward(batch), expected / scale, pipeline)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    # the second changes nothing
    norms = [pipeline.clip_grad_norm(parameters, float("inf")) for _ in range(2)]
    whole_norm = 2 * sum(gradient.square().sum() for gradient in gradients.values()) ** 0.5
    torch.testing.assert_close(norms, [whole_norm] * 2, rtol=1e-5, atol=0)
    for part in parts:
        for name, parameter in part.named_parameters():
            # Sums over micro-batches in a different order.
            error = (parameter.grad - 2 * gradients[name]).norm() / gradients[name].norm()
            assert error < 1e-5, f"{plan.schedule}, {samples} micro-batches: {name} {error}"


def assert_scalar_on_last(value: Tensor, expected: Tensor, pipeline: Pipeline) -> None:
    torch.testing.assert_close(
        value, expected if pipeline.has_last else torch.zeros(()), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("numbers", "tied", "runs"),
    [
        pytest.param((4,), False, 7, marks=pytest.mark.slow),
        ((4,), True, 7),
        pytest.param((1, 2, 3, 5, 6), False, 29, marks=pytest.mark.slow),
    ],
    ids=["4", "4, tied embeddings", "others"],
)
def test_gradients_match_the_whole_model(tmp_path, numbers, tied, runs):
    """Every schedule, with each number of micro-batches that it accepts; training steps alternate
    with evaluations."""
    run_processes(run_schedules, 2, tmp_path, numbers, tied)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [str(runs)] * 2


def test_a_user_error_in_a_stage_is_raised_unchanged():
    def run(*args, **kwargs):
        raise RuntimeError("the shapes of its inputs") from UserError("the loss is wrong")

    stages = SimpleNamespace(has_first=True, has_last=True, head=None)
    batch = {name: torch.zeros(1, 2, dtype=torch.int64) for name in ("input", "labels")}
    with pytest.raises(UserError, match="the loss is wrong"):
        Pipeline._run(stages, run, batch)
