"""Rows of the table of optimizers against other implementations: schedulefree's, SOAP of
pytorch_optimizer, and float64 formulas; whole and sharded."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.processes import run_processes
from tests.training import flags, read_metrics, run, tiny_config
from torchtitan.components.optim.dion import Dion
from torchtitan.components.optim.kinds import KINDS, OptimizerName, is_matrix_of_layer
from torchtitan.components.optim.muon import Muon
from torchtitan.components.optim.optimizer import Optimizer, ParamGroup
from torchtitan.components.optim.own_state import OwnState
from torchtitan.components.optim.schedule_free import ScheduleFreeAdamW
from torchtitan.components.optim.soap import SOAP
from torchtitan.config import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.usefixtures("log")

ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_names_are_the_rows():
    assert get_args(OptimizerName) == tuple(KINDS)


@pytest.mark.parametrize("name", ["SGD", "Muon", "Dion"])
def test_the_row_has_the_default_momentum(name, monkeypatch):
    model = nn.ModuleDict({"layers": nn.Linear(3, 3, bias=False)})
    config = Optimizer.Config(name=name)

    def momentum() -> float:
        return Optimizer(config, model_parts=[model]).optimizers[0].param_groups[0]["momentum"]

    assert momentum() == KINDS[name].momentum
    monkeypatch.setitem(KINDS, name, replace(KINDS[name], momentum=0.5))
    assert momentum() == 0.5
    config.momentum = 0.25
    assert momentum() == 0.25


def gradients(step: int, shapes: list[tuple[int, ...]], dtype=torch.float32) -> list[Tensor]:
    """Gradients with a common part, of about 1e-2."""
    generator = torch.Generator().manual_seed(step)
    common = torch.Generator().manual_seed(1000)
    return [
        (torch.randn(s, generator=generator) + torch.randn(s, generator=common)).to(dtype) * 1e-2
        for s in shapes
    ]


def take_steps(
    optimizer: torch.optim.Optimizer, n: int, rates: list[float] | None = None, first: int = 0
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = [tuple(p.shape) for p in parameters]
    for step in range(first, first + n):
        for parameter, gradient in zip(
            parameters, gradients(step, shapes, parameters[0].dtype), strict=True
        ):
            parameter.grad = gradient
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates[step]
        optimizer.step()


def weights_of(shapes: list[tuple[int, ...]], dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


# --- schedule-free --------------------------------------------------------------------------------


def test_schedule_free_equals_the_authors():
    library = pytest.importorskip("schedulefree")
    shapes = [(6, 4), (5,), (3, 2, 2)]
    # A warm-up; then the rate of a later group may differ from its largest.
    rates = [0.01 * min(step + 1, 4) / 4 for step in range(12)]
    ours = ScheduleFreeAdamW([{"params": weights_of(shapes)}], **ADAM)
    theirs = library.AdamWScheduleFree(weights_of(shapes), foreach=False, **ADAM)
    theirs.train()
    take_steps(ours, 12, rates)
    take_steps(theirs, 12, rates)
    for own, expected in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)
        z = theirs.state[expected]["z"]
        torch.testing.assert_close(ours.state[own]["z"], z, rtol=1e-6, atol=1e-7)
    trained = [p.detach().clone() for p in ours.param_groups[0]["params"]]
    theirs.eval()
    with ours.evaluating():
        for own, expected, before in zip(
            ours.param_groups[0]["params"], theirs.param_groups[0]["params"], trained, strict=True
        ):
            torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)
            assert (own - before).abs().max() > 1e-4
    assert all(map(torch.equal, trained, ours.param_groups[0]["params"]))


def test_schedule_free_equals_the_paper():
    """Equation (1) to (4) with x held apart, in float64."""
    (weight,), lr, beta1, beta2 = weights_of([(5, 3)], torch.float64), 0.01, 0.9, 0.95
    x = z = weight.detach().clone()
    squares, weight_sum = torch.zeros_like(x), 0.0
    optimizer = ScheduleFreeAdamW([{"params": [weight]}], **ADAM)
    take_steps(optimizer, 8)
    for step in range(8):
        (gradient,) = gradients(step, [(5, 3)], torch.float64)
        y = (1 - beta1) * z + beta1 * x
        squares = beta2 * squares + (1 - beta2) * gradient**2
        root = (squares / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
        z = z - lr * (gradient / root + 0.1 * y)
        weight_sum += lr**2
        share = lr**2 / weight_sum
        x = (1 - share) * x + share * z
    with optimizer.evaluating():
        torch.testing.assert_close(weight.detach(), x, rtol=1e-9, atol=1e-11)


def test_schedule_free_restores_weights_if_their_averages_fail(monkeypatch):
    """As without memory for the second one."""
    weights = weights_of([(5, 3), (4,)])
    optimizer = ScheduleFreeAdamW([{"params": weights}], **ADAM)
    take_steps(optimizer, 3)
    trained = [weight.detach().clone() for weight in weights]
    has_averages = optimizer._has_averages

    def fail(parameter):
        if parameter is weights[1]:
            raise MemoryError
        return has_averages(parameter)

    monkeypatch.setattr(optimizer, "_has_averages", fail)
    with pytest.raises(MemoryError), optimizer.evaluating():
        pass
    assert all(map(torch.equal, trained, weights)) and not optimizer.training_weights


# --- SOAP -----------------------------------------------------------------------------------------


def test_soap_equals_a_library():
    """The updates are equal although columns of a basis may have another sign."""
    library = pytest.importorskip("pytorch_optimizer")
    shapes = [(6, 4), (3, 5), (4, 4)]
    settings = {**ADAM, "betas": (0.9, 0.95)}
    ours = SOAP([{"params": weights_of(shapes)}], **settings, basis_interval=3)
    theirs = library.SOAP(weights_of(shapes), **settings, precondition_frequency=3)
    take_steps(ours, 11)
    take_steps(theirs, 11)
    start = weights_of(shapes)
    for own, expected, first in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], start, strict=True
    ):
        assert (expected - first).abs().max() > 0.02
        # Eigenvectors of the same statistics, computed by sums in another order.
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def test_soap_updates_each_matrix_of_a_stack_by_itself():
    (stack,) = weights_of([(2, 3, 5, 4)])
    apart = [nn.Parameter(one.clone()) for one in stack.detach().flatten(0, 1)]
    whole = SOAP([{"params": [stack]}], **ADAM, basis_interval=2)
    parts = SOAP([{"params": apart}], **ADAM, basis_interval=2)
    for step in range(5):
        (stack.grad,) = gradients(step, [(2, 3, 5, 4)])
        for one, gradient in zip(apart, stack.grad.flatten(0, 1), strict=True):
            one.grad = gradient.clone()
        whole.step()
        parts.step()
    torch.testing.assert_close(stack.detach().flatten(0, 1), torch.stack(apart).detach())


# --- Dion -----------------------------------------------------------------------------------------


def dion_in_float64(weight: Tensor, basis: Tensor, steps: list[Tensor], mu: float) -> Tensor:
    """Algorithm 1 of the paper; Gram-Schmidt in place of QR, whose signs cancel."""
    momentum = torch.zeros_like(weight)
    rate = 0.01 * 0.2 * max(weight.shape) ** 0.5
    for gradient in steps:
        total = momentum + gradient
        columns: list[Tensor] = []
        for column in (total @ basis).T:
            for other in columns:
                column = column - (other @ column) * other
            columns.append(column / column.norm())
        left = torch.stack(columns, 1)
        right = total.T @ left
        momentum = total - (1 - mu) * left @ right.T
        basis = right / right.norm(dim=0)
        weight = weight * (1 - 0.01 * 0.1) - rate * left @ basis.T
    return weight


DION = {"lr": 0.01, "momentum": 0.9, "rank_fraction": 0.4, "weight_decay": 0.1}


@pytest.mark.parametrize("shape", [(7, 5), (4, 9)])
def test_dion_equals_float64(shape):
    (weight,) = weights_of([shape], torch.float64)
    optimizer = Dion([{"params": [weight]}], **DION)
    optimizer.allocate()
    basis = optimizer.state[weight]["basis"].clone()
    assert basis.shape == (shape[1], 2)
    start = weight.detach().clone()
    take_steps(optimizer, 6)
    steps = [gradients(step, [shape], torch.float64)[0] for step in range(6)]
    expected = dion_in_float64(start, basis, steps, 0.9)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-11)
    other = dion_in_float64(start, basis, steps, 0.8)
    assert (other - expected).abs().max() > 1e-4  # the momentum matters


def test_dion_keeps_the_basis_of_matrices_without_gradients():
    """As of experts without tokens, whose updates would never begin again."""
    (stack,) = weights_of([(2, 6, 4)])
    optimizer = Dion([{"params": [stack]}], **{**DION, "weight_decay": 0.0})
    optimizer.allocate()
    start, basis = stack.detach().clone(), optimizer.state[stack]["basis"].clone()
    stack.grad = torch.zeros_like(stack)
    stack.grad[1] = 1e-2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert torch.equal(stack[0], start[0]) and not torch.equal(stack[1], start[1])
    assert torch.equal(optimizer.state[stack]["basis"][0], basis[0])
    assert torch.equal(basis[0], basis[1])


# --- Muon of stacks -------------------------------------------------------------------------------


def test_muon_orthogonalizes_each_expert_by_itself():
    settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    (stack,) = weights_of([(2, 3, 12, 8)])
    apart = [nn.Parameter(one.clone()) for one in stack.detach().flatten(0, 1)]
    ours, theirs = Muon([{"params": [stack]}], **settings), torch.optim.Muon(apart, **settings)
    for step in range(3):
        (stack.grad,) = gradients(step, [(2, 3, 12, 8)])
        for one, gradient in zip(apart, stack.grad.flatten(0, 1), strict=True):
            one.grad = gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(stack.detach().flatten(0, 1), torch.stack(apart).detach())
    # Flattened to one matrix, as libraries do, an update of each is smaller by the root of 6.
    moved = (stack - weights_of([(2, 3, 12, 8)])[0]).square().mean().sqrt().item()
    assert moved == pytest.approx(3 * 0.02 * 0.2, rel=0.5)


def test_parameters_for_matrices():
    shapes = {
        "layers.0.moe.experts.w13": (4, 2, 6, 8),
        "layers.0.moe.experts.bias13": (4, 2, 6),
        "layers.0.moe.router.weight": (4, 8),
        "layers.0.attention.wq.weight": (8, 8),
        "layers.0.delta.conv.weight": (8, 1, 4),
        "layers.0.norm.weight": (8,),
        "tok_embeddings.weight": (9, 8),
        "head.output.weight": (9, 8),
    }
    chosen = {
        name for name, shape in shapes.items() if is_matrix_of_layer(name, torch.empty(shape))
    }
    assert chosen == {"layers.0.moe.experts.w13", "layers.0.attention.wq.weight"}


# --- sharded --------------------------------------------------------------------------------------

MAKERS = {
    "Dion": lambda groups: Dion(groups, **DION),
    "SOAP": lambda groups: SOAP(groups, **ADAM, basis_interval=2),
    "ScheduleFreeAdamW": lambda groups: ScheduleFreeAdamW(groups, **ADAM),
    "Muon": lambda groups: Muon(groups, lr=0.02, adjust_lr_fn="match_rms_adamw"),
}
SHARDED = [(6, 4), (3, 5), (4, 3, 6, 4), (2, 5, 3)]


def compare_sharded(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for name, make in MAKERS.items():
        for placement in (Shard(0), Shard(1), Replicate()):
            whole = weights_of(SHARDED)
            parts = [nn.Parameter(distribute_tensor(w.detach(), mesh, [placement])) for w in whole]
            one, two = make([{"params": whole}]), make([{"params": parts}])
            for step in range(4):
                for reference, part, gradient in zip(
                    whole, parts, gradients(step, SHARDED), strict=True
                ):
                    reference.grad = gradient
                    part.grad = distribute_tensor(gradient, mesh, [placement])
                one.step()
                two.step()
            for reference, part in zip(whole, parts, strict=True):
                # Sums in another order; Muon iterates in bfloat16, but on equal numbers.
                tolerance = (
                    {"rtol": 2e-4, "atol": 2e-5} if name != "Muon" else {"rtol": 0, "atol": 0}
                )
                torch.testing.assert_close(
                    part.full_tensor(), reference, **tolerance, msg=f"{name} {placement}"
                )
                for key, value in two.state[part].items():
                    if key in ("step", "weight_sum", "largest_lr"):
                        assert value == one.state[reference][key]
    (folder / f"rank {dist.get_rank()}").touch()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    run_processes(compare_sharded, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


# --- the table ------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.output = nn.Linear(4, 6), nn.Linear(6, 3)


@pytest.mark.parametrize("name", ["Muon", "Dion", "SOAP", "ScheduleFreeAdamW"])
def test_groups_have_their_rates(name):
    groups = {"bias": ParamGroup(pattern="bias", lr_factor=0.5, weight_decay=0.0)}
    optimizer = Optimizer.Config(name=name, lr=0.01, param_groups=groups).build(
        model_parts=[Small()]
    )
    kinds = [type(each).__name__ for each in optimizer.optimizers]
    assert kinds == ([name] if name == "ScheduleFreeAdamW" else [name, "AdamW"])
    found = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {(0.01, 0.1), (0.005, 0.0)}
    chosen = [p.shape for group in optimizer.optimizers[0].param_groups for p in group["params"]]
    assert len(chosen) == (4 if name == "ScheduleFreeAdamW" else 1)


@pytest.mark.parametrize("name", ["Dion", "SOAP", "ScheduleFreeAdamW"])
def test_state_resumes_bit_identically(name):
    def build():
        torch.manual_seed(0)
        return Optimizer.Config(name=name, lr=0.01, basis_interval=2).build(model_parts=[Small()])

    straight, first, second = build(), build(), build()
    for optimizer in (straight, first):
        for each in optimizer.optimizers:
            take_steps(each, 3)
    with first.evaluating(), torch.no_grad():
        saved = {key: value.clone() for key, value in first.state_dict().items()}
        weights = [p.detach().clone() for p in first.model_parts[0].parameters()]
    with torch.no_grad():
        for own, value in zip(second.model_parts[0].parameters(), weights, strict=True):
            own.copy_(value)
    second.load_state_dict(saved)
    for optimizer in (straight, second):
        for each in optimizer.optimizers:
            take_steps(each, 3, first=3)
    a, b = (list(each.model_parts[0].parameters()) for each in (straight, second))
    assert all(map(torch.equal, a, b))
    assert any(isinstance(each, OwnState) for each in straight.optimizers)


CONSTANT = {"lr_scheduler__decay_ratio": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer__name": "ScheduleFreeAdamW"}, "needs a constant learning rate after"),
        (
            {"optimizer__name": "ScheduleFreeAdamW", **CONSTANT, "ema__decay": 0.9},
            r"averages the weights already; leave out --ema\.decay 0\.9",
        ),
        (
            {"optimizer__name": "ScheduleFreeAdamW", **CONSTANT, "training__dtype": "bfloat16"},
            r"small steps, for which --training\.dtype bfloat16 has too few bits; set float32",
        ),
        (
            {"optimizer__name": "Dion", "training__dtype": "bfloat16"},
            r"Dion computes QR decompositions, for which --training\.dtype bfloat16",
        ),
        (
            {"optimizer__name": "SOAP", "training__dtype": "bfloat16"},
            r"SOAP computes eigenvectors, for which --training\.dtype bfloat16",
        ),
        (
            {"optimizer__name": "ScheduleFreeAdamW", **CONSTANT, "optimizer__beta1": 0.0},
            r"--optimizer\.beta1 0 leaves no averages",
        ),
        (
            {"optimizer__name": "ScheduleFreeAdamW", "optimizer__momentum": 0.9},
            r"momentum 0\.9 is for SGD, Muon, Dion; for ScheduleFreeAdamW set",
        ),
        ({"optimizer__rank_fraction": 0.0}, r"--optimizer\.rank_fraction is 0\.0"),
        ({"optimizer__basis_interval": 0}, r"--optimizer\.basis_interval is 0"),
        (
            {
                "optimizer__name": "Dion",
                "training__enable_cpu_offload": True,
                "parallelism__data_parallel_shard_degree": 2,
            },
            r"Dion cannot be combined with --training\.enable_cpu_offload",
        ),
        (
            {
                "optimizer__name": "SOAP",
                "training__dtype": "bfloat16",
                "optimizer__rounding": "kahan",
            },
            r"rounding kahan is not supported by --optimizer\.name SOAP; set one of AdamW, "
            "AdamW8bit, AdamW4bit, Muon",
        ),
    ],
)
def test_refusals(tmp_path, options, message):
    world_size = options.get("parallelism__data_parallel_shard_degree", 1)
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **options).check(world_size=world_size)


# --- runs -----------------------------------------------------------------------------------------


def bytes_of_matrices(name: str, shapes: list[torch.Size]) -> int:
    """Bytes of the state of matrices, float32."""
    total = 0
    for *stacked, m, n in shapes:
        elements = {
            "Muon": m * n,
            "Dion": m * n + n * math.ceil(0.25 * min(m, n)),
            "SOAP": 2 * m * n + 2 * (m * m + n * n),
        }[name]
        total += 4 * math.prod(stacked) * elements
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Muon", "Dion", "SOAP", "ScheduleFreeAdamW"])
def test_dry_run_predicts_memory(tmp_path, name):
    options = {"optimizer__name": name, "lr_scheduler__decay_ratio": 0.0}
    (report,) = dry_run(tiny_config(tmp_path, **options), 1)
    model = tiny_config(tmp_path, **options).model_spec.model
    with torch.device("meta"):
        named = list(
            replace(model, vocab_size=report_vocabulary(tmp_path)).build().named_parameters()
        )
    matrices = [p for n, p in named if name != "ScheduleFreeAdamW" and is_matrix_of_layer(n, p)]
    of_adam = report.parameters - sum(p.numel() for p in matrices)
    expected = 8 * of_adam + bytes_of_matrices(name, [p.shape for p in matrices])
    # Counts of steps, of a few bytes for each tensor.
    assert expected <= report.optimizer_bytes <= expected + 64 * len(named)


def report_vocabulary(folder: Path) -> int:
    config = tiny_config(folder)
    return config.resolve(config.tokenizer.build(path="")).model_spec.model.vocab_size


EXPERTS = {
    "model.dim": 32,
    "model.ffn_dim": 48,
    "model.n_layers": 2,
    "model.moe.n_experts": 4,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "training.mixed_precision_param": "float32",
    "metrics.log_freq": 1,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0.0,
    "validator.enable": False,
    "optimizer.lr": 3e-3,
}


def train_experts(folder: Path, options: dict) -> None:
    words = flags({**EXPERTS, "dump_folder": folder, **options})
    run(
        ConfigManager().parse_args(["--module", "mixtral", "--config", "debugmodel", *words]).config
    )


OF_EXPERTS = ("Muon", "Dion", "SOAP")


def train_experts_in_parallel(folder: Path) -> None:
    for name in OF_EXPERTS:
        options = {"optimizer.name": name, "parallelism.expert_parallel_degree": 2}
        train_experts(folder / name, options)


@pytest.mark.slow
def test_experts_in_parallel_train_like_one_process(tmp_path):
    """Experts of a mixture on two ranks (EP), whose matrices each rank has whole."""
    run_processes(train_experts_in_parallel, 2, tmp_path / "two")
    for name in OF_EXPERTS:
        train_experts(tmp_path / name, {"optimizer.name": name})
        one, two = (
            [loss for _, loss in read_metrics(folder / name, "loss")]
            for folder in (tmp_path, tmp_path / "two")
        )
        assert one[-1] < one[0] - 0.02, name
        # Gradients are summed in another order; Muon iterates in bfloat16.
        assert two == pytest.approx(one, rel=1e-3), name
