"""Reinforcement learning (`--module rl`): losses against float64 and TRL, exact runs, several
processes, tools."""

import asyncio
import dataclasses
import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.conftest import PROJECT
from tests.experiments.calculator import calculate
from tests.processes import run_processes
from tests.training import flags, killed_in, llama_config, read_metrics, run
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.generation import Engine, Generation, Sampling, next_tokens
from torchtitan.components.generation.sampling import draw
from torchtitan.components.losses import policy_loss as losses
from torchtitan.components.losses.importance import importance_weights
from torchtitan.components.losses.policy_loss import generalized_advantages
from torchtitan.components.observe import metric_sinks
from torchtitan.components.optim.spikes import SpikeGuard
from torchtitan.components.rollout import reward_trial
from torchtitan.components.rollout.batches import to_batches
from torchtitan.components.rollout.reward_trial import try_rewards
from torchtitan.components.rollout.rewards import Rewards, number_match
from torchtitan.components.rollout.rollout import RolloutEngine, Trajectory
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import initialize_weights
from torchtitan.experiments.ppo.config_registry import ppo_debugmodel
from torchtitan.experiments.rl.advantages import estimate_advantages
from torchtitan.experiments.rl.config_registry import rl_debugmodel
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.models.qwen3_moe import FLAVORS
from torchtitan.models.qwen3_moe import model_spec as moe_spec
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.trainer import Trainer
from torchtitan.trainer.rollouts import Completions

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2048}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif "
    "%}{% endfor %}"
)
OPTIONS = {
    "training.steps": 4,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "activation_checkpoint.mode": "none",
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "rollout.max_rows": 5,
    "rewards": ["length=20"],
    "checkpoint.interval": 2,
}
NUMBERS = ("loss", "grad_norm", "reward", "length", "entropy", "clip_fraction", "reward_p50")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a random model saved by transformers, prompts and reward functions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("rl")
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
        shutil.copy(file, folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"prompt": f"Tell me about {i} " + "very " * (i % 4) + "old cats.", "number": i}
        for i in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "rewards.py").write_text(
        # which pass the trial before the run
        "def many(prompt, completion, row):\n    return [1.0] * 3 if row['number'] else 1.0\n"
        "def nan(prompt, completion, row):\n    return float('nan') if row['number'] else 1.0\n"
        "def fails(prompt, completion, row):\n"
        "    if row['number']: raise ValueError('two\\nlines')\n    return 1.0\n"
        "async def nothing(row, engine):\n    return None\n"
        "def sees(prompt, completion, row):\n    assert str(row['number']) in prompt\n    return "
        "len(completion)\n"
    )
    return folder


def train_rl(folder: Path, dump: Path, **options: object) -> RLTrainer:
    module, config = ("ppo", "ppo") if options.get("policy__method") == "ppo" else ("rl", "grpo")
    config += "_lora" if options.pop("lora", False) else ""
    config += "_curriculum" if options.pop("curriculum", False) else ""
    changed = {key.replace("__", "."): value for key, value in options.items()}
    common = {
        "hf_assets_path": folder / "model",
        "dataloader.dataset": [folder / "prompts.jsonl"],
        "dump_folder": dump,
    }
    common["dataloader.cache_dir"] = folder / "cache"
    words = flags({**common, **OPTIONS, **changed})
    parsed = ConfigManager().parse_args(["--module", module, "--config", config, *words]).config
    parsed.check(
        world_size=1
        if not torch.distributed.is_initialized()
        else torch.distributed.get_world_size()
    )
    trainer = run(parsed)
    assert isinstance(trainer, RLTrainer)
    return trainer


# Losses.


def random_tokens(n: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(
        torch.randn(4, n, generator=generator) * 0.3 - torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    )


def test_losses_equal_float64():
    """Loops over tokens in Python's numbers; float32 rounds to 1e-7."""
    log_probs, old, reference, advantages = random_tokens()
    rows = [x.double().tolist() for x in (log_probs, old, reference, advantages)]
    found, is_clipped = losses.clipped_losses(log_probs - old, advantages, 0.1, 0.2)
    for n, (p, q, r, a) in enumerate(zip(*rows, strict=True)):
        ratio = math.exp(p - q)
        clipped = min(max(ratio, 0.9), 1.2)
        assert found[n].item() == pytest.approx(-min(ratio * a, clipped * a), rel=1e-5)
        assert is_clipped[n].item() == (clipped * a < ratio * a)
        d = r - p
        for kind, expected in (("k1", -d), ("k2", d * d / 2), ("k3", math.exp(d) - d - 1)):
            assert losses.kl_estimates(log_probs, reference, kind)[n].item() == pytest.approx(
                expected, rel=1e-4, abs=1e-6
            )
        weights, cut = importance_weights(log_probs, old, torch.arange(12), most=1.1)
        assert weights[n].item() == pytest.approx(min(ratio, 1.1), rel=1e-5)
        assert cut[n].item() == (ratio > 1.1)
    assert is_clipped.any() and not is_clipped.all()
    samples = [2, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    tokens = {
        "old_logprobs": old,
        "logprobs": old,
        "advantages": advantages,
        "samples": torch.tensor(samples),
    }
    loss, weight, _ = losses.PolicyLoss.Config(method="gspo").build(max_new_tokens=12)(
        log_probs, tokens
    )
    expected = 0.0
    for number in range(3):
        own = [n for n in range(12) if samples[n] == number]
        ratio = math.exp(sum(rows[0][n] - rows[1][n] for n in own) / len(own))
        clipped = min(max(ratio, 1 - 3e-4), 1 + 4e-4)
        expected -= sum(min(ratio * rows[3][n], clipped * rows[3][n]) for n in own) / len(own)
    assert (loss.item(), weight) == (pytest.approx(expected, rel=1e-5), 3)


def test_advantages_equal_their_definitions():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.25], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    for kind in ("normalized", "centered", "leave_one_out"):
        found = losses.group_advantages(rewards, kind)
        for row, result in zip(rewards.tolist(), found.tolist(), strict=True):
            mean = sum(row) / 4
            std = math.sqrt(sum((x - mean) ** 2 for x in row) / 3)
            expected = {
                "normalized": [(x - mean) / (std + 1e-4) for x in row],
                "centered": [x - mean for x in row],
                "leave_one_out": [x - (sum(row) - x) / 3 for x in row],
            }[kind]
            assert result == pytest.approx(expected, abs=1e-12)


def test_generalized_advantages_equal_their_definition():
    """The sum of later surprises, each times a power of λ; and the clipped loss of values."""
    generator = torch.Generator().manual_seed(1)
    samples = torch.tensor([4, 4, 4, 4, 0, 7, 7, 7])
    values = torch.randn(8, generator=generator, dtype=torch.float64)
    rewards = torch.randn(8, generator=generator, dtype=torch.float64)[samples]
    found = generalized_advantages(rewards, values, samples, 0.9)
    for n, number in enumerate(samples.tolist()):
        own = [m for m in range(n, 8) if samples[m] == number]
        expected = 0.0
        for m in own:
            after = rewards[m] if m == own[-1] else values[m + 1]
            expected += 0.9 ** (m - n) * (after - values[m]).item()
        assert found[n].item() == pytest.approx(expected, abs=1e-12)
    old = values + 0.5
    for v, o, r, loss in zip(
        values, old, rewards, losses.clipped_value_losses(values, old, rewards, 0.2), strict=True
    ):
        near = max(o - 0.2, min(v, o + 0.2))
        assert loss == pytest.approx(max((v - r) ** 2, (near - r) ** 2).item() / 2)


def test_normalized_advantages_have_mean_0_over_all_batches():
    labels = torch.tensor([[-100, 5, 6, 7], [-100, -100, 8, 9]])
    samples = torch.tensor([[0, 0, 0, 1], [2, 2, 2, 2]])
    rewards = torch.tensor([[1.0, 1.0, 1.0, 2.0], [4.0, 4.0, 4.0, 4.0]])
    batches = [
        {
            "labels": labels[i : i + 1],
            "samples": samples[i : i + 1],
            "advantages": rewards[i : i + 1],
        }
        for i in (0, 1)
    ]
    for batch in batches:
        batch["old_values"] = torch.full((1, 4), 0.5)
    estimate_advantages(batches, 1.0)
    advantages = torch.cat([batch["advantages"][batch["labels"] != -100] for batch in batches])
    expected = torch.tensor([0.5, 0.5, 1.5, 3.5, 3.5])  # with λ = 1, reward minus value
    assert advantages == pytest.approx(
        ((expected - expected.mean()) / expected.std(correction=0)).tolist(), abs=1e-5
    )
    returns = torch.cat([batch["returns"][batch["labels"] != -100] for batch in batches])
    assert returns.tolist() == pytest.approx([1, 1, 2, 4, 4])


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_loss_equals_trl(folder, tmp_path, loss_type):
    """On one batch of random completions, where all ratios are 1 and gradients differ. Both round
    to float32."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    captured: list[tuple[list[dict], list, float, dict]] = []

    class Capturing(RLTrainer):
        def update(self, micro_batches):
            trajectories = self.seen
            result = super().update(micro_batches)
            captured.append((trajectories, result.loss, result.grad_norm))
            return result

        def sample_groups(self, batches):
            groups = super().sample_groups(batches)
            self.seen = [trajectory for group in groups for trajectory in group]
            return groups

    words = {"hf_assets_path": folder / "model", "dataloader.dataset": [folder / "prompts.jsonl"]}
    words |= {
        "dump_folder": tmp_path,
        "dataloader.cache_dir": folder / "cache",
        **OPTIONS,
        "training.steps": 1,
    }
    words |= {"policy.method": loss_type, "policy.beta": 0.0}
    config = (
        ConfigManager().parse_args(["--module", "rl", "--config", "grpo", *flags(words)]).config
    )
    run(config, Capturing)
    ((trajectories, loss, grad_norm),) = captured
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        loss_type=loss_type,
        max_completion_length=8,
        num_generations=4,
        per_device_train_batch_size=4,
        epsilon_high=0.28 if loss_type == "dapo" else 0.2,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    starts = [t.loss_mask.index(True) for t in trajectories]
    widths = (
        max(starts),
        max(len(t.tokens) - start for t, start in zip(trajectories, starts, strict=True)),
    )
    batch = {
        name: torch.zeros(len(trajectories), widths[name[0] == "c"], dtype=torch.long)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    }
    for row, (t, start) in enumerate(zip(trajectories, starts, strict=True)):
        batch["prompt_ids"][row, widths[0] - start :] = torch.tensor(t.tokens[:start])
        batch["prompt_mask"][row, widths[0] - start :] = 1
        n = len(t.tokens) - start
        batch["completion_ids"][row, :n], batch["completion_mask"][row, :n] = (
            torch.tensor(t.tokens[start:]),
            1,
        )
    rewards = torch.tensor([t.reward for t in trajectories]).view(-1, 4)
    kind = losses.METHODS[loss_type].advantage
    batch["advantages"] = losses.group_advantages(rewards, kind).flatten()
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    expected = trainer._compute_loss(model, batch)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert norm > 0.01


# Trajectories.


def test_trajectories_are_packed_without_padding():
    samples = []
    for n, length in enumerate((5, 9, 3, 7)):
        tokens = list(range(10 * n, 10 * n + length))
        samples.append(
            (
                Trajectory(
                    tokens, [-0.5 * t for t in tokens], [False] * 2 + [True] * (length - 2), 1.0
                ),
                n - 1.5,
            )
        )
    batches = to_batches(samples, 10, 1, Ranks())
    assert len(batches) == 2  # 8 + 2 and 6 + 4 positions
    windows = []
    for batch in batches:
        positions_BL = batch.pop("attention").positions_BL
        window = {
            name: value[0].numpy() for name, value in {**batch, "positions": positions_BL}.items()
        }
        windows.append(window)
        for place in (window["labels"] != -100).nonzero()[0]:
            number = window["samples"][place]
            trajectory, advantage = samples[number]
            index = trajectory.tokens.index(window["labels"][place])
            assert window["input"][place] == trajectory.tokens[index - 1]
            assert window["positions"][place] == index - 1
            assert window["logprobs"][place] == trajectory.logprobs[index]
            assert window["advantages"][place] == advantage
    assert sum(int((window["labels"] != -100).sum()) for window in windows) == 24 - 8


class FixedEngine:
    """Returns prepared continuations."""

    context = 100

    def __init__(self, tokenizer, texts):
        self.turns, self.tokenizer, self.asked = texts, tokenizer, []

    async def generate(self, tokens, *, max_new_tokens, key):
        self.asked.append(list(tokens))
        ids = self.turns.pop(0)
        return Generation(ids, [-1.0] * len(ids))


def finish(coroutine):
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


def test_a_calculator_is_used_and_sampled_ids_stay(tokenizer):
    """The model writes its call in single characters, which encoding the text would merge."""
    from tests.experiments.calculator import rollout

    call = [
        token
        for character in "It is <calc>6*7</calc>"
        for token in tokenizer.encode(character, add_bos=False)
    ]
    assert call != tokenizer.encode("It is <calc>6*7</calc>", add_bos=False)
    answer = tokenizer.encode("So 42.", add_bos=False)
    prompt = tokenizer.encode("What is 6 times 7?")
    fixed = FixedEngine(tokenizer, [call, answer])
    engine = RolloutEngine(fixed, tokenizer, Rewards(["number"], []), prompt, 40, key="0")
    trajectory = finish(rollout({"answer": "42"}, engine))
    result = tokenizer.encode(" = 42\n", add_bos=False, add_eos=False)
    assert trajectory.tokens == prompt + call + result + answer
    assert fixed.asked == [prompt, prompt + call + result]
    assert trajectory.loss_mask == [False] * len(prompt) + [True] * len(call) + [False] * len(
        result
    ) + [True] * len(answer)
    assert trajectory.reward == 1
    trajectory.check(1000)
    assert [calculate(text) for text in ("1+2*3", "(1+2)/4", "1/0", "a", "2**9")] == [
        "7",
        "0.75",
        "error",
        "error",
        "error",
    ]


def test_built_in_rewards():
    assert number_match("", "first 3, then 1,042", {"answer": "3 + 1,039\n#### 1042"}) == 1
    assert (
        number_match("", "41", {"answer": "42"}) == number_match("", "none", {"answer": "42"}) == 0
    )
    rewards = Rewards([r"pattern=\bcat\b", "length=10"], [2.0, 1.0])
    assert rewards.rated_now("", "a cat here", {}).value == 3
    assert rewards.rated_now("", "concatenat" * 2, {}).value == 0
    with pytest.raises(
        UserError,
        match=r"^the reward function number failed: UserError: it has no reference answer \(column "
        r"answer",
    ):
        Rewards(["number"], []).rated_now("", "41", {"question": "?"})
    with pytest.raises(
        UserError, match=r"--rewards: reward_model is unknown; use .* reward_model=DIR"
    ):
        Rewards(["reward_model"], [], print)


# Runs.


@pytest.mark.parametrize("method", ["grpo", "gspo", "ppo"])
def test_the_reward_rises(folder, tmp_path, method):
    clip = {"policy__clip_low": 0.2, "policy__clip_high": 0.2}
    train_rl(folder, tmp_path, training__steps=8, policy__method=method, policy__updates=2, **clip)
    rewards = [row[1] for row in read_metrics(tmp_path, "reward")]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1
    # in the second update
    assert max(row[1] for row in read_metrics(tmp_path, "clip_fraction")) > 0
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == set(range(1, 9)) and len(lines[0]["tokens"]) > 8


@pytest.mark.parametrize("debugmodel", [rl_debugmodel, ppo_debugmodel])
def test_the_small_configurations_run_with_experts(tmp_path, debugmodel):
    """The load of experts is of the sampled tokens, which the loader's batches do not have."""
    config = debugmodel()
    config.model_spec = moe_spec(
        dataclasses.replace(FLAVORS["debugmodel"], vocab_size=None, n_layers=1), "debugmodel"
    )
    config.training, config.dump_folder = (
        dataclasses.replace(config.training, steps=1),
        str(tmp_path),
    )
    config.metrics = dataclasses.replace(config.metrics, log_freq=1, enable_tensorboard=False)
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=False)
    run(config)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert 0.9 < line["router_entropy/layers.0"] <= 1  # a router at random
    assert "dropped_tokens/layers.0" not in line
    assert 0 < line["reward"] < 1 and line["grad_norm"] > 0  # random answers are rated differently


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_spike_in_a_further_update_ends_its_step(folder, tmp_path, caplog, method):
    """The first update counts: the step is taken, and equals one with a single update."""
    options = {"training__steps": 1, "spikes__max_in_a_row": 1, "policy__method": method}
    with mock.patch.object(SpikeGuard, "spike", side_effect=["", "a spike"]):
        trainer = train_rl(folder, tmp_path / "run", **options, policy__updates=3)
    assert "step 1: a further update has loss" in caplog.text
    single = train_rl(folder, tmp_path / "single", **options)
    first, second = (one.states()["model"].state_dict() for one in (trainer, single))
    assert all(torch.equal(first[name], second[name]) for name in second)
    measured = [read_metrics(tmp_path / name, *NUMBERS) for name in ("run", "single")]
    assert measured[0] == measured[1] and trainer.spikes.n_skipped == trainer.spikes.in_a_row == 0
    with (
        mock.patch.object(SpikeGuard, "spike", side_effect=["a spike"]),
        pytest.raises(RunFailure, match="1 steps in"),
    ):
        train_rl(folder, tmp_path / "skipped", **options, policy__updates=3)


def test_an_overflow_in_a_further_update_ends_its_step(folder, tmp_path, caplog):
    """The step is taken, and the next one has a smaller loss scale."""
    clip = RLTrainer.clip_gradients

    def overflow(trainer: RLTrainer) -> torch.Tensor:
        return clip(trainer) * (1 if trainer.is_first_update else math.inf)

    options = {"training__steps": 1, "training__mixed_precision_param": "float16"}
    options |= {"policy__updates": 2, "loss_scale__initial": 16.0}
    with mock.patch.object(RLTrainer, "clip_gradients", overflow):
        trainer = train_rl(folder, tmp_path, **options)
    assert "step 1: a further update has loss" in caplog.text and trainer.step == 1
    assert trainer.spikes.n_skipped == trainer.spikes.in_a_row == 0
    assert trainer.loss_scale.value == 8


@pytest.mark.parametrize(("inside", "method"), [(True, "grpo"), (False, "ppo")])
def test_resume_is_exact(folder, tmp_path, inside, method):
    options = {"policy__beta": 0.1, "policy__updates": 2, "policy__method": method}
    train_rl(folder, tmp_path / "straight", **options)
    kind, where, count = (
        (Trajectory, "check", 16 * 2 + 5) if inside else (RLTrainer, "complete_step", 3)
    )
    with killed_in(kind, where, count):
        train_rl(folder, tmp_path / "stopped", **options)
    with open(tmp_path / "stopped/completions.jsonl", "a") as file:
        file.write('{"step": 1, "reward": 0.')  # killed during a write
    train_rl(folder, tmp_path / "stopped", **options)
    measured = [read_metrics(tmp_path / name, *NUMBERS, "kl") for name in ("stopped", "straight")]
    assert measured[0] == measured[1] and len(measured[0]) == 4
    texts = [
        (tmp_path / name / "completions.jsonl").read_text() for name in ("stopped", "straight")
    ]
    assert texts[0] == texts[1]


def test_completions_are_appended(folder, tmp_path, monkeypatch):
    """A step writes its own lines only, however many there are; a full disk does not end the
    run."""
    drops, sizes = [], []
    drop_lines, complete_step = metric_sinks._drop_lines_after, RLTrainer.complete_step

    def counted(trainer, outcome):
        sizes.append((tmp_path / "completions.jsonl").stat())
        complete_step(trainer, outcome)

    monkeypatch.setattr(
        metric_sinks, "_drop_lines_after", lambda path, *rest: drops.append(path.name)
    )
    monkeypatch.setattr(RLTrainer, "complete_step", counted)
    train_rl(folder, tmp_path)
    assert drops == [] and len({found.st_ino for found in sizes}) == 1
    assert [found.st_size for found in sizes] == sorted({found.st_size for found in sizes}) and len(
        sizes
    ) == 4
    monkeypatch.setattr(
        metric_sinks, "_drop_lines_after", lambda *args: drops.append(args) or drop_lines(*args)
    )
    train_rl(folder, tmp_path, training__steps=6)
    # step 4 is an export only
    assert [step for path, step in drops if path.name == "completions.jsonl"] == [2]
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "completions.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(2 * [1, 2, 3, 4, 5, 6])


def test_completions_that_cannot_be_written_do_not_end_the_run(
    folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(
        Completions, "write", lambda self, lines: self.use(mock.Mock(side_effect=OSError("full")))
    )
    assert train_rl(folder, tmp_path).step == 4
    assert caplog.text.count("completions.jsonl cannot be written: full") == 1


def three_steps(method: str) -> dict[str, object]:
    return {"training__steps": 3, "training__local_batch_size": 4, "policy__method": method}


@pytest.fixture(scope="module")
def in_one_process(folder, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function of a method that trains it once in this process, and returns the folder of
    the run."""

    @functools.cache
    def trained(method: str) -> Path:
        dump = tmp_path_factory.mktemp("one")
        train_rl(folder, dump, **three_steps(method))
        return dump

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data_parallel_shard_degree", "tensor_parallel_degree"])
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_two_processes_write_the_same(folder, in_one_process, tmp_path, layout, method):
    """Rounding may change a token only at a boundary of its distribution, which does not happen
    here."""
    one, options = in_one_process(method), three_steps(method)
    options["training__local_batch_size"] = 2 if layout.startswith("data") else 4
    degrees = {"parallelism__data_parallel_shard_degree": 1, f"parallelism__{layout}": 2}
    run_processes(train_on_ranks, 2, folder, tmp_path / "two", {**options, **degrees})
    lines = [
        (dump / "completions.jsonl").read_text().splitlines() for dump in (one, tmp_path / "two")
    ]
    assert [json.loads(line)["tokens"] for line in lines[0]] == [
        json.loads(line)["tokens"] for line in lines[1]
    ]
    for row, expected in zip(
        *(read_metrics(dump, *NUMBERS) for dump in (tmp_path / "two", one)), strict=True
    ):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "own"),
    [
        (
            "data_parallel_shard_degree",
            {"policy__entropy_weight": 0.1, "policy__advantage": "batch_scaled"},
        ),
        (
            "tensor_parallel_degree",
            {"policy__minibatches": 2, "policy__beta": 0.1, "policy__kl_in_reward": True},
        ),
    ],
)
def test_options_of_the_policy_on_two_processes_match_one(folder, tmp_path, layout, own):
    """Deviations and divergences are over all ranks; tolerances as above."""
    options = {"training__steps": 3, "training__local_batch_size": 4, **own}
    if "policy__minibatches" in own:
        options["policy__method"] = "reinforce_pp"
    train_rl(folder, tmp_path / "one", **options)
    options["training__local_batch_size"] = 2 if layout.startswith("data") else 4
    degrees = {"parallelism__data_parallel_shard_degree": 1, f"parallelism__{layout}": 2}
    run_processes(train_on_ranks, 2, folder, tmp_path / "two", {**options, **degrees})
    for row, expected in zip(
        *(read_metrics(tmp_path / name, *NUMBERS) for name in ("two", "one")), strict=True
    ):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_completions_depend_on_the_layout_only_at_boundaries(folder, tmp_path):
    """Of 1,024 completions in eight steps, 99.9 % are the same on 1, 2 and 4 processes. If one
    differs, the random number is within 1e-5 of a boundary of the cumulative distribution, which
    rounding moves. The learning rate is the recipe's: with a high one, a single difference changes
    the weights, and so all later completions."""
    rows = [
        json.dumps({"prompt": f"Story {n} of the {'very ' * (n % 3)}old cat."}) for n in range(160)
    ]
    (folder / "many.jsonl").write_text("\n".join(rows))
    options = {
        "dataloader__dataset": [folder / "many.jsonl"],
        "training__steps": 8,
        "training__global_batch_size": 16,
    }
    options |= {"rollout__group_size": 8, "rollout__max_rows": 64, "optimizer__lr": 1e-6}
    found = {}
    for processes, degrees in {
        1: {},
        2: {"data_parallel_shard_degree": 2},
        4: {"tensor_parallel_degree": 2},
    }.items():
        layout = {f"parallelism__{name}": degree for name, degree in degrees.items()}
        layout["training__local_batch_size"] = 16 if processes == 1 else 8
        dump = tmp_path / str(processes)
        run_processes(record_draws, processes, folder, dump, {**options, **layout})
        found[processes] = [
            json.loads(path.read_text()) for path in sorted(dump.glob("draws-*.json"))
        ]
    (expected,) = found.pop(1)
    assert len(expected) == 1024
    for processes, of_ranks in found.items():
        draws = {key: row for rank in of_ranks for key, row in rank.items()}
        assert draws.keys() == expected.keys()
        differing = [
            key for key in expected if [t for t, _ in draws[key]] != [t for t, _ in expected[key]]
        ]
        print(f"{processes} processes: {len(differing)} of {len(expected)} completions differ")
        assert len(differing) <= len(expected) / 1000
        for key in differing:
            pairs = zip(draws[key], expected[key], strict=False)
            assert (
                next(distance for (token, _), (other, distance) in pairs if token != other) < 1e-5
            )


def record_draws(folder: Path, dump: Path, options: dict[str, object]) -> None:
    """Write for each completion, by the seed of its generator, its tokens and the distance of each
    random number from the next boundary of the cumulative distribution."""
    draws: dict[int, list[tuple[int, float]]] = {}

    def recorded(logits_BV, sampling, numbers, *weights):
        drawn = [next(own) for own in numbers]
        tokens = draw(logits_BV, sampling, [iter([number]) for number in drawn])
        for logits, own, number, token in zip(
            logits_BV, numbers, drawn, tokens.tolist(), strict=True
        ):
            total = logits.double().softmax(dim=-1).cumsum(dim=-1)
            draws.setdefault(own.seed, []).append((token, (total - number).abs().min().item()))
        return tokens

    with mock.patch.object(next_tokens, "draw", recorded):
        stops = train_rl(folder, dump, **options).stop_ids
    for row in draws.values():  # a finished row may stay in the batch
        del row[next((n for n, (token, _) in enumerate(row, 1) if token in stops), len(row)) :]
        del row[8:]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (dump / f"draws-{rank}.json").write_text(json.dumps(draws))


def train_on_ranks(folder: Path, dump: Path, options: dict[str, object]) -> None:
    train_rl(folder, dump, **options)


@pytest.mark.parametrize(
    "method", ["dr_grpo", "dapo", "rloo", "reinforce_pp", "rejection", "vespo", "ppo"]
)
def test_other_methods_run(folder, tmp_path, method):
    """Until the data ends, after three steps; the recipe of `ppo` gives its critic a learning
    rate."""
    train_rl(
        folder,
        tmp_path,
        training__epochs=1,
        training__steps=9,
        policy__method=method,
        debug__ledger=True,
    )
    assert all(norm > 0 for _, norm in read_metrics(tmp_path, "grad_norm"))
    steps = [
        json.loads(line)["documents"]
        for line in (tmp_path / "ledger.jsonl").read_text().splitlines()
    ]
    assert sorted(name for names in steps for name in names) == sorted(
        {name for names in steps for name in names}
    )
    assert len({name for names in steps for name in names}) == 12


def test_minibatches_update_on_equal_parts(folder, tmp_path, monkeypatch):
    """Each prompt's trajectories are in one update per pass, with the probabilities before the
    first update, so that the second part's ratios differ from 1."""
    seen = []
    loss = losses.PolicyLoss.__call__

    def recorded(self, log_probs, tokens):
        seen.append((tokens["advantages"].tolist(), (log_probs - tokens["old_logprobs"]).tolist()))
        return loss(self, log_probs, tokens)

    monkeypatch.setattr(losses.PolicyLoss, "__call__", recorded)
    options = {"training__steps": 1, "training__seq_len": 256, "policy__updates": 2}
    options |= {"training__local_batch_size": 4, "rollout__group_size": 3}
    train_rl(folder, tmp_path, policy__minibatches=2, **options)
    assert len(seen) == 4  # two parts, twice, each in one window
    assert seen[0][0] == seen[2][0] and seen[1][0] == seen[3][0] != seen[0][0]
    assert max(map(abs, seen[0][1])) < 1e-6
    assert all(max(map(abs, ratios)) > 1e-3 for _, ratios in seen[1:])
    with pytest.raises(UserError, match=r"--policy\.minibatches is 3, but must be a divisor of 4"):
        train_rl(folder, tmp_path / "odd", policy__minibatches=3, **options)


def test_the_divergence_in_the_reward_changes_the_advantages_only(folder, tmp_path, monkeypatch):
    """After an update, later tokens of an answer carry less of the divergence; at the start, the
    reference is the policy, and nothing changes."""
    options = {"policy__method": "reinforce_pp", "training__steps": 2, "policy__beta": 0.5}
    for name, inside in (("loss", False), ("reward", True)):
        train_rl(folder, tmp_path / name, policy__kl_in_reward=inside, **options)
    first, second = (
        [
            read_metrics(tmp_path / name, "loss", "grad_norm", "kl")[step]
            for name in ("loss", "reward")
        ]
        for step in (0, 1)
    )
    assert first[0] == pytest.approx(first[1], abs=1e-6)
    assert second[0][3] > 1e-4
    assert second[0][1] != pytest.approx(second[1][1], rel=1e-3)


def test_the_entropy_bonus_raises_the_entropy(folder, tmp_path):
    """The metric is then the mean entropy of the distributions instead of the sampled -log p."""
    found = []
    for weight in (1e-9, 10.0):
        options = {"policy__entropy_weight": weight, "training__steps": 4, "optimizer__lr": 1e-3}
        train_rl(folder, tmp_path / str(weight), **options)
        found.append([row[1] for row in read_metrics(tmp_path / str(weight), "entropy")])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[1][3] > found[0][3]
    with pytest.raises(
        UserError, match=r"tensor_parallel_degree 2 cannot be combined with --policy"
    ):
        train_rl(
            folder, tmp_path, policy__entropy_weight=0.1, parallelism__tensor_parallel_degree=2
        )


@pytest.mark.parametrize(("target", "is_below"), [(1e-3, False), (50.0, True)])
def test_the_factor_follows_the_entropy(folder, tmp_path, target, is_below):
    """A resumed run continues with the same factors."""
    options = {
        "policy__entropy_target": target,
        "policy__entropy_weight": 0.25,
        "policy__entropy_step": 0.125,
        "checkpoint__last_save_in_hf": False,
        "checkpoint__export_dtype": "None",
    }
    train_rl(folder, tmp_path / "whole", training__steps=4, **options)
    rows = read_metrics(tmp_path / "whole", "entropy", "entropy_weight")
    expected = [0.25, 0.375, 0.5, 0.625] if is_below else [0.25, 0.0, 0.0, 0.0]
    assert [row[2] for row in rows] == expected
    assert all((row[1] < target) == is_below for row in rows)
    for steps in (2, 4):
        train_rl(folder, tmp_path / "resumed", training__steps=steps, **options)
    resumed = read_metrics(tmp_path / "resumed", "entropy_weight")
    assert [row[1] for row in resumed] == expected


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_adapters_are_trained_and_saved(folder, tmp_path, method):
    """peft loads the saved adapter over the base model, with the logits of the merged model. The
    reference is the model without adapters."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    options = {"policy__method": method, "policy__beta": 0.1, "training__steps": 2}
    trainer = train_rl(folder, tmp_path, lora=True, **options)
    assert "reference" not in trainer.models
    if method == "ppo":
        assert trainer.models["value"].parts[0].output.weight.abs().max() > 0
    export = tmp_path / "checkpoint/step-2"
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder / "model", export)
    )
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected, plain = merged(ids).logits, base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, export / "adapter")(ids).logits
    torch.testing.assert_close(adapted, expected, rtol=1e-4, atol=1e-5)
    assert (plain - expected).abs().max() > 1e-4


def test_rejection_trains_the_best_answer_of_each_prompt(folder, tmp_path, monkeypatch):
    """Its loss is the mean negative log-likelihood per token of the best answers, in float64."""
    seen = []
    loss = losses.PolicyLoss.__call__

    def recorded(self, log_probs, tokens):
        result = loss(self, log_probs, tokens)
        means = [
            -log_probs[tokens["samples"] == n].double().mean().item()
            for n in tokens["samples"].unique()
        ]
        seen.append((result[0].item(), result[1].item(), means))
        return result

    monkeypatch.setattr(losses.PolicyLoss, "__call__", recorded)
    train_rl(folder, tmp_path, policy__method="rejection", training__steps=1)
    assert sum(weight for _, weight, _ in seen) == 4  # prompts
    assert sum(total for total, _, _ in seen) == pytest.approx(
        sum(itertools.chain(*(means for _, _, means in seen))), rel=1e-5
    )


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all():
    run_processes(fail_on_one_rank, 2)


def fail_on_one_rank() -> None:
    group = torch.distributed.group.WORLD
    model = llama_config(max_seq_len=64).build()
    initialize_weights(model, 0)
    sampler = Engine(model, sampling=Sampling(), group=group)

    async def text():
        await sampler.generate([1], max_new_tokens=2, key="a")
        return 1 // (1 - torch.distributed.get_rank())

    rank = torch.distributed.get_rank()
    with pytest.raises(ZeroDivisionError if rank else UserError, match="division"):
        sampler.run([text(), text()])


def test_equal_rewards_end_a_method_that_resamples(folder, tmp_path):
    with pytest.raises(
        UserError, match="rewards of each prompt's answers were equal in 10 global batches"
    ):
        train_rl(folder, tmp_path, policy__method="dapo", rewards=["pattern=^"])


def test_a_rank_with_enough_groups_trains_no_others_if_another_rank_has_too_few(monkeypatch):
    monkeypatch.setattr(RLTrainer, "ranks", mock.Mock(gather=lambda value: [value, False]))
    trainer = object.__new__(RLTrainer)
    trainer.step, trainer.gradient_accumulation_steps = 0, 1
    trainer.config, trainer.policy, trainer.watchdog = mock.Mock(), mock.Mock(), mock.Mock()
    trainer.config.training.local_batch_size, trainer.policy.method.resample = 2, True
    trainer.config.rollout.max_staleness = 0
    trainer.parallel_dims = mock.Mock(is_batch_leader=True)
    trainer.sample = lambda load, phase: [[Trajectory(reward=0.0), Trajectory(reward=1.0)]]
    assert len(trainer.sample_groups(iter([]))) == 2


def test_equal_rewards_are_a_warning(folder, tmp_path, caplog):
    train_rl(folder, tmp_path, training__steps=1, rewards=["pattern=^"])
    assert "no group has answers with different rewards" in caplog.text


def test_a_prompt_that_occurs_twice_gets_other_answers(folder, tmp_path):
    """One row, four times in a global batch."""
    (folder / "one.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    options = {
        "dataloader__dataset": [folder / "one.jsonl"],
        "training__steps": 1,
        "rollout__group_size": 2,
    }
    trainer = train_rl(folder, tmp_path, **options)
    batches = list(itertools.islice(trainer.dataloader, 2))
    groups = trainer.sample(lambda: batches, "1/0")
    texts = [tuple(trajectory.tokens) for group in groups for trajectory in group]
    assert len(texts) == 8 and len(set(texts)) == 8


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "many",
            r"prompts\.jsonl:\d+: the reward function .*:many returned \[1\.0, 1\.0, 1\.0\], but "
            r"must return one",
        ),
        ("nan", r"prompts\.jsonl:\d+: the reward function .*:nan returned nan"),
        (
            "fails",
            r"prompts\.jsonl:\d+: the reward function .*:fails failed: ValueError: two lines",
        ),
    ],
)
def test_broken_rewards_are_named_after_a_save(folder, tmp_path, function, message):
    """The run continues at the same prompts once the function is mended."""
    good = [f"{folder}/rewards.py:sees"]
    options = {"checkpoint__interval": 100, "training__steps": 2}
    train_rl(folder, tmp_path / "straight", **options, rewards=good)
    train_rl(folder, tmp_path / "run", checkpoint__interval=1, training__steps=2, rewards=good)
    shutil.rmtree(tmp_path / "run/checkpoint/step-2")
    with pytest.raises(UserError, match=message):
        train_rl(folder, tmp_path / "run", **options, rewards=[f"{folder}/rewards.py:{function}"])
    train_rl(folder, tmp_path / "run", **options, rewards=good)
    assert read_metrics(tmp_path / "run", *NUMBERS) == read_metrics(tmp_path / "straight", *NUMBERS)


TRIED = """
import asyncio
calls = []
def score(prompt, completion, row):
    calls.append(completion)
    assert "cats" in prompt and completion == "An answer." and row == {ROW}
    return {"a": 1.0, "b": 0.5}
async def unknown(prompt, completion, row):
    return row["category"]
def batch(prompts, completions, rows):
    return [0.0] * (len(completions) - 1)
def of_groups(prompts, completions, rows):
    assert len(completions) == 4 and len(set(completions)) == 2
    return [None] * 4
def infinite(prompt, completion, row):
    return {"a": 1.0, "b": float("inf")}
async def leaves(prompt, completion, row):
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("unknown", r"failed: KeyError: 'category' \(.*tried\.py, line 9, in unknown\)"),
        ("batch", r"returned \[0\.0, 0\.0, 0\.0\], but must return a list .* each of 4 comp"),
        ("infinite", r"returned \{'a': 1\.0, 'b': inf\}, but must return one finite number"),
        ("leaves", r"failed: SystemExit: 3 \(.*tried\.py, line 18, in leaves\)"),
    ],
)
def test_rewards_are_tried_with_a_row_before_the_model_is_built(
    folder, tmp_path, monkeypatch, function, message
):
    """Good functions before it are no obstacle, and nothing of the run exists."""
    row = {"prompt": "Tell me about 0 old cats.", "number": 0}
    (tmp_path / "tried.py").write_text(TRIED.replace("{ROW}", repr(row)))
    names = [f"{tmp_path}/tried.py:{name}" for name in ("score", "of_groups", function)]
    monkeypatch.setattr(Trainer, "build_models", lambda self: pytest.fail("built"))
    before = (
        r"^[^ ]*prompts\.jsonl:1, tried with the completion 'An answer\.': the reward function "
    )
    with pytest.raises(UserError, match=rf"{before}.*tried\.py:{function} {message}"):
        train_rl(folder, tmp_path / "run", rewards=names)
    assert not list(tmp_path.glob("run/*.jsonl"))


def test_a_trial_changes_nothing_in_a_run(folder, tmp_path, monkeypatch):
    """Not its random numbers, nor the state of a reward's file."""
    state = "import random\ncalls = []\ndef score(prompt, completion, row):\n"
    state += "    calls.append(completion)\n    return random.random() + len(calls)\n"
    (tmp_path / "state.py").write_text(state)
    options = {"rewards": [f"{tmp_path}/state.py:score"], "training__steps": 2}
    train_rl(folder, tmp_path / "tried", **options)
    monkeypatch.setattr(RLTrainer, "try_rewards", lambda self: None)
    train_rl(folder, tmp_path / "untried", **options)
    runs = [read_metrics(tmp_path / name, *NUMBERS) for name in ("tried", "untried")]
    assert runs[0] == runs[1]


def test_a_trial_waits_for_no_judge_forever(tmp_path, monkeypatch, caplog):
    """A function may wait for the calls of other rollouts."""
    monkeypatch.setattr(reward_trial, "SECONDS", 0.05)
    text = "import asyncio\nasync def waits(prompt, completion, row):\n"
    (tmp_path / "judge.py").write_text(f"{text}    await asyncio.Barrier(2).wait()\n")
    try_rewards([f"{tmp_path}/judge.py:waits"], "my.jsonl:1", "?", {})
    assert "no verdict after 0 seconds; the run begins anyway" in caplog.text


@pytest.mark.parametrize(("end", "is_none"), [("return score", False), ("pass", True)])
def test_a_trial_warns_of_a_function_without_return(tmp_path, caplog, end, is_none):
    text = f"def rated(prompt, completion, row):\n    score = len(completion)\n    {end}\n"
    (tmp_path / "forgets.py").write_text(text)
    try_rewards([f"{tmp_path}/forgets.py:rated"], "my.jsonl:1", "?", {}, group_size=2)
    assert (f"{tmp_path}/forgets.py:rated: None for each completion" in caplog.text) is is_none


def test_a_trial_in_a_loop_is_refused(tmp_path):
    """A notebook has one."""
    (tmp_path / "one.py").write_text("def one(prompt, completion, row):\n    return 1.0\n")

    async def start():
        try_rewards([f"{tmp_path}/one.py:one"], "my.jsonl:1", "?", {})

    with pytest.raises(UserError, match="one runs in this thread already"):
        asyncio.run(start())


def test_a_rollout_without_a_trajectory_is_named(folder, tmp_path):
    with pytest.raises(
        UserError,
        match=r"prompts\.jsonl:\d+: the rollout .*:nothing failed: TypeError: it returned None, "
        r"not a",
    ):
        train_rl(folder, tmp_path, rollout__function=f"{folder}/rewards.py:nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout__group_size": 1}, r"--rollout\.group_size is 1"),
        (
            {"rollout__max_new_tokens": 65},
            r"--rollout\.max_new_tokens is 65, but must be at most .* 64",
        ),
        ({"training__seq_len": 8}, r"prompts\.jsonl:\d+: \d+ tokens, 8 fit"),
        ({"policy__gae_decay": 95}, r"--policy\.gae_decay is 95\.0, but must be from 0 to 1"),
        ({"rewards": ["nothing"]}, r"--rewards: nothing is unknown"),
        ({"rewards": ["pattern=("]}, r"not a regular expression"),
        (
            {"lr_scheduler__unit": "tokens"},
            r"--lr_scheduler\.unit is tokens, but must be steps, since rollouts do not know",
        ),
        (
            {"training__batch_schedule": "64t:8"},
            r"--training\.batch_schedule is \['64t:8'\], but must be in steps",
        ),
        (
            {"training__seq_len_schedule": "2:128"},
            r"--training\.seq_len_schedule is \['2:128'\], but must be empty",
        ),
        (
            {"reward_weights": [1, 2]},
            r"--reward_weights is .*, but must be one finite number for each of 1 --rewards",
        ),
        (
            {"reward_weights": [float("nan")]},
            r"--reward_weights is .nan., but must be one finite number",
        ),
        (
            {"parallelism__pipeline_parallel_degree": 2},
            r"--parallelism\.pipeline_parallel_degree 2 cannot be combined",
        ),
        (
            {
                "rollout__function": "tests.experiments.calculator:rollout",
                "parallelism__tensor_parallel_degree": 2,
            },
            r"--parallelism\.tensor_parallel_degree 2 cannot be combined with --rollout\.function, "
            r"since its processes must compute the same texts in the same pass",
        ),
    ],
)
def test_invalid_options_are_rejected(folder, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train_rl(folder, tmp_path, **options)


def test_a_run_without_experts_cannot_replay_them(folder, tmp_path):
    message = r"--policy\.replay_experts: the experts of a Llama3Model are not recorded: it has no"
    with pytest.raises(UserError, match=message):
        train_rl(folder, tmp_path, policy__replay_experts=True)
