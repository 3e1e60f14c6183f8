"""Mistakes of people who come from other libraries: one line with the remedy."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpoint.formats import format_of
from torchtitan.components.data import PretrainDataLoader, SFTDataLoader
from torchtitan.components.evaluation.tasks import check_harness
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import manager
from torchtitan.config.manager import ConfigManager
from torchtitan.config.registry import load_config_function
from torchtitan.models import llama3
from torchtitan.models.pretrained import huggingface_model
from torchtitan.tools.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yo."}]}


def write(file: Path, *rows: object) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.yaml"], "'run.yaml' belongs to no option; use --config_file run.yaml, or"),
        (["8b.toml"], "or for a file of another library torchtitan migrate 8b.toml"),
        (["--config_file", "{folder}/a.toml"], "is TOML; torchtitan migrate {folder}/a.toml --out"),
        (["--module", "{folder}/trainer.py"], "a module is a folder .*; use --module {folder}$"),
    ],
)
def test_files_in_the_wrong_place(words, message, tmp_path):
    (tmp_path / "a.toml").write_text("[training]\nsteps = 3")
    (tmp_path / "trainer.py").write_text("")
    with pytest.raises(UserError, match=message.format(folder=tmp_path)):
        ConfigManager().parse_args([word.format(folder=tmp_path) for word in words])


def test_a_stray_file_is_named_before_torch_is_imported(monkeypatch):
    monkeypatch.delattr(manager, "load_config_function")
    with pytest.raises(UserError, match="'run.yaml' belongs to no option"):
        ConfigManager().parse_args(["--module", "auto", "run.yaml", "--training.steps", "3"])


def test_a_module_in_this_folder_is_named_with_a_dot(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/trainer.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"use --module \./mine$"):
        load_config_function("mine/trainer.py", "debugmodel")


def test_conversations_for_pre_training(tokenizer, tmp_path):
    config = PretrainDataLoader.Config(dataset=[write(tmp_path / "a.jsonl", CHAT)])
    config.cache_dir = str(tmp_path)
    with pytest.raises(UserError, match="use a configuration such as --config sft"):
        config.prepare(tokenizer=tokenizer)


def test_plain_text_for_fine_tuning(tokenizer, tmp_path, caplog):
    """Which is possible, and rarely meant."""
    (tmp_path / "a.txt").write_text("Some text.")
    for dataset, count in ((write(tmp_path / "a.jsonl", CHAT), 0), (str(tmp_path / "a.txt"), 1)):
        config = SFTDataLoader.Config(dataset=[dataset], chat_template="alpaca")
        config.cache_dir = str(tmp_path / "cache")
        config.prepare(tokenizer=tokenizer)
        assert caplog.text.count("use a configuration such as --config pretrain") == count


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["{0}/a.jsonl,{0}/b.jsonl"], r"separate several with spaces: {0}/a.jsonl {0}/b.jsonl$"),
        (
            ["{0}/user.jsonl"],
            "a row needs a message of the assistant, or --dataloader.train_on all",
        ),
    ],
)
def test_data_for_fine_tuning(names, message, tokenizer, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", CHAT)
    write(tmp_path / "user.jsonl", {"messages": CHAT["messages"][:1]})
    dataset = [name.format(tmp_path) for name in names]
    config = SFTDataLoader.Config(
        dataset=dataset, chat_template="alpaca", cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(UserError, match=message.format(tmp_path)):
        config.build(tokenizer=tokenizer, seq_len=64, local_batch_size=1)


def test_a_path_in_place_of_a_configuration():
    with pytest.raises(UserError, match=r"use PretrainedTokenizer.Config\(\).build\(path=…\)"):
        PretrainedTokenizer("DIR")  # type: ignore[arg-type]


def test_tokens_without_a_batch():
    config = dataclasses.replace(llama3.FLAVORS["debugmodel"], vocab_size=64)
    with torch.device("meta"), pytest.raises(UserError, match=r"shape \(3,\), .*tokens\[None\]"):
        config.build()(torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("wrong", [64, -1])
def test_ids_outside_the_vocabulary(wrong):
    model = dataclasses.replace(llama3.FLAVORS["debugmodel"], vocab_size=64, n_layers=1).build()
    with pytest.raises(UserError, match=f"token id {wrong} is outside .* of 64 .ids 0 to 63"):
        model(torch.tensor([[63, wrong]]))


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is a GGUF file, .*; use the folder of the model"):
        huggingface_model(tmp_path / "m.gguf")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is an adapter, without its model; .*lora.adapter_path"):
        huggingface_model(tmp_path)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("CONFIG_FILE=8b.toml", "CONFIG_FILE is not read; use --config_file 8b.toml"),
        ("PYTHON=nowhere", "PYTHON is nowhere, which is not a program"),
    ],
)
def test_variables_of_the_script(variable, message, tmp_path):
    script = "source scripts/environment.sh; active_environment_suffices() { true; }; "
    script += f"root={tmp_path}; touch $root/pyproject.toml $root/constraints.txt; "
    script += "use_environment"
    command = ["./run_train.sh"] if "CONFIG" in variable else ["bash", "-c", script]
    done = subprocess.run(["env", variable, *command], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode > 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.mkdir, "is a folder; a checkpoint has a file of this name"),
        (os.mkfifo, "is not a regular file; save its content to a file"),
        (lambda file: file.symlink_to("gone"), "is a link to gone, which does not exist"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.pth", ".metadata"])
def test_no_file_under_the_name_of_weights(make, message, name, tmp_path):
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} {message}"):
        format_of(tmp_path)


def test_a_file_as_a_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "mine.csv"):
        (tmp_path / name).write_text("task: mine")
    with pytest.raises(UserError, match=r"'mine.yaml' is a file, .*add --include_path \. and name"):
        check_harness(["mine.yaml"], None, "--include_path")
    with pytest.raises(UserError, match=r"'mine.csv' is a file, and no task: questions are in"):
        check_harness(["mine.csv"], None, "--include_path")
    (tmp_path / "mine.jsonl").touch()
    with pytest.raises(UserError, match=r"name it with --callbacks.evaluation.files mine.jsonl"):
        check_harness(["mine.jsonl"], None, "--callbacks.evaluation.include_path")


def test_an_export_type_without_an_export():
    """A configuration sets the type, so the message says how to leave it out."""
    config = CheckpointManager.Config(enable=True, export_dtype="float32")
    with pytest.raises(UserError, match=r"is float32, by an option or the configuration, .* None"):
        config.validate()
    config.export_dtype = None
    config.validate()
