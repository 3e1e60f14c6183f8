"""Parts of a mixture of experts: routers, experts, and the balance of their load."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.family_cases import relative_error
from torchtitan.components.losses import load_balance
from torchtitan.components.losses.load_balance import LoadBalancer
from torchtitan.models.common.moe.experts import (
    ClampedExperts,
    GeGLUExperts,
    InputScaledExperts,
    RoutedExperts,
    swiglu,
)
from torchtitan.models.common.moe.layer import MoEConfig
from torchtitan.models.common.moe.router import Router, RoutingConfig
from torchtitan.models.transformers.balance import ClassBalance
from torchtitan.protocols.experts import PenaltyConfig
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

DIM, HIDDEN, EXPERTS, K, TOKENS = 16, 24, 6, 2, 40

TOLERANCE = 1e-5
"""Relative to the largest element: float32 sums in another order than the reference's, which is in
float64."""


def filled(module: Any, std: float = 0.5) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


# --- experts
# --------------------------------------------------------------------------------------------------


def choices(*, idle: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, weights and the chosen experts, never the one that is `idle`."""
    generator = torch.Generator().manual_seed(1)
    x_ND = torch.randn(TOKENS, DIM, generator=generator)
    weights_NK = torch.rand(TOKENS, K, generator=generator)
    scores_NE = torch.rand(TOKENS, EXPERTS, generator=generator)
    if idle is not None:
        scores_NE[:, idle] = -1
    return x_ND.requires_grad_(), weights_NK.requires_grad_(), scores_NE.topk(K).indices


def token_by_token(
    experts: Any, x_ND: Tensor, weights_NK: Tensor, chosen_NK: Tensor, *, before: bool
) -> Tensor:
    """Compute the definition in float64, a pair at a time."""
    p = {name: parameter.double() for name, parameter in experts.named_parameters()}
    p = {"bias13": torch.zeros(EXPERTS, 2, 1), "bias2": torch.zeros(EXPERTS, 1), **p}
    rows = []
    for token, (weights, chosen) in enumerate(
        zip(weights_NK.double(), chosen_NK.tolist(), strict=True)
    ):
        row = torch.zeros(DIM, dtype=torch.float64)
        for weight, e in zip(weights, chosen, strict=True):
            x = x_ND[token].double() * (weight if before else 1.0)
            hidden = experts.activation(*(p["w13"][e] @ x + p["bias13"][e]))
            row = row + (p["w2"][e] @ hidden + p["bias2"][e]) * (1.0 if before else weight)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("algorithm", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "has_bias", "idle"),
    [
        (RoutedExperts, False, None),
        (RoutedExperts, False, 2),
        (ClampedExperts, True, 0),
        (GeGLUExperts, False, 3),
        (InputScaledExperts, True, EXPERTS - 1),
    ],
)
def test_experts_and_all_gradients_equal_their_definition(
    kind: type[RoutedExperts],
    has_bias: bool,
    idle: int | None,
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both algorithms; the grouped products of CUDA also run on a CPU. Large inputs reach the
    clamps."""
    sizes = {
        "n_experts": EXPERTS,
        "top_k": K,
        "dim": DIM,
        "hidden_dim": HIDDEN,
        "init_std": 1.0,
        "out_init_std": 1.0,
    }
    monkeypatch.setattr(kind, "has_bias", has_bias)
    experts = filled(kind(**sizes), std=1.0)
    experts.device_type = algorithm
    inputs = choices(idle=idle)
    upstream = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(2))
    leaves = [*inputs[:2], *experts.parameters()]
    out = experts(*inputs)
    gradients = torch.autograd.grad((out * upstream).sum(), leaves)
    expected = token_by_token(experts, *inputs, before=kind is InputScaledExperts)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), leaves)
    for ours, theirs in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert relative_error(ours, theirs) < TOLERANCE
    if idle is not None:
        assert not gradients[2][idle].any() and gradients[2][1].any()


@pytest.mark.parametrize("frozen", [("w13",), ("w2",), ("w13", "w2")])
def test_frozen_experts_pass_on_the_same_gradients(frozen: tuple[str, ...]) -> None:
    experts = filled(
        RoutedExperts(
            n_experts=EXPERTS, top_k=K, dim=DIM, hidden_dim=HIDDEN, init_std=1, out_init_std=1
        )
    )
    inputs, gradients = choices(), []
    for names in ((), frozen):
        for name in names:
            experts.get_parameter(name).requires_grad_(False)
        trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
        gradients.append(
            torch.autograd.grad(experts(*inputs).square().sum(), [*inputs[:2], *trained])
        )
    kept = [0, 1, *(i for i, name in enumerate(("w13", "w2"), start=2) if name not in frozen)]
    assert all(torch.equal(gradients[0][i], own) for i, own in zip(kept, gradients[1], strict=True))


@pytest.mark.parametrize("algorithm", ["cpu", "cuda", "cpu without bfloat16"])
def test_experts_in_bfloat16_are_near_float32(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "without" in algorithm:
        monkeypatch.setattr("torchtitan.models.common.moe.experts.multiplies", lambda dtype: False)
    experts = filled(
        RoutedExperts(
            n_experts=EXPERTS, top_k=K, dim=DIM, hidden_dim=HIDDEN, init_std=1, out_init_std=1
        )
    ).bfloat16()
    experts.device_type = algorithm.partition(" ")[0]
    x, weights, chosen = choices()
    out = experts(x.bfloat16(), weights, chosen)
    out.backward(torch.ones_like(out))
    # A few roundings to 8 bits.
    assert (
        relative_error(out.float(), token_by_token(experts, x, weights, chosen, before=False))
        < 0.03
    )
    assert out.dtype == experts.w13.grad.dtype == torch.bfloat16


def test_experts_of_gpt_oss_equal_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = transformers.GptOssConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS
    )
    config._experts_implementation = "eager"
    reference = filled(GptOssExperts(config), std=1.0)
    sizes = {
        "n_experts": EXPERTS,
        "top_k": K,
        "dim": DIM,
        "hidden_dim": HIDDEN,
        "init_std": 1.0,
        "out_init_std": 1.0,
    }
    experts = ClampedExperts(**sizes)
    with torch.no_grad():
        experts.w13.copy_(reference.gate_up_proj.mT.unflatten(1, (-1, 2)).transpose(1, 2))
        experts.w2.copy_(reference.down_proj.mT)
        experts.bias13.copy_(reference.gate_up_proj_bias.unflatten(1, (-1, 2)).mT)
        experts.bias2.copy_(reference.down_proj_bias)
    x, weights, chosen = choices()
    with torch.no_grad():
        expected = reference.double()(x.double(), chosen, weights.double())
    assert relative_error(experts(x, weights, chosen), expected) < TOLERANCE


# --- routers
# --------------------------------------------------------------------------------------------------


def router(*, bias: bool = False, **options: Any) -> Any:
    config = RoutingConfig(**{"n_experts": EXPERTS, "top_k": K, "norm_topk_prob": False, **options})
    return filled(Router(config, dim=DIM, bias=bias, init_std=1.0))


def best_in_groups(
    scores: list[float], groups: int, chosen_groups: int, members: int, k: int
) -> set[int]:
    """Choose by the definition, in plain Python."""
    size = len(scores) // groups
    values = {g: sum(sorted(scores[g * size : (g + 1) * size])[-members:]) for g in range(groups)}
    best = sorted(values, key=lambda g: values[g])[-chosen_groups:]
    allowed = [e for e in range(len(scores)) if e // size in best]
    return set(sorted(allowed, key=lambda e: scores[e])[-k:])


@pytest.mark.parametrize(
    ("groups", "chosen_groups", "members", "k"), [(4, 2, 2, 3), (2, 1, 1, 4), (4, 4, 2, 5)]
)
def test_choice_in_groups_equals_its_definition(
    groups: int, chosen_groups: int, members: int, k: int
) -> None:
    # a bias makes some negative
    scores = torch.rand(50, 12, generator=torch.Generator().manual_seed(0)) - 0.5
    options: Any = {"n_group": groups, "topk_group": chosen_groups, "selection_bias": members == 2}
    chosen = RoutingConfig(n_experts=12, top_k=k, **options).choose(scores)
    expected = [best_in_groups(row, groups, chosen_groups, members, k) for row in scores.tolist()]
    assert [set(row) for row in chosen.tolist()] == expected


def test_weights_before_and_after_the_choice() -> None:
    """A softmax over the chosen logits equals normalized probabilities; plain probabilities add up
    to less than 1."""
    x = torch.randn(2, 20, DIM, generator=torch.Generator().manual_seed(0))
    normalized, chosen = router(norm_topk_prob=True)(x)
    logits = F.linear(x, router().weight)
    torch.testing.assert_close(normalized, logits.gather(-1, chosen).softmax(dim=-1))
    plain, _ = router()(x)
    scaled, _ = router(norm_topk_prob=True, routed_scaling_factor=2.5)(x)
    torch.testing.assert_close(scaled, 2.5 * plain / plain.sum(dim=-1, keepdim=True))
    assert (plain.sum(dim=-1) < 0.999).any()


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    x = torch.randn(1, 30, DIM, generator=torch.Generator().manual_seed(0))
    biased = router(scoring_func="sigmoid", selection_bias=True, bias_rate=0.1)
    before, _ = biased(x)
    biased.selection.bias_E[3] = 10.0
    weights, chosen = biased(x)
    assert (chosen == 3).any(dim=-1).all()
    scores = torch.sigmoid(F.linear(x, biased.weight))
    torch.testing.assert_close(weights, scores.gather(-1, chosen))
    assert not torch.equal(before, weights)


# --- balance
# --------------------------------------------------------------------------------------------------

WEIGHTS = {"batch_loss": 0.3, "sequence_loss": 0.7, "z_loss": 0.2}
N_BATCHES = 3


def micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 10, DIM, generator=generator) for _ in range(N_BATCHES)]


def published_losses(weight_ED: Tensor, scoring_func: str) -> dict[str, Tensor]:
    """Return each loss of the global batch by its formula, in float64."""
    x_BLD = torch.cat(micro_batches()).double()
    logits = x_BLD @ weight_ED.T
    scores = torch.sigmoid(logits) if scoring_func == "sigmoid" else logits.softmax(dim=-1)
    probabilities = scores / scores.sum(dim=-1, keepdim=True)
    chosen = F.one_hot(scores.topk(K).indices, EXPERTS).sum(dim=2).double()  # (B, L, E)
    batch = EXPERTS * (chosen.mean(dim=(0, 1)) / K * probabilities.mean(dim=(0, 1))).sum()
    rows = EXPERTS * (chosen.mean(dim=1) / K * probabilities.mean(dim=1)).sum(dim=-1)
    return {
        "batch_loss": batch,
        "sequence_loss": rows.mean(),
        "z_loss": torch.logsumexp(logits, -1).square().mean(),
    }


class Holder(nn.Module):
    """A layer with experts, as its decoder names it."""

    def __init__(self, routed: nn.Module):
        super().__init__()
        self.moe = nn.ModuleDict({"router": routed})


def run_step(routed: Any, *, recomputed: bool = False) -> LoadBalancer:
    """Run a step whose own loss is 0, so that only the auxiliary losses have gradients; return the
    balancer."""
    balancer = LoadBalancer([routed])
    step_with(balancer, routed, recomputed=recomputed)
    return balancer


def step_with(balancer: LoadBalancer, routed: Any, *, recomputed: bool = False) -> None:
    """As `run_step`, with a balancer."""
    balancer.start_step(N_BATCHES * 20, 1, torch.device("cpu"))
    if balancer.needs_load:
        with balancer.measuring():
            for batch in micro_batches():
                routed(batch)
    for batch in micro_batches():
        weights, _ = checkpoint(routed, batch, use_reentrant=False) if recomputed else routed(batch)
        (0.0 * weights).sum().backward()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("names", [["batch_loss"], ["sequence_loss"], ["z_loss"], list(WEIGHTS)])
def test_gradients_of_auxiliary_losses_are_those_of_the_global_batch(
    names: list[str], scoring_func: str, recomputed: bool
) -> None:
    """Although micro-batches are computed one after the other, with or without activation
    checkpointing."""
    penalties = PenaltyConfig(**{name: WEIGHTS[name] for name in names})
    routed = router(scoring_func=scoring_func, penalties=penalties)
    run_step(routed, recomputed=recomputed)
    weight = routed.weight.detach().double().requires_grad_()
    losses = published_losses(weight, scoring_func)
    total = sum(WEIGHTS[name] * losses[name] for name in names)
    (expected,) = torch.autograd.grad(total, weight)
    assert relative_error(routed.weight.grad, expected) < TOLERANCE


def test_batch_loss_is_that_of_transformers() -> None:
    """Which counts each of a token's experts as a whole choice."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    routed = router(penalties=PenaltyConfig(batch_loss=1.0))
    run_step(routed)
    weight = routed.weight.detach().double().requires_grad_()
    logits = (torch.cat(micro_batches()).double() @ weight.T).flatten(0, 1)
    (expected,) = torch.autograd.grad(load_balancing_loss_func((logits,), EXPERTS, K), weight)
    assert relative_error(K * routed.weight.grad, expected) < TOLERANCE


def test_mean_of_micro_batches_would_be_another_loss() -> None:
    """The mistake that `measuring` avoids is visible."""
    routed = router(penalties=PenaltyConfig(batch_loss=1.0))
    balancer = LoadBalancer([routed])
    balancer.start_step(N_BATCHES * 20, 1, torch.device("cpu"))
    for batch in micro_batches():
        with balancer.measuring():
            routed(batch)
        (0.0 * routed(batch)[0]).sum().backward()
    weight = routed.weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(published_losses(weight, "softmax")["batch_loss"], weight)
    assert relative_error(routed.weight.grad, expected) > 0.01


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_are_counted_once(recomputed: bool) -> None:
    routed = router(penalties=PenaltyConfig(z_loss=0.1, batch_loss=0.1))
    run_step(routed, recomputed=recomputed)
    with torch.no_grad():  # validation
        routed(micro_batches()[0])
    routed.eval()
    routed(micro_batches()[0])[0].sum().backward()
    chosen = torch.cat([router()(batch)[1].flatten() for batch in micro_batches()])
    assert torch.equal(routed.totals[:-1], chosen.bincount(minlength=EXPERTS))


def test_selection_bias_follows_the_load() -> None:
    """By the rule of arXiv:2408.15664, algorithm 1; not if the router is frozen."""
    routed = router(scoring_func="sigmoid", selection_bias=True, bias_rate=0.25)
    run_step(routed).finish_step()
    counts = routed.totals[:-1].tolist()
    mean = sum(counts) / EXPERTS
    expected = [0.25 * ((mean > count) - (mean < count)) for count in counts]
    assert routed.selection.bias_E.tolist() == expected and any(expected)
    routed.weight.requires_grad_(False)
    balancer = LoadBalancer([routed])
    balancer.finish_step()
    assert routed.selection.bias_E.tolist() == expected


def test_bias_evens_out_the_load() -> None:
    """With fixed scores that always favor some experts."""
    routed = router(scoring_func="sigmoid", selection_bias=True, bias_rate=0.02, bias=True)
    with torch.no_grad():
        routed.bias.copy_(torch.linspace(-1, 1, EXPERTS))
    loads = []
    for _ in range(100):
        run_step(routed).finish_step()
        loads.append((routed.totals[:-1].max() / routed.totals[:-1].double().mean()).item())
    assert loads[0] > 1.3 and max(loads[-10:]) < 1.15


def test_metrics_equal_those_of_independently_counted_tokens() -> None:
    routed = router(scoring_func="sigmoid", selection_bias=True, bias_rate=0.25)
    tokens = torch.cat(micro_batches()).flatten(0, 1)
    scores = torch.sigmoid(tokens.double() @ routed.weight.detach().double().T)
    counts = scores.topk(K).indices.flatten().bincount(minlength=EXPERTS)
    entropies = torch.distributions.Categorical(probs=scores).entropy()
    balancer = LoadBalancer([nn.ModuleDict({"layers": nn.ModuleDict({"7": Holder(routed)})})])
    step_with(balancer, routed)
    balancer.finish_step()
    assert balancer.watch() == {
        "expert_load": pytest.approx((counts.max() / counts.double().mean()).item()),
        "expert_load/layers.7": pytest.approx((counts.max() / counts.double().mean()).item()),
        # Sums of 60 tokens, each rounded to 2⁻²⁰.
        "router_entropy/layers.7": pytest.approx(
            entropies.mean().item() / math.log(EXPERTS), abs=1e-6
        ),
        "selection_bias/layers.7": 0.5,
        "dropped_tokens/layers.7": 0,
    }


def test_metrics_show_tokens_that_no_layer_counted() -> None:
    routed = router()
    balancer = LoadBalancer([routed])
    balancer.start_step(N_BATCHES * 20, 1, torch.device("cpu"))
    routed(micro_batches()[0])[0].sum().backward()
    balancer.finish_step()
    assert balancer.watch()["dropped_tokens/"] == (N_BATCHES - 1) * 20 * K


def test_starving_experts_are_named_once(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """After three steps without a break."""
    monkeypatch.setattr(load_balance, "_STARVING_STEPS", 3)
    routed = router(bias=True)
    balancer = LoadBalancer([nn.ModuleDict({"0": Holder(routed)})])
    messages = []
    for favored in (False, False, True, False, False, False, False, False):
        with torch.no_grad():
            routed.bias.zero_()[4] = 100.0 if favored else -100.0
        step_with(balancer, routed)
        balancer.finish_step()
        balancer.watch()
        messages.append([record.getMessage() for record in log.records])
    assert [len(some) for some in messages] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert messages[-1][0].startswith(
        "0 expert 4: less than 1% of the mean load in each of the last 3 steps; increase --"
    )


def test_parts_of_a_router_name_a_starving_expert_once(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """The parts in several stages have one name, and the advice of their class."""
    monkeypatch.setattr(load_balance, "_STARVING_STEPS", 1)
    parts = [nn.ModuleDict({"balance": ClassBalance(4, 1, 0.0)}) for _ in range(2)]
    balancer = LoadBalancer(parts)
    balancer.start_step(3, 1, torch.device("cpu"))
    for part in parts:
        logits = torch.eye(4)[:3]  # no token chooses the last expert
        hidden = torch.zeros(3, 2, requires_grad=True)
        part["balance"](hidden, (logits,), torch.ones(3, dtype=torch.bool)).sum().backward()
    balancer.finish_step()
    assert balancer.watch()["dropped_tokens/balance"] == 0
    [message] = [record.getMessage() for record in log.records]
    assert message.startswith("balance expert 3 of a layer: less than")
    assert "router_aux_loss_coef" in message


# --- bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MoEConfig(n_experts=4, top_k=5),
            "top_k is 5, but must be from 1 to --model.moe.n_experts 4",
        ),
        (MoEConfig(n_experts=0, top_k=1), "n_experts is 0"),
        (MoEConfig(n_experts=4, top_k=1, ffn_dim=0), "ffn_dim is 0"),
        (
            MoEConfig(n_experts=4, top_k=1, layer_types=[]),
            "layer_types is \\[\\], but must be at least one type",
        ),
        (
            MoEConfig(n_experts=4, top_k=1, penalties=PenaltyConfig(z_loss=-1.0)),
            "penalties.z_loss is -1.0",
        ),
        (
            MoEConfig(n_experts=4, top_k=1, penalties=PenaltyConfig(z_loss=math.nan)),
            "penalties.z_loss is nan",
        ),
        (
            MoEConfig(n_experts=8, top_k=2, n_group=3),
            "n_group is 3, but must be a divisor of --model.moe.n_experts 8",
        ),
        (
            MoEConfig(n_experts=8, top_k=2, n_group=2, topk_group=3),
            "topk_group 3 of them must have",
        ),
        (
            MoEConfig(n_experts=8, top_k=3, n_group=4),
            "topk_group 1 of them must have --model.moe.top_k 3",
        ),
        (MoEConfig(n_experts=8, top_k=2, selection_bias=True, bias_rate=-0.1), "bias_rate is -0.1"),
        (
            MoEConfig(n_experts=8, top_k=2, bias_rate=0.1),
            "bias_rate is 0.1, but must be 0 without the bias",
        ),
        (MoEConfig(n_experts=8, top_k=2, n_shared_experts=-1), "n_shared_experts is -1"),
    ],
)
def test_impossible_experts_are_rejected(config: MoEConfig, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config.validate()
    assert "\n" not in str(caught.value)


def test_a_router_has_losses_if_any_has_a_weight() -> None:
    plain = LoadBalancer([router()])
    assert plain.has_routers and not plain.has_losses and not plain.needs_load
    for name, weight in WEIGHTS.items():
        balancer = LoadBalancer(
            [nn.ModuleList([router(), router(penalties=PenaltyConfig(**{name: weight}))])]
        )
        assert balancer.has_losses and balancer.needs_load == (name == "batch_loss")
    assert swiglu(torch.tensor(0.0), torch.tensor(1.0)) == 0
