"""Reward models (`--module reward`) against transformers and float64, best-of-n, and rewards for
reinforcement."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import linear

from tests.conftest import PROJECT
from tests.experiments.test_preference import pair_of, write_rows
from tests.models.family_cases import CASES, random_reference, relative_error
from tests.pretrained import make_pretrained
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics, run
from torchtitan.cli.convert import convert
from torchtitan.cli.generate import chat, generate
from torchtitan.cli.main import main
from torchtitan.components.rollout.rewards import Rewards
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.reward.rating import RewardModel
from torchtitan.experiments.reward.trainer import RewardTrainer, bradley_terry_loss
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}{{ m.content + eos_token if m.role == 'assistant' else 'Q: ' + "
    "m.content + ' A: ' }}"
    "{% endfor %}"
)
OPTIONS = {
    "training.steps": 3,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 2,
    "training.mixed_precision_param": "float32",
    "training.max_norm": "inf",
    "optimizer.lr": 1e-3,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "activation_checkpoint.mode": "none",
    "dataloader.sampler.shuffle": False,
}
TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 1}
MEASURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
NUMBERS = ("loss", "grad_norm", *MEASURES)
TOLERANCE = {"rel": 1e-5, "abs": 1e-5}
"""Float32 sums in another order change the seventh digit; the rewards here are differences of sums
near 1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a random language model of transformers, pairs with and without margins, and a
    trained model."""
    folder = tmp_path_factory.mktemp("reward")
    make_pretrained(folder / "model", tie_word_embeddings=True, **TOKEN_IDS)
    for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
        shutil.copy(file, folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    write_rows(
        folder / "pairs.jsonl",
        [pair_of(i) | ({"margin": 0.5 * i} if i % 2 else {}) for i in range(7)],
    )
    train_reward(
        folder,
        folder / "run",
        validator__enable=True,
        validator__freq=3,
        validator__dataset=[folder / "pairs.jsonl"],
    )
    return folder


def train_reward(
    folder: Path, dump: Path, name: str = "bradley_terry", **options: object
) -> RewardTrainer:
    changed = {key.replace("__", "."): value for key, value in options.items()}
    common = {
        "hf_assets_path": folder / "model",
        "dataloader.dataset": [folder / "pairs.jsonl"],
        "dump_folder": dump,
    }
    common["dataloader.cache_dir"] = folder / "cache"
    words = flags({**common, **OPTIONS, **changed})
    config = ConfigManager().parse_args(["--module", "reward", "--config", name, *words]).config
    config.check(
        world_size=1
        if not torch.distributed.is_initialized()
        else torch.distributed.get_world_size()
    )
    trainer = run(config)
    assert isinstance(trainer, RewardTrainer)
    return trainer


def trained(folder: Path) -> Path:
    return folder / "run/checkpoint/step-3"


def losses_of_transformers(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Mean loss and measures of all pairs, one text at a time, as a padded batch is only checked
    elsewhere."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained(folder))
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    rewards = torch.stack(
        [torch.stack([reward(model, tokenizer, row, side) for side in SIDES]) for row in rows]
    )
    chosen, rejected = rewards.T
    margins = torch.tensor([row.get("margin", 0.0) for row in rows], dtype=rewards.dtype)
    loss = torch.log1p(torch.exp(-(chosen - rejected - margins))).mean()
    values = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
    return {
        "loss": loss,
        **{name: value.mean() for name, value in zip(MEASURES, values, strict=True)},
    }


SIDES = ("chosen", "rejected")


def reward(model: Any, tokenizer: Any, row: dict[str, Any], side: str) -> torch.Tensor:
    chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
    return model(
        tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    ).logits[0, 0]


def test_loss_equals_a_float64_computation():
    chosen, rejected, margin = (
        torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    )
    expected = torch.log(1 + torch.exp(rejected - chosen + margin))
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, margin), expected)
    single = bradley_terry_loss(chosen.float(), rejected.float(), margin.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-6, atol=1e-6)


def test_measures_after_training_equal_those_of_the_exported_classifier(folder):
    """transformers opens the last checkpoint, renders the pairs itself, and finds the held-out
    numbers of the run."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        trained(folder), dtype=torch.float32
    )
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    config = json.loads((trained(folder) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    (_, *measured) = [line for line in read_validation(folder / "run") if line][-1].values()
    expected = losses_of_transformers(model.double(), folder)
    assert measured == pytest.approx([value.item() for value in expected.values()], **TOLERANCE)
    assert abs(expected["rewards/margins"]) > 0.1  # the last layer is far from its initial 0


def read_validation(dump: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "validation_loss", *(f"validation_{name}" for name in MEASURES))
    return [{name: line[name] for name in names} for line in lines if "validation_loss" in line]


def test_loss_and_gradients_of_a_trained_model_equal_transformers(folder, tmp_path):
    """The exported folder is trained further, with all pairs in the first batch."""
    options = {
        "training__steps": 1,
        "training__local_batch_size": 8,
        "training__global_batch_size": 8,
    }
    options |= {"training__epochs": 1, "dataloader__packing": "none"}
    shutil.copytree(trained(folder), tmp_path / "model")
    shutil.copy(folder / "pairs.jsonl", tmp_path)
    train_reward(tmp_path, tmp_path / "run", **options)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        trained(folder), dtype=torch.float64
    )
    expected = losses_of_transformers(model, folder)
    expected["loss"].backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    ((_, loss, grad_norm, *measures),) = read_metrics(tmp_path / "run", *NUMBERS)
    assert [loss, *measures] == pytest.approx(
        [value.item() for value in expected.values()], **TOLERANCE
    )
    assert grad_norm == pytest.approx(norm.item(), rel=1e-4)  # squares double the relative error


def test_adapters_train_the_head_too(folder, tmp_path, capsys):
    """The merged export is a classifier of transformers with the trainer's rewards."""
    options = {"validator__enable": True, "validator__freq": 3, "optimizer__lr": 1e-2}
    options |= {"validator__dataset": [folder / "pairs.jsonl"]}
    trainer = train_reward(folder, tmp_path, "reward_lora", **options)
    names = [name for name, p in trainer.model_parts[0].named_parameters() if p.requires_grad]
    assert names and all("lora" in name for name in names)
    assert any(name.startswith("head.output") for name in names)
    export = tmp_path / "checkpoint/step-3"
    assert (export / "adapter/adapter_model.safetensors").exists()
    assert main(["push", str(export / "adapter"), "me/reward", "--dry_run"]) == 0
    assert "pipeline_tag: text-classification" in capsys.readouterr().out
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        export, dtype=torch.float32
    )
    assert model.score.weight.abs().max() > 1e-4
    with torch.no_grad():
        expected = losses_of_transformers(model, folder)
    _, *measured = read_validation(tmp_path)[-1].values()
    assert measured == pytest.approx([value.item() for value in expected.values()], **TOLERANCE)


def test_a_new_score_starts_at_zero(folder, tmp_path):
    """Whatever head the language model has; the loss is then log(1 + exp(margin))."""
    make_pretrained(tmp_path / "model", tie_word_embeddings=False, **TOKEN_IDS)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / "model" / file, tmp_path / "model")
    write_rows(tmp_path / "pairs.jsonl", [pair_of(i) | {"margin": 0.25} for i in range(4)])
    train_reward(tmp_path, tmp_path / "run", training__steps=1)
    ((_, loss, norm, *measures),) = read_metrics(tmp_path / "run", *NUMBERS)
    assert loss == pytest.approx(math.log1p(math.exp(0.25)), rel=1e-6)
    assert measures == [0, 0, 0, 0] and norm > 0


@pytest.mark.slow
def test_fsdp_equals_one_process(folder, tmp_path):
    """The tolerance of 1e-4 covers a different order of sums over three steps of Adam."""
    run_processes(train_on_ranks, 2, folder, tmp_path)
    for row, expected in zip(
        read_metrics(tmp_path, *NUMBERS), read_metrics(folder / "run", *NUMBERS), strict=True
    ):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def train_on_ranks(folder: Path, dump: Path) -> None:
    train_reward(folder, dump, training__local_batch_size=1)


@pytest.mark.slow
def test_resume_is_exact(folder, tmp_path):
    with killed_in(RewardTrainer, "train_step", 3):
        train_reward(folder, tmp_path, checkpoint__interval=2)
    train_reward(folder, tmp_path, checkpoint__interval=2)
    assert read_metrics(tmp_path, *NUMBERS) == read_metrics(folder / "run", *NUMBERS)


TYPES = sorted(
    CASES.keys()
    & transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
)
QUICK = ("llama", "qwen3", "gemma2", "olmo2")


@pytest.mark.parametrize(
    "model_type",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES],
)
def test_every_family_reads_and_writes_classifiers_of_transformers(model_type, tmp_path):
    # of logits, not of scores
    capped = {"final_logit_softcapping": 2.0} if model_type == "gemma2" else {}
    config = random_reference(model_type, 0, **capped).config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    reference = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    reference.score.weight.data.normal_()
    reference.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(
        1, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0)
    )
    expected = reference(tokens).logits[:, 0]
    loaded = load_model(tmp_path / "theirs", device="cpu", dtype=torch.float32)
    assert relative_error(loaded.model(tokens, head=linear)[:, -1, 0], expected) < 1e-5
    assert convert([str(tmp_path / "theirs"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert convert([str(tmp_path / "dcp"), str(tmp_path / "ours"), "--to", "hf"]) == 0
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    )
    again.config.pad_token_id = 0
    assert (
        type(again) is type(reference)
        and again.config.architectures == reference.config.architectures
    )
    assert relative_error(again.eval()(tokens).logits[:, 0], expected) < 1e-5


def reward_function(folder: str) -> Callable[[str, str, dict[str, Any]], float]:
    """Return `RewardModel` for single completions."""
    rate_all = RewardModel(folder)
    return lambda prompt, completion, row: rate_all([prompt], [completion], [row])[0]


def test_rewards_of_answers_equal_transformers_with_and_without_padding(folder):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        trained(folder), dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained(folder))
    tokenizer.pad_token_id = model.config.pad_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    rows, rate = [pair_of(i) for i in range(4)], reward_function(str(trained(folder)))
    rated = [rate("ignored", row["chosen"], row) for row in rows]
    assert rated == pytest.approx(
        [reward(model, tokenizer, row, "chosen").item() for row in rows], **TOLERANCE
    )
    chats = [
        [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["chosen"]}]
        for r in rows
    ]
    batch = tokenizer.apply_chat_template(
        chats, return_tensors="pt", return_dict=True, padding=True
    )
    assert rated == pytest.approx(model(**batch).logits[:, 0].tolist(), **TOLERANCE)
    for size in (3, 16):  # answers of several lengths at a time
        rate_all = RewardModel(str(trained(folder)), batch_size=size)
        together = rate_all(["ignored"] * 4, [row["chosen"] for row in rows], rows)
        assert together == pytest.approx(rated, **TOLERANCE)
    assert rate_all([], [], []) == []
    total = Rewards([f"reward_model={trained(folder)}", "pattern=No"], [2.0, 5.0], reward_function)
    rating = total.rated_now("ignored", rows[0]["chosen"], rows[0])
    assert rating.value == pytest.approx(2 * rated[0] + 5)


def test_best_of_n_prints_the_text_with_the_highest_reward(folder, capsys):
    words = [
        "--checkpoint",
        str(folder / "model"),
        "--temperature",
        "1",
        "--max_new_tokens",
        "6",
        "--json",
    ]
    words += ["--prompt", "Is 3 a big number?", "--prompt", "Why?"]
    assert generate([*words, "--best_of", "5", "--reward_model", str(trained(folder))]) == 0
    output = capsys.readouterr()
    best = [json.loads(line) for line in output.out.splitlines()]
    repeated = [
        word for prompt in (words[-3], words[-1]) for _ in range(5) for word in ("--prompt", prompt)
    ]
    assert generate([*words[:-4], *repeated]) == 0  # the same seeds give the same texts
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rate = reward_function(str(trained(folder)))
    for i, found in enumerate(best):
        rewards = {
            s["text"]: rate("", s["text"], {"prompt": s["prompt"]})
            for s in samples[5 * i : 5 * i + 5]
        }
        assert len(rewards) == 5 and found["text"] == max(rewards, key=rewards.__getitem__)
        assert found["reward"] == pytest.approx(max(rewards.values()))
    assert output.err.count("reward: ") == 2


def test_reinforcement_learning_uses_the_reward_model(folder, tmp_path):
    """The rewards in the log belong to the logged answers, as text without special tokens."""
    write_rows(folder / "prompts.jsonl", [{"question": f"Is {i} a big number?"} for i in range(2)])
    words = flags(
        {
            **OPTIONS,
            "hf_assets_path": folder / "model",
            "dump_folder": tmp_path,
            "training.steps": 1,
        }
    )
    words += flags(
        {"dataloader.dataset": [folder / "prompts.jsonl"], "dataloader.cache_dir": folder / "cache"}
    )
    words += flags({"rewards": [f"reward_model={trained(folder)}"], "rollout.max_new_tokens": 5})
    config = ConfigManager().parse_args(["--module", "rl", "--config", "grpo", *words]).config
    with mock.patch("torchtitan.experiments.reward.rating.load_model", side_effect=AssertionError):
        config.check(world_size=1)  # in the launcher, which must not hold the weights
    trainer = run(config)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    rate = reward_function(str(trained(folder)))
    for line in lines:
        prompt = trainer.tokenizer.decode(line["tokens"], skip_special_tokens=True)
        question, _, answer = prompt.removeprefix("Q: ").partition(" A: ")
        assert line["reward"] == pytest.approx(
            rate("", answer, {"question": question}), **TOLERANCE
        )
    assert len({line["reward"] for line in lines}) > 1


def test_margins_of_csv_files_are_numbers(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "chosen", "rejected", "margin"])
        writer.writeheader()
        writer.writerows(rows)
    train_reward(folder, tmp_path, training__steps=1, dataloader__dataset=[tmp_path / "pairs.csv"])
    assert read_metrics(tmp_path, *NUMBERS)[0] == read_metrics(folder / "run", *NUMBERS)[0]


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    for rows, message in (
        (
            [{**pair_of(1), "margin": "large"}],
            r"pairs\.jsonl:1: margin must be a number, not 'large'",
        ),
        ([{**pair_of(1), "margin": math.nan}], r"margin must be a number, not nan"),
        ([{**pair_of(1), "rejected": pair_of(1)["chosen"]}], r"chosen and rejected are equal"),
    ):
        write_rows(pairs, rows)
        with pytest.raises(UserError, match=message) as error:
            train_reward(folder, tmp_path / "run", dataloader__dataset=[pairs])
        assert "\n" not in str(error.value)
    with pytest.raises(
        UserError,
        match=r"--parallelism\.tensor_parallel_degree 2 cannot be combined with --module rew",
    ):
        train_reward(folder, tmp_path / "run", parallelism__tensor_parallel_degree=2)
    with pytest.raises(UserError, match="is no reward model; train one with --module reward"):
        reward_function(str(folder / "model"))
    for file in ("config.json", "model.safetensors"):
        shutil.copy(trained(folder) / file, tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer in .*: found neither tokenizer\.json"):
        reward_function(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_labels": 3}))
    with pytest.raises(UserError, match=r"config\.json: num_labels is 3, but a reward model has 1"):
        reward_function(str(tmp_path))
    common = ["--checkpoint", str(folder / "model"), "--prompt", "Why?"]
    assert generate([*common, "--best_of", "2"]) == 2
    assert generate(["--checkpoint", str(trained(folder)), "--prompt", "Why?"]) == 2
    assert chat(["--checkpoint", str(trained(folder))]) == 2
    first, second, third = capsys.readouterr().err.strip().splitlines()
    assert (
        "--best_of 2 needs a number above 0, --reward_model DIR and a --temperature above 0"
        in first
    )
    assert (
        f"{trained(folder)} is a reward model, which predicts no text" in second
        and second[-40:] == third[-40:]
    )


@pytest.mark.parametrize(
    "option", ["callbacks.evaluation.files", "callbacks.samples.prompts"], ids=str
)
def test_text_of_a_reward_model_is_refused(folder, tmp_path, option):
    (tmp_path / "text.txt").write_text("Once upon a time")
    options = {option.replace(".", "__"): [tmp_path / "text.txt"]}
    name = option.rpartition(".")[0]
    with pytest.raises(
        UserError, match=rf"--{name} needs a model that predicts text, .*accuracies"
    ):
        train_reward(folder, tmp_path / "run", callbacks__samples__max_new_tokens=8, **options)


def test_other_trainers_refuse_a_reward_model(folder, tmp_path):
    words = flags(
        {"hf_assets_path": trained(folder), "dataloader.dataset": [folder / "sft.jsonl"], **OPTIONS}
    )
    write_rows(folder / "sft.jsonl", [{"prompt": "Why?", "response": "So."}])
    config = ConfigManager().parse_args(
        ["--module", "auto", "--config", "sft", *words, f"--dump_folder={tmp_path}"]
    )
    with pytest.raises(
        UserError, match=f"{trained(folder)} holds a reward model; train it with --module reward"
    ):
        config.config.check(world_size=1)
