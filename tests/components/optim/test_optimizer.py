"""The optimizer against torch.optim, and gradient clipping against float64, on whole and on sharded
parameters."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.processes import run_processes
from tests.training import llama_config
from torchtitan.components.optim.optimizer import Optimizer, ParamGroup
from torchtitan.components.optim.without_compiler import without_compiler
from torchtitan.distributed import ParallelDims, initialize_weights
from torchtitan.distributed.gradients import clip_grad_norm
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.usefixtures("log")

STEPS = 5
NO_DECAY = {
    "tok_embeddings.weight",
    "head.norm.weight",
    *(
        f"layers.{layer}.{norm}.weight"
        for layer in (0, 1)
        for norm in ("attention_norm", "ffn_norm")
    ),
}
"""Parameters without weight decay in the default group."""


def make_model(*, tie_embeddings: bool = False) -> Llama3Model:
    """Build a model with fixed weights and uneven shards (99 rows on two ranks)."""
    model = llama_config(tie_embeddings=tie_embeddings).build()
    initialize_weights(model, 0)
    return model


def gradient(step: int, index: int, shape: torch.Size) -> Tensor:
    """Return a gradient of realistic size: about 1e-3, with a factor that depends on the
    parameter."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(shape, generator=generator) * 1e-3 * (1 + index % 3)


def set_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = gradient(step, index, parameter.shape)


def train(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer | Optimizer], steps: Iterable[int]
) -> None:
    for step in steps:
        set_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def select(model: nn.Module, predicate: Callable[[str], bool]) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if predicate(name)]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    return [
        {"params": select(model, lambda name: name not in NO_DECAY), "weight_decay": weight_decay},
        {"params": select(model, lambda name: name in NO_DECAY), "weight_decay": 0.0},
    ]


def assert_equal_weights(model: nn.Module, expected: nn.Module) -> None:
    for (name, weight), reference in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(weight, reference), name


# --- updates
# --------------------------------------------------------------------------------------------------


def torch_adam(kind, implementation):
    switches = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    return lambda model: [
        kind(decay_groups(model, 0.2), lr=0.01, betas=(0.8, 0.9), eps=1e-6, **switches)
    ]


def torch_sgd(momentum, foreach):
    return lambda model: [
        torch.optim.SGD(decay_groups(model, 0.2), lr=0.5, momentum=momentum, foreach=foreach)
    ]


def torch_muon(model):
    def is_matrix(name):
        return name.startswith("layers.") and "norm" not in name

    muon = torch.optim.Muon(
        select(model, is_matrix),
        lr=0.01,
        weight_decay=0.2,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [
        {"params": select(model, lambda name: name in NO_DECAY), "weight_decay": 0.0},
        {"params": select(model, lambda name: name == "head.output.weight"), "weight_decay": 0.2},
    ]
    return [muon, torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)]


ADAM = {"lr": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.2}
SGD = {"name": "SGD", "lr": 0.5, "weight_decay": 0.2}
MUON = {"name": "Muon", "lr": 0.01, "weight_decay": 0.2}


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({**ADAM}, torch_adam(torch.optim.AdamW, "fused")),
        ({**ADAM, "implementation": "foreach"}, torch_adam(torch.optim.AdamW, "foreach")),
        ({**ADAM, "implementation": "for-loop"}, torch_adam(torch.optim.AdamW, "for-loop")),
        ({**ADAM, "name": "Adam"}, torch_adam(torch.optim.Adam, "fused")),
        ({**SGD}, torch_sgd(0.0, foreach=True)),
        ({**SGD, "momentum": 0.9}, torch_sgd(0.9, foreach=True)),
        ({**SGD, "momentum": 0.9, "implementation": "for-loop"}, torch_sgd(0.9, foreach=False)),
        ({**MUON}, torch_muon),
    ],
    ids=[
        "AdamW",
        "AdamW foreach",
        "AdamW for-loop",
        "Adam",
        "SGD",
        "SGD momentum",
        "SGD for-loop",
        "Muon",
    ],
)
def test_updates_match_torch_optim(settings, reference):
    ours, theirs = make_model(), make_model()
    train(ours, [Optimizer.Config(**settings).build(model_parts=[ours])], range(STEPS))
    train(theirs, reference(theirs), range(STEPS))
    assert_equal_weights(ours, theirs)  # bitwise equal: the same kernels on the same numbers
    assert not torch.equal(ours.head.norm.weight, make_model().head.norm.weight)


def test_several_model_parts_act_as_one_model():
    """Pipeline stages have separate optimizers, which step and save together."""
    whole, split = make_model(), make_model()
    train(whole, [Optimizer.Config().build(model_parts=[whole])], range(STEPS))
    first, last = (nn.Module(), nn.Module())
    first.tok_embeddings, last.head = split.tok_embeddings, split.head
    first.layers, last.layers = (
        nn.ModuleDict({"0": split.layers["0"]}),
        nn.ModuleDict({"1": split.layers["1"]}),
    )
    optimizer = Optimizer.Config().build(model_parts=[first, last])
    train(split, [optimizer], range(STEPS))
    assert_equal_weights(split, whole)
    assert (
        optimizer.state_dict().keys()
        == Optimizer.Config().build(model_parts=[whole]).state_dict().keys()
    )


# --- groups
# --------------------------------------------------------------------------------------------------


def settings_of(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[float, float]:
    """Return the learning rate and weight decay of a parameter, which must be in exactly one
    group."""
    groups = [
        group
        for group in optimizer.param_groups
        if any(parameter is member for member in group["params"])
    ]
    (group,) = groups
    assert group["initial_lr"] == group["lr"]
    return group["lr"], group["weight_decay"]


class WithBiases(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(3, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


def test_norms_biases_and_embeddings_have_no_weight_decay_by_default(log):
    model = WithBiases()
    optimizer = Optimizer.Config(lr=0.5, weight_decay=0.25).build(model_parts=[model])
    decays = {
        name: settings_of(optimizer, parameter) for name, parameter in model.named_parameters()
    }
    exempt = {"tok_embeddings.weight", "hidden.bias", "norm.weight", "norm.bias"}
    assert decays == {name: (0.5, 0.0) for name in exempt} | {"hidden.weight": (0.5, 0.25)}
    assert log.messages == []


def test_the_first_matching_group_sets_learning_rate_and_weight_decay():
    model = make_model()
    groups = {
        "head": ParamGroup(pattern=r"^head\.output", lr=0.25),
        "first_layer": ParamGroup(pattern=r"^layers\.0\.", weight_decay=0.5),
        "norms": ParamGroup(pattern="norm", lr=0.125, weight_decay=0.0),
    }
    optimizer = Optimizer.Config(lr=1.0, weight_decay=0.75, param_groups=groups).build(
        model_parts=[model]
    )
    parameters = dict(model.named_parameters())
    expected = {
        "head.output.weight": (0.25, 0.75),
        "layers.0.attention.wq.weight": (1.0, 0.5),
        "layers.0.ffn_norm.weight": (1.0, 0.5),
        "layers.1.ffn_norm.weight": (0.125, 0.0),
        "head.norm.weight": (0.125, 0.0),
        "tok_embeddings.weight": (1.0, 0.75),
    }
    assert {name: settings_of(optimizer, parameters[name]) for name in expected} == expected


def test_groups_apply_to_both_optimizers_of_muon():
    model = make_model()
    groups = {"first_layer": ParamGroup(pattern=r"^layers\.0\.", lr=0.25, weight_decay=0.5)}
    config = Optimizer.Config(
        name="Muon", lr=1.0, weight_decay=0.0, momentum=0.5, param_groups=groups
    )
    optimizer = config.build(model_parts=[model])
    block, other = model.layers["0"], model.layers["1"]
    for parameter in (block.attention.wq.weight, block.ffn_norm.weight):
        assert settings_of(optimizer, parameter) == (0.25, 0.5)
    for parameter in (other.attention.wq.weight, other.ffn_norm.weight, model.head.output.weight):
        assert settings_of(optimizer, parameter) == (1.0, 0.0)
    muon, adam = optimizer.optimizers
    assert {group["momentum"] for group in muon.param_groups} == {0.5}
    in_muon = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    matrices = {
        id(p) for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2
    }
    assert in_muon == matrices


def test_muon_leaves_routers_to_adamw():
    """Their rows are experts, which a step should not make equally large."""
    layer = torch.nn.ModuleDict(
        {"router": torch.nn.Linear(4, 8, bias=False), "wo": torch.nn.Linear(4, 8, bias=False)}
    )
    muon, adam = (
        Optimizer.Config(name="Muon")
        .build(model_parts=[torch.nn.ModuleDict({"layers": layer})])
        .optimizers
    )
    for optimizer, name in ((muon, "wo"), (adam, "router")):
        (parameter,) = (p for group in optimizer.param_groups for p in group["params"])
        assert parameter is layer[name].weight


@pytest.mark.parametrize("pattern", ["nrom", r"^norm\."])
def test_a_group_without_parameters_warns(log, pattern):
    """The pattern has a typo, or an earlier group matches its parameters."""
    groups = {"norms": ParamGroup(pattern="norm"), "idle": ParamGroup(pattern=pattern)}
    Optimizer.Config(param_groups=groups).build(model_parts=[make_model()])
    (message,) = log.messages
    assert "param_groups.idle is empty" in message and pattern in message


def test_patterns_match_canonical_names(log):
    model = make_model()
    model.layers["0"] = torch.compile(model.layers["0"])
    groups = {"first": ParamGroup(pattern=r"^layers\.0\.attention\.wq", lr=0.5)}
    optimizer = Optimizer.Config(param_groups=groups).build(model_parts=[model])
    assert settings_of(optimizer, model.layers["0"].attention.wq.weight)[0] == 0.5
    assert log.messages == []


def test_tied_embeddings_are_updated_once():
    ours, theirs = make_model(tie_embeddings=True), make_model(tie_embeddings=True)
    optimizer = Optimizer.Config(**ADAM).build(model_parts=[ours])
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(members) == len(set(members)) == len(list(ours.parameters()))
    train(ours, [optimizer], range(STEPS))
    train(theirs, torch_adam(torch.optim.AdamW, "fused")(theirs), range(STEPS))
    assert_equal_weights(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_frozen_parameters_are_unchanged_and_have_no_moments(name, log):
    model = make_model()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith("layers.1."))
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    optimizer = Optimizer.Config(name=name, momentum=None if name == "AdamW" else 0.9).build(
        model_parts=[model]
    )
    train(model, [optimizer], range(2))
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]) != parameter.requires_grad, key
    assert all(key.startswith("state.layers.1.") for key in optimizer.state_dict())
    assert log.messages == []  # frozen parameters match the default group, so it is not empty


def test_a_completely_frozen_model_is_rejected():
    with pytest.raises(UserError, match="nothing to train"):
        Optimizer.Config().build(model_parts=[make_model().requires_grad_(False)])


# --- state
# --------------------------------------------------------------------------------------------------

ALL = [
    {"name": "AdamW"},
    {"name": "Adam"},
    {"name": "SGD"},
    {"name": "SGD", "momentum": 0.9},
    {"name": "Muon"},
]
MOMENTS = {"exp_avg", "exp_avg_sq", "step"}


def test_state_dict_contains_only_moments_under_canonical_names():
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    model.layers["0"] = torch.compile(model.layers["0"])
    optimizer = Optimizer.Config().build(model_parts=[model])
    train(model, [optimizer], range(1))
    state = optimizer.state_dict()
    assert state.keys() == {f"state.{name}.{moment}" for name in names for moment in MOMENTS}
    first_gradient = gradient(0, names.index("head.norm.weight"), model.head.norm.weight.shape)
    torch.testing.assert_close(state["state.head.norm.weight.exp_avg"], 0.1 * first_gradient)


@pytest.mark.parametrize(
    "settings", ALL, ids=lambda settings: " ".join(map(str, settings.values()))
)
def test_state_dict_before_the_first_step_is_complete_and_has_no_effect(settings):
    ours, theirs = make_model(), make_model()
    queried, unqueried = (
        Optimizer.Config(**settings).build(model_parts=[model]) for model in (ours, theirs)
    )
    at_start = {key: value.clone() for key, value in queried.state_dict().items()}
    assert all(not value.any() for value in at_start.values())
    train(ours, [queried], range(STEPS))
    train(theirs, [unqueried], range(STEPS))
    assert_equal_weights(ours, theirs)
    assert queried.state_dict().keys() == at_start.keys()


def test_a_parameter_without_a_gradient_can_be_saved_and_loaded():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def step(model, optimizer):
        model.used.grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()

    config, model = Optimizer.Config(param_groups={}, weight_decay=0.0), Half()
    optimizer = config.build(model_parts=[model])
    step(model, optimizer)
    resumed = config.build(model_parts=[model])
    assert optimizer.state_dict().keys() == resumed.state_dict().keys()
    resumed.load_state_dict(optimizer.state_dict())
    step(model, resumed)
    assert resumed.state_dict()["state.used.step"] == 2
    assert torch.equal(model.unused, torch.ones(2))


@pytest.mark.parametrize(
    "settings", ALL, ids=lambda settings: " ".join(map(str, settings.values()))
)
def test_loading_restores_the_moments(settings):
    config = Optimizer.Config(**settings)
    straight, resumed = make_model(), make_model()
    train(straight, [config.build(model_parts=[straight])], range(STEPS))
    before = config.build(model_parts=[resumed])
    train(resumed, [before], range(3))
    saved = {key: value.clone() for key, value in before.state_dict().items()}
    after = config.build(model_parts=[resumed])
    after.load_state_dict(saved)
    assert after.state_dict().keys() == saved.keys()
    assert all(torch.equal(after.state_dict()[key], value) for key, value in saved.items())
    train(resumed, [after], range(3, STEPS))
    assert_equal_weights(resumed, straight)


def test_loading_keeps_the_configured_hyperparameters_and_groups():
    model = make_model()
    before = Optimizer.Config(lr=0.1, weight_decay=0.2).build(model_parts=[model])
    train(model, [before], range(2))
    groups = {"head": ParamGroup(pattern="output", lr=0.25, weight_decay=0.0)}
    config = Optimizer.Config(
        lr=0.5,
        beta1=0.5,
        beta2=0.75,
        eps=1e-4,
        weight_decay=0.125,
        implementation="foreach",
        param_groups=groups,
    )
    after = config.build(model_parts=[model])
    configured = [
        {key: value for key, value in group.items() if key != "params"}
        for group in after.param_groups
    ]
    after.load_state_dict(before.state_dict())
    loaded = [
        {key: value for key, value in group.items() if key != "params"}
        for group in after.param_groups
    ]
    assert loaded == configured
    assert settings_of(after, model.head.output.weight) == (0.25, 0.0)
    assert settings_of(after, model.head.norm.weight) == (0.5, 0.125)
    assert all(
        torch.equal(value, before.state_dict()[key]) for key, value in after.state_dict().items()
    )


# --- validation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"--optimizer\.lr is -1\.0, but must be .*"),
        ({"lr": float("nan")}, r"--optimizer\.lr is nan, but must be .*"),
        ({"weight_decay": -0.1}, r"--optimizer\.weight_decay is -0\.1, but must be .*"),
        ({"eps": 0.0}, r"--optimizer\.eps is 0\.0, but must be above 0"),
        ({"beta1": 1.0}, r"--optimizer\.beta1 is 1\.0, but must be in \[0, 1\)"),
        ({"beta2": -0.5}, r"--optimizer\.beta2 is -0\.5, but must be .*"),
        ({"name": "SGD", "momentum": 1.5}, r"--optimizer\.momentum is 1\.5, but must be .*"),
        (
            {"momentum": 0.9},
            r"--optimizer\.momentum 0\.9 is for SGD, Muon, Dion; for AdamW set --optimizer\.beta1",
        ),
        (
            {"param_groups": {"a": ParamGroup(pattern="x(")}},
            r"--optimizer\.param_groups\.a\.pattern 'x\('",
        ),
        (
            {"param_groups": {"a": ParamGroup(pattern="x", lr=-1.0)}},
            r"param_groups\.a\.lr is -1\.0, but must be .*",
        ),
        (
            {"param_groups": {"a": ParamGroup(pattern="x", weight_decay=-1.0)}},
            r"a\.weight_decay is -1\.0, but must be .*",
        ),
    ],
)
def test_invalid_values_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        Optimizer.Config(**settings).validate()


# --- two processes
# --------------------------------------------------------------------------------------------------


def sharded_model() -> Llama3Model:
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed.parallelize import parallelize_model
    from torchtitan.models.llama3 import SHARDING

    model, dims = make_model(), ParallelDims(world_size=2, dp_shard=2)
    training = TrainingConfig(mixed_precision_param="float32")
    parallelize_model(
        model, parallel_dims=dims, mesh=dims.build_mesh("cpu"), sharding=SHARDING, training=training
    )
    return model


def set_sharded_gradients(model: nn.Module, step: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    for index, parameter in enumerate(model.parameters()):
        full = gradient(step, index, parameter.shape)
        parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements)


def compare_updates(settings: dict) -> None:
    config = Optimizer.Config(**settings)
    model, whole = sharded_model(), make_model()
    optimizer, reference = config.build(model_parts=[model]), config.build(model_parts=[whole])
    for step in range(STEPS):
        set_sharded_gradients(model, step)
        set_gradients(whole, step)
        optimizer.step()
        reference.step()
    state, expected_state = optimizer.state_dict(), reference.state_dict()
    assert state.keys() == expected_state.keys()
    for key, expected in expected_state.items():
        value = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
        # Elementwise operations on shards differ by at most one rounding.
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9, msg=key)
    weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, expected in whole.named_parameters():
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6, msg=name)


def clip_sharded(max_norm: float) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = [distribute_tensor(grad, mesh, [Shard(0)]) for grad in gradients_for_clipping()]
    parameters = with_gradients(sharded)
    norm = clip_grad_norm(parameters, max_norm)
    check_clipped([parameter.grad.full_tensor() for parameter in parameters], norm, max_norm)
    norms = [torch.empty(()) for _ in range(2)]
    dist.all_gather(norms, norm)
    assert torch.equal(norms[0], norms[1])


def compare_sharded_with_whole(folder: Path) -> None:
    import torch.distributed as dist

    compare_updates(ADAM)
    compare_updates(MUON)
    clip_sharded(max_norm=0.5)
    clip_sharded(max_norm=100.0)
    (folder / f"rank {dist.get_rank()} has compared").touch()


@pytest.mark.slow
def test_two_processes_match_one(tmp_path):
    run_processes(compare_sharded_with_whole, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


# --- clipping
# --------------------------------------------------------------------------------------------------

SHAPES = [(99, 32), (1, 7), (33,), (1,), (1024, 2048)]
"""On two ranks: an uneven matrix, a matrix with an empty shard, an uneven vector, a vector with an
empty shard, and a matrix of two million values."""


def gradients_for_clipping(scale: float = 1.0) -> list[Tensor]:
    return [scale * gradient(0, index, torch.Size(shape)) for index, shape in enumerate(SHAPES)]


def float64_norm(gradients: Iterable[Tensor]) -> float:
    return sum(gradient.double().square().sum().item() for gradient in gradients) ** 0.5


def with_gradients(gradients: Iterable[Tensor]) -> list[nn.Parameter]:
    parameters = []
    for grad in gradients:
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad.clone()
        parameters.append(parameter)
    return parameters


def check_clipped(clipped: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Compare with float64. Each float32 sum of squares has at most 2048 values and uses pairwise
    summation."""
    originals = gradients_for_clipping()
    exact = float64_norm(originals)
    assert norm.shape == () and type(norm) is Tensor
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    factor = min(1.0, max_norm / exact)
    for result, original in zip(clipped, originals, strict=True):
        if factor == 1.0:
            assert torch.equal(result, original)
        else:
            # PyTorch divides by norm + 1e-6; the rest is float32 rounding.
            torch.testing.assert_close(
                result, (original.double() * factor).float(), rtol=2e-6, atol=0
            )


@pytest.mark.parametrize("max_norm", [0.5, 100.0, float("inf")], ids=["active", "inactive", "inf"])
def test_clipping_matches_float64_and_torch(max_norm):
    parameters = with_gradients(gradients_for_clipping())
    norm = clip_grad_norm(parameters, max_norm)
    check_clipped([parameter.grad for parameter in parameters], norm, max_norm)
    theirs = with_gradients(gradients_for_clipping())
    torch_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    # PyTorch adds all squares of a tensor in one float32 sum.
    assert norm.item() == pytest.approx(torch_norm.item(), rel=1e-3)
    for parameter, reference in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-3, atol=0)


def test_the_norm_of_bfloat16_gradients_is_float32():
    gradients = [grad.bfloat16() for grad in gradients_for_clipping()]
    norm = clip_grad_norm(parameters := with_gradients(gradients), 0.5)
    assert norm.item() == pytest.approx(float64_norm(gradients), rel=1e-6)
    clipped = [parameter.grad for parameter in parameters]
    assert {grad.dtype for grad in clipped} == {torch.bfloat16}
    # Each element is rounded to 8 bits, up or down with equal probability.
    assert float64_norm(clipped) == pytest.approx(0.5, rel=2**-9)


def test_other_devices_use_the_torch_kernel_over_all_tensors(monkeypatch):
    """Runs on the meta device."""
    calls = []
    get_total_norm = torch.nn.utils.get_total_norm
    monkeypatch.setattr(
        torch.nn.utils,
        "get_total_norm",
        lambda grads: calls.append(len(grads)) or get_total_norm(grads),
    )
    gradients = [gradient.to("meta") for gradient in gradients_for_clipping()]
    assert clip_grad_norm(with_gradients(gradients), 0.5).shape == ()
    assert calls == [len(SHAPES)]
    # It is not used for bfloat16, since it would round the norms.
    norm = clip_grad_norm(with_gradients([gradient.bfloat16() for gradient in gradients]), 0.5)
    assert norm.dtype == torch.float32
    assert calls == [len(SHAPES)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_on_cuda_matches_float64(max_norm):
    parameters = with_gradients([gradient.cuda() for gradient in gradients_for_clipping()])
    norm = clip_grad_norm(parameters, max_norm)
    check_clipped([parameter.grad.cpu() for parameter in parameters], norm, max_norm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_makes_the_norm_nonfinite(value):
    gradients = gradients_for_clipping()
    gradients[2][5] = value
    norm = clip_grad_norm(with_gradients(gradients), 1.0).item()
    assert norm != norm if value != value else norm == value


def test_parameters_without_gradients_do_not_count():
    (with_gradient,) = with_gradients([torch.tensor([3.0, 4.0])])
    assert clip_grad_norm([nn.Parameter(torch.ones(2)), with_gradient], 10.0).item() == 5.0
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 10.0).item() == 0.0


# --- updates that the device skips
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_flag_leaves_out_an_update(name):
    """Weights, moments and the count of updates stay; without the flag, or with 0, the update is
    the same."""
    config = Optimizer.Config(**{**ADAM, "name": name})
    models = [make_model() for _ in range(2)]
    optimizers = [config.build(model_parts=[model]) for model in models]
    for step in range(3):
        for model in models:
            set_gradients(model, step)
        optimizers[0].step(torch.tensor(0.0) if step == 2 else None)
        optimizers[1].step()
        kept = {key: value.clone() for key, value in optimizers[0].state_dict().items()}
        set_gradients(models[0], 7)
        optimizers[0].step(torch.tensor(1.0))
        assert all(
            torch.equal(kept[key], value) for key, value in optimizers[0].state_dict().items()
        )
        assert_equal_weights(*models)
    assert config.build(model_parts=[make_model()]).can_skip


@pytest.mark.parametrize(
    "settings", [SGD, MUON, {"implementation": "foreach"}, {"name": "AdamWOffload"}]
)
def test_other_optimizers_cannot_leave_out_an_update(settings):
    assert not Optimizer.Config(**settings).build(model_parts=[make_model()]).can_skip


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_optimizer_without_compiler_keeps_hooks_and_profile(kind: type[torch.optim.Optimizer]):
    """PyTorch's class, used before in the same process, has hooks in its own `step`."""
    kind([nn.Parameter(torch.ones(1))], lr=0.1)
    weight = nn.Parameter(torch.ones(1))
    optimizer = without_compiler(kind)([weight], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    weight.grad = torch.ones(1)
    with torch.profiler.profile() as profile:
        optimizer.step(lambda: calls.append(torch.is_grad_enabled()))
    assert isinstance(optimizer, kind) and weight.item() < 1
    assert calls == ["before", True, "after"]  # a closure computes gradients
    steps = [event for event in profile.events() if event.name.startswith("Optimizer.step#")]
    assert [event.name for event in steps] == [f"Optimizer.step#{kind.__name__}.step"]
    optimizer.zero_grad()
    assert weight.grad is None
