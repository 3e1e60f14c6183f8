"""Experts of sampled tokens, repeated in training."""

import copy
import dataclasses
import json
import pkgutil
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.components.generation.test_generation import mixed_model
from tests.conftest import PROJECT
from tests.experiments.test_rl import NUMBERS, TEMPLATE, train_on_ranks, train_rl
from tests.experiments.test_rl_vllm import FakeServer
from tests.processes import run_processes
from torchtitan import models
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.generation import Engine, Generation, Sampling, Session
from torchtitan.components.generation.experts import ExpertSizes, merged_experts
from torchtitan.components.rollout.batches import to_batches
from torchtitan.components.rollout.trajectory import Trajectory
from torchtitan.distributed import initialize_weights
from torchtitan.models.pretrained import load_model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.experts import LinearRouter
from torchtitan.tools.errors import UserError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "vocab_size": 2048,
}
SAMPLING = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder with a random model of two families, each with prompts."""
    root = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    models = {
        "gpt_oss": GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=8, sliding_window=16)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**SIZES)),
    }
    for name, model in models.items():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # weights of experts that are nearly equal, so that each choice matters
                is_router = "router" in key or "mlp.gate." in key
                torch.nn.init.normal_(parameter, std=0.02 if is_router else 0.3)
        model.save_pretrained(root / name / "model")
        for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
            shutil.copy(file, root / name / "model")
        (root / name / "model/chat_template.jinja").write_text(TEMPLATE)
        rows = [{"prompt": f"Tell me about {i} " + "very " * (i % 4) + "cats."} for i in range(12)]
        (root / name / "prompts.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    return root


def experts_of_one_pass(
    model, tokens: list[int], attention: AttentionMetadata | None = None
) -> np.ndarray:
    """Return the choice of a forward pass over the whole text, by hooks of its own."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda _, args, out: chosen.append(out[1][0]))
        for module in model.modules()
        if isinstance(module, LinearRouter)
    ]
    model.eval()
    with torch.no_grad():
        model(torch.tensor([tokens]), attention)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy()


def sets(experts: np.ndarray) -> np.ndarray:
    """Return the experts in order, since their order among the best is rounding."""
    return np.sort(experts, axis=-1)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("max_rows", [2, None])
def test_experts_are_recorded_with_the_keys_of_their_tokens(folders, family, max_rows):
    """Texts of several lengths join and leave the batch, share prompts, and continue kept ones."""
    model = load_model(folders / family / "model", device="cpu").model
    engine = Engine(model, sampling=SAMPLING, max_rows=max_rows, records_experts=True)

    async def converse(number: int) -> list[tuple[list[int], Generation]]:
        tokens, turns = list(range(5, 12 + 3 * (number % 3))), []
        for turn in range(2):
            text = await engine.generate(
                tokens, max_new_tokens=3 + number, key=f"{number}/{turn}", is_continued=True
            )
            turns.append((list(tokens), text))
            tokens += [*text.ids, 7, 8]
        return turns

    turns = [turn for each in engine.run([converse(n) for n in range(5)]) for turn in each]
    for before, text in turns:
        whole = experts_of_one_pass(model, [*before, *text.ids[:-1]])
        assert text.experts is not None and text.experts.dtype == np.int16
        np.testing.assert_array_equal(sets(text.experts), sets(whole))
    assert any(text.n_reused > 0 for _, text in turns)


def test_tokens_get_the_experts_that_are_given(folders):
    """Results equal float64 formulas of the layer, for arbitrary experts; where none is given, the
    router chooses. Weights still have gradients."""
    model = load_model(folders / "mixtral" / "model", device="cpu").model
    layer = model.layers["0"].moe.double()
    x = torch.randn(1, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([[[3, 60], [1, 7], [2, 5], [6, 4], [-1, -1], [0, 1]]])
    scores = (x @ layer.router.weight.T).softmax(dim=-1)
    chosen = given.where(given >= 0, scores.topk(2).indices)
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    gate, up = layer.experts.w13.unbind(1)  # (E, 2, H, D)
    expected = torch.zeros_like(x)
    for place in range(6):
        for k in range(2):
            number, row = int(chosen[0, place, k]), x[0, place]
            hidden = torch.nn.functional.silu(gate[number] @ row) * (up[number] @ row)
            expected[0, place] += weights[0, place, k] * (layer.experts.w2[number] @ hidden)
    attention = AttentionMetadata.of_rows(1, 6)
    experts_BLNK = torch.stack([given, given.flip(-1)], dim=2).short()
    attention = dataclasses.replace(attention, experts_BLNK=experts_BLNK)
    result = layer(x, attention.with_documents(x.device).documents)
    # the router computes in float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    result.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0


def test_a_trajectory_keeps_the_first_experts_of_each_token():
    """The last token of a turn gets its experts in the next one. Changed texts have none."""

    def turn(first: int, n_tokens: int) -> Generation:
        return Generation(experts=np.full((n_tokens, 1, 2), first, np.int16))

    merged = merged_experts(9, [(4, turn(1, 3)), (8, turn(2, 7))])
    assert merged is not None
    assert merged[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, -1, -1]
    assert merged_experts(9, []) is None
    trajectory = Trajectory(list(range(9)), [0.0] * 9, [True] * 9, experts=merged)
    trajectory.cut(5)
    assert trajectory.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2]


def test_experts_are_packed_with_their_tokens():
    samples = []
    for length in (5, 9, 3):
        experts = np.arange(length, dtype=np.int16).repeat(4).reshape(length, 2, 2) + 10 * length
        tokens = list(range(10 * length, 11 * length))
        loss_mask = [False, *[True] * (length - 1)]
        known = None if length == 3 else experts
        samples.append((Trajectory(tokens, [0.0] * length, loss_mask, experts=known), 1.0))
    (batch,) = to_batches(samples, 10, 2, Ranks())
    for inputs, experts in zip(batch["input"], batch["experts"], strict=True):
        tokens = inputs.tolist()
        for place, token in enumerate(tokens):
            is_known = token >= 50
            assert experts[place].unique().tolist() == [token if is_known else -1]
    without = [(dataclasses.replace(t, experts=None), a) for t, a in samples]
    assert "experts" not in to_batches(without, 10, 2, Ranks())[0]


OPTIONS = {
    "rewards": ["length=40"],
    "training__steps": 2,
    "training__seq_len": 96,
    "training__mixed_precision_param": "bfloat16",
    "metrics__log_freq": 1,
    "optimizer__lr": 1e-3,
}


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_sampler_and_the_trainer_agree(folders, tmp_path, family):
    """In bfloat16, rounding lets the trainer choose other experts than the sampler, and so other
    probabilities."""
    found = {}
    for name, replays in (("own", False), ("replayed", True)):
        train_rl(folders / family, tmp_path / name, policy__replay_experts=replays, **OPTIONS)
        found[name] = lines_of(tmp_path / name)
    print(family, [[line["sampler_gap"] for line in lines] for lines in found.values()])
    gaps = {name: sum(line["sampler_gap"] for line in lines) for name, lines in found.items()}
    assert found["replayed"][0]["reward"] == found["own"][0]["reward"]
    assert gaps["replayed"] < 0.6 * gaps["own"]
    assert all(line["experts_replayed"] == 1 for line in found["replayed"])
    assert "experts_replayed" not in found["own"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"parallelism__expert_parallel_degree": 2, "training__local_batch_size": 2},
        {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
    ],
)
def test_two_processes_match_one(folders, tmp_path, degrees):
    """Several packed windows in a step, two updates on each, and checkpointed activations; each
    process has half of the experts, or routes half of the tokens of a pass. In float32, the sampler
    and the trainer differ by rounding only."""
    options = {
        **OPTIONS,
        "policy__replay_experts": True,
        "policy__updates": 2,
        "activation_checkpoint__mode": "full",
        "training__local_batch_size": 4,
        "training__mixed_precision_param": "float32",
    }
    folder = folders / "mixtral"
    train_rl(folder, tmp_path / "one", **options)
    run_processes(train_on_ranks, 2, folder, tmp_path / "two", {**options, **degrees})
    for one, two in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "two"), strict=True):
        assert one["experts_replayed"] == two["experts_replayed"] == 1
        assert max(one["sampler_gap"], two["sampler_gap"]) < 1e-5
        for name in NUMBERS:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5)


def test_tokens_keep_the_experts_of_the_weights_that_drew_the_next_one(folders):
    """A text that waits while the weights change is recomputed by the new ones."""
    model = load_model(folders / "mixtral" / "model", device="cpu").model
    engine = Engine(model, sampling=SAMPLING, records_experts=True)
    prompt = [5, 6, 7]
    with Session(engine) as session:
        short, long = session.start(
            [engine.generate(prompt, max_new_tokens=n, key=str(n)) for n in (3, 8)]
        )
        session.finish([short])
        before = copy.deepcopy(model)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, LinearRouter):
                    module.weight.copy_(module.weight.flip(0))
        engine.version = 1
        [text] = session.finish([long])
    assert text.versions == [0] * 3 + [1] * 5
    tokens, n_old = [*prompt, *text.ids[:-1]], len(prompt) + 2
    old, new = (sets(experts_of_one_pass(each, tokens)) for each in (before, model))
    np.testing.assert_array_equal(sets(text.experts), np.concatenate((old[:n_old], new[n_old:])))
    assert (old[:n_old] != new[:n_old]).any() and (old[n_old:] != new[n_old:]).any()


@pytest.mark.slow
def test_experts_of_older_weights_are_replayed(folders, tmp_path):
    """Each token of texts that were sampled ahead has experts. With a learning rate of almost 0,
    the older weights are the same up to rounding of float32, and so are the probabilities."""
    options = {
        "policy__replay_experts": True,
        "rollout__max_staleness": 1,
        "training__steps": 3,
        "training__mixed_precision_param": "float32",
        "optimizer__lr": 1e-12,
    }
    train_rl(folders / "mixtral", tmp_path, **{**OPTIONS, **options})
    lines = lines_of(tmp_path)
    assert max(line["staleness_max"] for line in lines) == 1
    for line in lines:
        assert line["experts_replayed"] == 1 and line["sampler_gap"] < 1e-5


@pytest.fixture
def server(folders, monkeypatch):
    fake = FakeServer(folders / "mixtral" / "model")
    fake.returns_experts = True
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def options_of(server: FakeServer) -> dict[str, object]:
    options = {"policy__replay_experts": True, "training__mixed_precision_param": "float32"}
    engine = {"rollout__engine": "vllm", "rollout__url": server.url}
    return {**OPTIONS, **options, **engine}


def test_experts_of_a_server_are_replayed(folders, tmp_path, server):
    """The server computes the class of transformers, in float32 as the trainer, so probabilities
    are the same up to rounding with its experts, and others with experts of its neighbors."""
    train_rl(folders / "mixtral", tmp_path / "own", **options_of(server))
    server.change_experts = lambda experts: (experts + 1) % 64
    once = {**options_of(server), "training__steps": 1}
    train_rl(folders / "mixtral", tmp_path / "changed", **once)
    own, changed = (lines_of(tmp_path / name) for name in ("own", "changed"))
    assert all(line["experts_replayed"] == 1 for line in (*own, *changed))
    assert max(line["sampler_gap"] for line in own) < 1e-4
    assert min(line["sampler_gap"] for line in changed) > 1e-2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (None, "does not return the experts .* start it with --enable-return-routed-experts"),
        (lambda experts: experts[:, :2], r"experts of the shape \(1, 2, 2\) for 1 tokens of 3 lay"),
        (lambda experts: experts + 64, r"of 3 layers with 2 of 64 experts; remove --policy\.rep"),
        (lambda experts: experts.astype(object), "the experts of tokens cannot be read"),
    ],
)
def test_other_experts_of_a_server_are_refused(change, problem, folders, tmp_path, server):
    server.returns_experts, server.change_experts = change is not None, change
    with pytest.raises(UserError, match=rf"^--rollout\.url {server.url}: .*{problem}"):
        train_rl(folders / "mixtral", tmp_path, **options_of(server))
    assert not server.requests[1:] and "weights" not in server.calls  # before the first step


def test_layers_without_experts_are_refused_with_a_server(folders):
    model = load_model(folders / "mixtral" / "model", device="cpu").model
    assert ExpertSizes.of(model) == (3, 2, 64)
    config = dataclasses.replace(flavors_of("deepseek_v3")["debugmodel"], vocab_size=8)
    with torch.device("meta"):
        dense_first = config.build()
    with pytest.raises(UserError, match=r"a DeepSeek.* has layers without experts, or with others"):
        ExpertSizes.of(dense_first)


def test_models_without_experts_are_refused():
    with pytest.raises(UserError, match="the experts of a .* are not recorded: it has no routers"):
        Engine(mixed_model(), sampling=SAMPLING, records_experts=True)


def flavors_of(family: str) -> dict:
    return getattr(import_module(f"torchtitan.models.{family}"), "FLAVORS", {})


def families_with_experts() -> list[str]:
    """Return family and flavor of each small model with experts."""
    return [
        f"{name}:{flavor}"
        for _, name, is_package in pkgutil.iter_modules(models.__path__)
        if is_package
        for flavor, config in flavors_of(name).items()
        if flavor.endswith("debugmodel") and hasattr(config, "moe")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", families_with_experts())
def test_all_families_record_and_repeat_their_experts(name):
    """Also those with windows, recurrent layers, layers without experts, and routers of their
    own."""
    family, flavor = name.split(":")
    config = dataclasses.replace(flavors_of(family)[flavor], vocab_size=300, max_seq_len=64)
    model = config.build()
    initialize_weights(model, 0)
    engine = Engine(model, sampling=SAMPLING, max_rows=2, records_experts=True)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    texts = engine.run(
        [engine.generate(prompt, max_new_tokens=4, key=str(prompt)) for prompt in prompts]
    )
    routers = sorted(
        {m.layer for m in model.modules() if isinstance(m, LinearRouter)} - {config.n_layers}
    )
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [*prompt, *text.ids[:-1]]
        whole = experts_of_one_pass(model, tokens)
        np.testing.assert_array_equal(sets(text.experts[:, routers]), sets(whole))
        given = (text.experts + 1) % config.moe.n_experts
        attention = AttentionMetadata.of_rows(1, len(tokens))
        attention = dataclasses.replace(attention, experts_BLNK=torch.tensor(given)[None])
        repeated = experts_of_one_pass(model, tokens, attention)
        np.testing.assert_array_equal(sets(repeated), sets(given[:, routers]))
