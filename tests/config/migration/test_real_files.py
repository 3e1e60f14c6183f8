"""Habits of real files of other libraries, by what they become, and by short runs of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.config.migration.test_migration import config_of, filled, folder, migration_of
from tests.training import run
from torchtitan.config.migration.outcome import Migration
from torchtitan.tools.errors import UserError

__all__ = ["folder"]

AXOLOTL = """\
base_model: {model}
datasets: [{{path: {data}, type: alpaca}}]
sequence_len: 64
micro_batch_size: 2
max_steps: 2
learning_rate: 1e-4
"""
LORA = "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\n"
PRETRAINING = """\
base_model: {model}
pretraining_dataset:
  path: {bodies}
  text_column: body
sequence_len: 32
max_steps: 2
learning_rate: 1e-4
"""
FACTORY = """\
model_name_or_path: {model}
stage: {stage}
finetuning_type: lora
dataset: {dataset}
dataset_dir: {folder}
template: {template}
cutoff_len: 64
max_steps: 2
"""
GRPO = "trl grpo --model_name_or_path m --dataset_name d.jsonl --per_device_train_batch_size 8"
TUNE = """\
model: {{_component_: torchtune.models.llama3_2.llama3_2_1b}}
tokenizer: {{max_seq_len: 64}}
checkpointer: {{checkpoint_dir: {model}}}
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: {data}
  column_map: {{input: instruction, output: output}}
batch_size: 2
max_steps_per_epoch: 2
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-4}}
loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
"""
LITGPT = "litgpt finetune_lora {model} --data JSON --data.json_path {data} --train.max_steps 2"
LITGPT += " --train.max_seq_length 64 --train.global_batch_size 2 --lora_head true"
TITAN = """\
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[training]
seq_len = 32
steps = 9
local_batch_size = 2
[parallelism]
tensor_parallel_degree = 1
"""


@pytest.fixture(scope="module")
def files(folder) -> Path:
    """The folder of models and data, with the files of these samples."""
    (folder / "bodies.jsonl").write_text('{"body": "Once upon a time there was a cat."}\n' * 40)
    answers = [
        {"prompt": f"Add {n} and {n}.", "completion": f"{2 * n}", "label": n % 2 == 0}
        for n in range(8)
    ]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    columns = {"prompt": "prompt", "response": "completion", "kto_tag": "label"}
    listed = {
        "mine": {"file_name": "data.jsonl"},
        "bodies": {"file_name": "bodies.jsonl", "columns": {"prompt": "body"}},
        "answers": {"file_name": "answers.jsonl", "columns": columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(listed))
    (folder / "titan.toml").write_text(TITAN)
    return folder


def of(text: str, files: Path, tmp_path: Path, name: str = "file.yaml", **more: str) -> Migration:
    more = {"bodies": str(files / "bodies.jsonl"), **more}
    return migration_of(name, filled(text, files, **more), tmp_path)


def rows_of(migration: Migration) -> dict[str, Any]:
    return {row.key: row for row in migration.rows}


RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "chatml": (AXOLOTL + "chat_template: chatml\n", {}),
    "chatml_lora": (AXOLOTL + LORA + "chat_template: chatml\n", {}),
    "pretraining": (PRETRAINING, {}),
    "pretraining_lora": (PRETRAINING + LORA, {}),
    "factory_texts": (FACTORY, {"stage": "pt", "dataset": "bodies", "template": "default"}),
    "factory_kto": (FACTORY, {"stage": "kto", "dataset": "answers", "template": "chatml"}),
    "torchtune_columns": (TUNE, {}),
    "litgpt_command": (LITGPT, {}),
    "torchtitan_tokenizer": (
        "CONFIG_FILE={folder}/titan.toml ./run_train.sh --training.steps 2",
        {},
    ),
}
"""Each could not be trained as it was rewritten before."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_file_trains(name, files, tmp_path):
    text, more = RUNS[name]
    is_command = name in ("litgpt_command", "torchtitan_tokenizer")
    migration = of(text, files, tmp_path, "train.sh" if is_command else "file.yaml", **more)
    trainer = run(config_of(migration, tmp_path, "--validator.no_enable"))
    assert trainer.step == 2


def test_chatml_brings_its_tokens(files, tmp_path):
    text = AXOLOTL + LORA + 'chat_template: chatml\ntokens: ["<|tool|>", "<|im_end|>"]\n'
    migration = of(text, files, tmp_path)
    added = ["<|im_start|>", "<|im_end|>", "<|tool|>"]
    assert migration.options["tokenizer.added_tokens"] == added
    assert "adapters leave their embeddings" in rows_of(migration)["chat_template"].note
    assert "tokenizer.added_tokens" not in of(AXOLOTL, files, tmp_path).options


@pytest.mark.parametrize(
    ("kinds", "template"),
    [(("chatml.intel", "chatml.icr"), "chatml"), (("chatml.intel", "llama3.intel"), None)],
)
def test_types_of_pairs_name_a_template(kinds, template, files, tmp_path):
    sets = ", ".join(f"{{{{path: d.jsonl, type: {kind}}}}}" for kind in kinds)
    text = f"base_model: m\nrl: dpo\ndatasets: [{sets}]\n"
    assert of(text, files, tmp_path).options.get("dataloader.chat_template") == template


def test_layers_that_are_trained_whole(files, tmp_path):
    """Tied embeddings, which adapters cannot have, are named."""
    text = AXOLOTL + LORA + "lora_modules_to_save: [embed_tokens, lm_head]\n"
    row = rows_of(of(text, files, tmp_path))["lora_modules_to_save"]
    assert row.outcome == "without a counterpart" and "not tied" in row.note


@pytest.mark.parametrize("listed", ["[{}]", "{}"])
def test_a_type_that_is_written_in_place(listed, files, tmp_path):
    """Its columns are read, and its prompt is listed, also of a dataset that is a mapping."""
    kind = '{{format: "[INST] {{{{instruction}}}}", field_output: reply}}'
    one = listed.format(f"{{{{path: d.jsonl, type: {kind}}}}}")
    migration = of(f"base_model: m\ndatasets: {one}\n", files, tmp_path)
    assert migration.options["dataloader.columns"] == ["output=reply"]
    row = rows_of(migration)["type of d.jsonl"]
    assert (row.value, row.outcome) == ("format", "without a counterpart")


@pytest.mark.parametrize(
    ("rewards", "ours"),
    [
        ("accuracy_reward", ["math"]),
        ("trl.rewards.accuracy_reward", ["math"]),
        ("my.accuracy_reward", None),
        ("accuracy_reward format", None),
    ],
)
def test_rewards_of_trl(rewards, ours, files, tmp_path):
    weights = " ".join("1.0" for _ in rewards.split())
    text = f"{GRPO} --reward_funcs {rewards} --reward_weights {weights}"
    migration = of(text, files, tmp_path, "train.sh")
    assert migration.options.get("rewards") == ours
    assert migration.options.get("reward_weights") == (ours and [1.0])
    rows = rows_of(migration)
    expected = "changed" if ours else "without a counterpart"
    assert rows["reward_funcs"].outcome == expected
    assert ("accuracy_reward is math here" in rows["reward_funcs"].note) is ("format" in rewards)


THOUGHTS = [
    *("<think>a</think>b", "<think>\na\n</think>", "x<think>a</think>b", "<think>a", "a</think>b"),
    *("<think>a<think>b</think>c", "<think>a</think>b\n<think>c</think>", ""),
]


def test_the_reward_of_thoughts_is_that_of_trl(files, tmp_path):
    rewards = pytest.importorskip("trl.rewards")
    from torchtitan.components.rollout.rewards import find_reward

    migration = of(f"{GRPO} --reward_funcs think_format_reward", files, tmp_path, "train.sh")
    (name,) = migration.options["rewards"]
    ours = find_reward(name)
    theirs = rewards.think_format_reward([[{"content": text}] for text in THOUGHTS])
    assert [ours("", text, {}) for text in THOUGHTS] == theirs
    assert {*theirs} == {0.0, 1.0}


def test_numbers_of_layers_are_no_names_of_layers(files, tmp_path):
    text = AXOLOTL + LORA.replace("lora_target_linear: true", "lora_target_modules: [q_proj]")
    migration = of(text + "peft_layers_to_transform: [0, 1]\n", files, tmp_path)
    assert migration.options["model_converters.lora.include"] == ["q_proj"]
    assert rows_of(migration)["peft_layers_to_transform"].outcome == "without a counterpart"


def test_columns_of_labeled_answers_of_llama_factory(files, tmp_path):
    """The second column of a prompt is part of it, and other methods do not read labels."""
    names = {"prompt": "task", "query": "text", "response": "reply", "kto_tag": "good"}
    listed = {"rated": {"file_name": "rated.jsonl", "columns": names}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))
    text = FACTORY.replace("{folder}", str(tmp_path))
    columns = ["input=text", "instruction=task", "label=good", "output=reply"]
    for stage, expected in (("kto", columns), ("sft", [columns[0], columns[1], columns[3]])):
        more = {"stage": stage, "dataset": "rated", "template": "llama3"}
        assert of(text, files, tmp_path, **more).options["dataloader.columns"] == expected


@pytest.mark.parametrize("head", ["--lora_head true", "--lora_head true --lora_dropout 0.1"])
def test_an_adapter_of_the_head_has_no_dropout(head, files, tmp_path):
    migration = of(f"litgpt finetune_lora m {head}", files, tmp_path, "train.sh")
    assert migration.options["model_converters.lora.dropout"] == 0.0
    (row,) = [row for row in migration.rows if row.key.startswith("lora_dropout")]
    assert row.outcome == "without a counterpart"


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("pythia-14m", "EleutherAI"),
        ("Mixtral-8x7B-v0.1", "mistralai"),
        ("MicroLlama-300M", "ORG"),
        ("Llama-3.1-Nemotron-70B-Instruct-HF", "nvidia"),
        ("Llama-3.2-1B", "meta-llama"),
    ],
)
def test_a_name_of_litgpt_gets_its_owner(name, owner, files, tmp_path):
    text = f"litgpt pretrain {name} --data TextFiles --data.train_data_path texts"
    migration = of(text, files, tmp_path, "train.sh")
    assert migration.commands == [f"torchtitan download {owner}/{name}"]
    assert migration.options["dataloader.dataset"] == ["texts"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            FACTORY + "do_predict: true\ndo_train: false\n",
            "do_train is off: the file trains nothing",
        ),
        (FACTORY + "do_predict: true\n", "do_train is off"),
        ("model_name_or_path: m\nexport_dir: out\n", "export_dir: the file exports a model"),
        (AXOLOTL.replace("type: alpaca", "type: input_output"), "segments are not read"),
        ("CONFIG_FILE=none.toml ./run_train.sh --training.steps 3", "none.toml cannot be read"),
    ],
)
def test_a_file_that_trains_nothing_is_refused(text, message, files, tmp_path):
    more = {"stage": "sft", "dataset": "mine", "template": "default"}
    name = "train.sh" if "run_train" in text else "file.yaml"
    with pytest.raises(UserError, match=re.escape(message)):
        of(text, files, tmp_path, name, **more)


def test_a_folder_for_a_later_export_is_no_obstacle(files, tmp_path):
    more = {"stage": "sft", "dataset": "mine", "template": "default"}
    migration = of(FACTORY + "do_train: true\nexport_dir: out\n", files, tmp_path, **more)
    assert migration.config == "lora"
    assert rows_of(migration)["export_dir"].outcome == "without a counterpart"
