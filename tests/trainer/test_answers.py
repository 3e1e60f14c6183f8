"""Answers that are sampled and rated during training."""

import asyncio
import itertools
import json
import random
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.processes import run_processes
from tests.training import read_metrics, run, tiny_config
from torchtitan.components.data import PromptDataLoader
from torchtitan.components.data.finetuning.prompts import read_prompts
from torchtitan.components.evaluation.pass_at_k import pass_at_k
from torchtitan.components.rollout.rewards import Rewards, Text
from torchtitan.tools.errors import UserError
from torchtitan.trainer.answers import Answers

REWARDS = """
def even(prompt, completion, row):
    return None if not completion else float(len(completion) % 2 == 0)


def known(prompts, completions, rows):
    return [float(row["answer"] in completion) for completion, row in zip(completions, rows)]


def broken(prompt, completion, row):
    return row["level"]
"""


@pytest.mark.parametrize("n", [1, 3, 7])
def test_estimator_is_the_mean_over_all_choices(n):
    for n_right, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [number < n_right for number in range(n)]
        choices = list(itertools.combinations(right, k))
        assert pass_at_k(n, n_right, k) == pytest.approx(np.mean([any(c) for c in choices]))


def test_estimator_equals_the_product_of_the_paper():
    rng = random.Random(0)
    for _ in range(300):
        n = rng.randint(1, 2000)
        n_right, k = rng.randint(0, n), rng.randint(1, n)
        # Chen et al. 2021, figure 3, in float64
        product = np.prod(1 - k / np.arange(n - n_right + 1, n + 1, dtype=np.float64))
        expected = 1.0 if n - n_right < k else 1 - product
        # The product has up to 2000 roundings.
        assert pass_at_k(n, n_right, k) == pytest.approx(expected, rel=1e-11, abs=1e-12)


def test_rows_have_the_values_that_reward_functions_get_in_training(tmp_path, tokenizer):
    """A date is text in both: the loader of reinforcement learning stores rows as JSON."""
    table = pa.table({"prompt": ["Say a."], "answer": [1], "day": [date(2020, 1, 2)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    [prompt] = read_prompts(str(tmp_path / "rows.parquet"))
    loader = PromptDataLoader.Config(
        dataset=[str(tmp_path / "rows.parquet")],
        chat_template="alpaca",
        cache_dir=str(tmp_path / "cache"),
    ).build(tokenizer=tokenizer, seq_len=99, local_batch_size=1)
    [row] = next(loader)["rows"]
    assert prompt.row == row == {"prompt": "Say a.", "answer": 1, "day": "2020-01-02"}


def test_asynchronous_rewards_wait_at_the_same_time(tmp_path):
    """Each returns only when all three have begun."""
    (tmp_path / "meets.py").write_text(
        "import asyncio\nbarrier = asyncio.Barrier(3)\n"
        "async def meets(prompt, completion, row):\n"
        "    await asyncio.wait_for(barrier.wait(), 20)\n    return len(completion)\n"
    )
    rewards = Rewards([f"{tmp_path}/meets.py:meets"], [])
    texts = [Text("?", "a" * length, {}) for length in (3, 1, 2)]
    assert asyncio.run(rewards.totals(texts)) == [3, 1, 2]


@pytest.fixture
def options(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("a", "dog", "tree")]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "dataset": [tmp_path / "sums.jsonl"],
        "rewards": [f"{tmp_path}/rewards.py:even", f"{tmp_path}/rewards.py:known"],
        "per_prompt": 6,
        "k": [1, 2, 6],
        "freq": 2,
        "max_new_tokens": 8,
        "batch_size": 4,
    }


def config_of(folder: Path, options, **more):
    answers = {f"callbacks__answers__{name}": value for name, value in options.items()}
    return tiny_config(
        folder,
        config="debugmodel_sft",
        dataloader__dataset=[folder.parent / "sums.jsonl"],
        dataloader__columns=["prompt=prompt", "completion=answer"],
        dataloader__chat_template="alpaca",
        training__seq_len=128,
        training__global_batch_size=2,
        training__local_batch_size=1,
        training__mixed_precision_param="float32",
        **answers,
        **more,
    )


def train(folder: Path, options):
    return run(config_of(folder, options))


def train_tensor_parallel(folder: Path, options):
    trainer = run(config_of(folder, options, parallelism__tensor_parallel_degree=2))
    (folder / f"{trainer.rank}.json").write_text(json.dumps(trainer.measured))


def numbers_in(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "evaluation/sums/pass_at_1" in line]


def test_numbers_are_those_of_the_answers(tmp_path, options, monkeypatch):
    """Recorded answers give the reported numbers, and training is unchanged bit for bit."""
    recorded = []
    totals = Rewards.totals

    async def record(self, texts):
        found = await totals(self, texts)
        recorded.extend(zip(texts, found, strict=True))
        return found

    monkeypatch.setattr(Rewards, "totals", record)
    train(tmp_path / "with", options)
    lines = numbers_in(tmp_path / "with")
    assert [line["step"] for line in lines] == [2, 4]
    per_step = [recorded[:18], recorded[18:]]
    for line, answers in zip(lines, per_step, strict=True):
        assert len(answers) == 18
        verdicts = [reward for _, reward in answers if reward is not None]
        for (_, completion, row, _), reward in answers:
            known = float(row["answer"] in completion)
            assert reward == (float(len(completion) % 2 == 0) if completion else 0) + known
        assert line["evaluation/sums/reward"] == pytest.approx(np.mean(verdicts))
        assert line["evaluation/sums/no_verdict"] == 18 - len(verdicts)
        for k in (1, 2, 6):
            expected = []
            for number in range(3):
                rewards = [reward for _, reward in answers[6 * number : 6 * number + 6]]
                right = [reward is not None and reward >= 1 for reward in rewards]
                expected.append(np.mean([any(c) for c in itertools.combinations(right, k)]))
            assert line[f"evaluation/sums/pass_at_{k}"] == pytest.approx(np.mean(expected))
    texts = {text.completion for text, _ in recorded}
    assert len(texts) > 20  # answers to a prompt differ
    train(tmp_path / "without", {})
    for name in ("loss", "grad_norm"):
        assert read_metrics(tmp_path / "with", name) == read_metrics(tmp_path / "without", name)


@pytest.mark.slow
def test_two_ranks_divide_the_answers(tmp_path, options):
    train(tmp_path / "one", options)
    run_processes(train, 2, tmp_path / "two", options)
    for line, expected in zip(
        numbers_in(tmp_path / "two"), numbers_in(tmp_path / "one"), strict=True
    ):
        # Weights differ in the last bits, so a sampled token may too.
        assert line["evaluation/sums/prompts"] == 3
        for name in ("pass_at_1", "reward", "truncated"):
            name = f"evaluation/sums/{name}"
            assert line[name] == pytest.approx(expected[name], abs=0.12)


@pytest.mark.slow
def test_ranks_with_the_same_answers_agree_on_rewards(tmp_path, options):
    """Whatever chooses checkpoints or ends the run must be the same on all ranks."""
    (tmp_path / "drawn.py").write_text(
        "import os\ndef drawn(prompt, completion, row):\n    return float(os.getpid())\n"
    )
    options |= {"rewards": [f"{tmp_path}/drawn.py:drawn"], "freq": 4}
    run_processes(train_tensor_parallel, 2, tmp_path / "run", options)
    first, second = (json.loads((tmp_path / f"run/{rank}.json").read_text()) for rank in (0, 1))
    assert first[1]["evaluation/sums/reward"] > 1
    assert first == second


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"k": [7]}, r"k is .*must be from 1 to .*per_prompt 6"),
        ({"temperature": 0.0}, r"temperature is .* above 0 with per_prompt 6"),
        ({"rewards": []}, r"dataset and .*rewards need each other"),
        ({"rewards": ["reward_model=x"]}, r"reward models rate in --module rl"),
        ({"rewards": ["nombre"]}, r"answers: .*nombre is unknown"),
        ({"dataset": ["missing.jsonl"]}, r"answers.dataset.*missing.jsonl"),
        (
            {"rewards": ["{folder}/rewards.py:broken"]},
            r"rewards: the first prompt of .*sums\.jsonl, tried with the completion 'a': the reward "
            r"function .*:broken failed: KeyError: 'level'",
        ),
        ({"max_new_tokens": 128}, r"max_new_tokens .* below --training.seq_len 128"),
    ],
)
def test_mistakes_are_found_before_the_model_is_built(tmp_path, options, changed, message):
    changed = {name: _in_folder(value, tmp_path) for name, value in changed.items()}
    with pytest.raises(UserError, match=message):
        config_of(tmp_path / "run", options | changed).check(1)


def _in_folder(value, folder):
    if not isinstance(value, list):
        return value
    return [one.replace("{folder}", str(folder)) if isinstance(one, str) else one for one in value]


def test_a_long_prompt_is_refused(tmp_path, options):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "dog " * 300, "answer": "a"}))
    config = config_of(tmp_path / "run", options)
    answers = next(one for one in config.callbacks if isinstance(one, Answers.Config))
    answers.dataset = [str(tmp_path / "long.jsonl")]
    with pytest.raises(UserError, match=r"a prompt of long has \d+ tokens"):
        run(config)


def test_pre_training_needs_a_template_of_the_model(tmp_path, options):
    """Its data has none, and no option for one."""
    answers = {f"callbacks__answers__{name}": value for name, value in options.items()}
    config = tiny_config(tmp_path / "run", training__seq_len=128, **answers)
    message = r"callbacks\.answers needs a chat template.* folder of --hf_assets_path"
    with pytest.raises(UserError, match=message):
        run(config)


def test_its_numbers_choose_checkpoints(tmp_path, options):
    best = {"checkpoint__enable": True, "checkpoint__keep_best": True}
    name = "evaluation/sums/pass_at_2"
    config_of(tmp_path / "a", options, **best, checkpoint__best_metric=name).check(1)
    with pytest.raises(UserError, match=r"evaluates no 'other'"):
        other = "evaluation/other/pass_at_2"
        config_of(tmp_path / "b", options, **best, checkpoint__best_metric=other).check(1)
