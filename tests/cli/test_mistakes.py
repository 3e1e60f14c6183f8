"""Mistakes of people who come from other libraries: one line with the remedy."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.conftest import PROJECT
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import CheckpointManager, catalog
from torchtitan.components.checkpoint.formats import format_of
from torchtitan.components.data import PretrainDataLoader, SFTDataLoader
from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.data.sources.files import FilePart, read_rows
from torchtitan.components.data.sources.hub_names import reject_page
from torchtitan.components.evaluation.tasks import check_harness, read_questions
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import CommConfig, manager
from torchtitan.config.configurable import suggest_choice
from torchtitan.config.manager import ConfigManager
from torchtitan.config.registry import load_config_function
from torchtitan.distributed.process_group import init_process_group
from torchtitan.models import llama3
from torchtitan.models.pretrained import huggingface_model
from torchtitan.tools.errors import UserError
from torchtitan.tools.patterns import choose

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


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (
            "https://huggingface.co/Qwen/Qwen3-0.6B",
            r"run torchtitan download Qwen/Qwen3-0.6B, and use ./assets/hf/Qwen3-0.6B",
        ),
        ("models--me--tiny", "in the cache of the Hub: use .*models--me--tiny/snapshots/abc"),
    ],
)
def test_folders_of_the_hub(folder, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models--me--tiny/snapshots/abc").mkdir(parents=True)
    for read in (huggingface_model, format_of):
        with pytest.raises(UserError, match=message):
            read(Path(folder))


def test_a_model_as_the_checkpoint_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    option = "--checkpoint.initial_load_path"
    with pytest.raises(UserError, match="no checkpoint of a run; add --checkpoint.initial_load_in"):
        catalog.open_checkpoint(tmp_path, option)


@pytest.mark.parametrize(
    ("module", "config", "message"),
    [
        ("auto", "full", "use --module auto --config sft$"),
        ("auto", "dpo", "use --module preference --config dpo$"),
        ("llama3", "grpo", "use --module rl --config grpo$"),
        ("preference", "orpo", "use --module preference --config dpo --loss.kind orpo$"),
        ("axolotl", "lora", "torchtitan migrate FILE rewrites a file of this library"),
    ],
)
def test_methods_and_libraries_as_configurations(module, config, message):
    with pytest.raises(UserError, match=message):
        load_config_function(module, config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--model", "m"], "argument --model; use --checkpoint DIR, a folder with"),
        (["eval", "--model", "hf", "--tasks", "x"], "argument --model; use --checkpoint DIR"),
        (["serve", "--checkpoint", "m", "--max-model-len", "9"], "the length is the model's own"),
        (["serve", "--checkpoint", "m", "--served-model-name=x"], "name; use --model_name;"),
        (["serve", "--checkpoint", "m", "--enable-lora"], "lora; use --adapters NAME=DIR"),
        (
            ["generate", "--checkpoint", "m", "--lora", "a"],
            "use --checkpoint DIR, the adapter's folder, and --base",
        ),
        (["generate", "--checkpoint", "m", "--max-length", "9"], "use --max_new_tokens;"),
        (["convert", "a", "b", "--to", "gguf", "--outtype", "f16"], "use --export_dtype or"),
    ],
)
def test_options_of_other_programs_that_serve_or_convert(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_world_without_a_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE is 8, but RANK is not set, .*unset WORLD_SIZE"):
        init_process_group("cpu", CommConfig())


def test_the_loss_of_held_out_data_by_its_name_elsewhere():
    with pytest.raises(UserError, match="eval_loss: the loss of held-out data is validation_loss"):
        ConfigManager().parse_args(["--callbacks.earlystopping.metric=eval_loss"]).config.check(1)


def test_questions_with_other_columns(tokenizer, tmp_path):
    file = write(tmp_path / "q.jsonl", {"question": "2+2?", "answers": ["4"]})
    with pytest.raises(UserError, match="no gold, but question, answers; a question has query, "):
        read_questions(Path(file))


def test_data_that_is_a_pointer_of_git(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n")
    (tmp_path / "a.txt").write_text(file.read_text())
    with pytest.raises(UserError, match="is a Git LFS pointer .*fetch the file with `git lfs pull"):
        list(read_rows(file, "a.jsonl", print))
    with pytest.raises(UserError, match="is a Git LFS pointer"):
        list(FilePart("a.txt", tmp_path / "a.txt", "text").documents(print))


def test_the_page_of_a_dataset():
    page = "https://huggingface.co/datasets/tatsu-lab/alpaca"
    for address in (page, f"{page}/viewer/default/train"):
        with pytest.raises(UserError, match="is a page of the .*; name the dataset tatsu-lab/alp"):
            reject_page(address)
    for kind in ("resolve", "raw"):
        reject_page(f"{page}/{kind}/main/train.jsonl")


def test_layers_with_commas():
    names = ["layers.0.attention.wq"]
    with pytest.raises(UserError, match="; separate several with spaces: q_proj v_proj$"):
        choose("lora", ["q_proj,v_proj"], [], names, "layers")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--training.mixed_precision_param=fp16", "float16"),
        ("--training.mixed_precision_param=half", "float16"),
        ("--training.dtype=fp32", "float32"),
        ("--training.dtype=fp16", None),  # no choice there
    ],
)
def test_choices_of_other_libraries(option, meant):
    with pytest.raises(UserError) as raised:
        ConfigManager().parse_args([option])
    assert str(raised.value).endswith(f"did you mean '{meant}'?") is bool(meant)


def test_losses_of_other_libraries():
    assert suggest_choice("sigmoid", Literal["simpo", "dpo"]) == "; did you mean 'dpo'?"
    assert suggest_choice("sigmoid", Literal["simpo"]) == "; did you mean 'simpo'?"


def test_a_function_with_a_syntax_error(tmp_path):
    (tmp_path / "wrong.py").write_text("def f(:\n  pass\n")
    with pytest.raises(UserError, match=r"SyntaxError: .* \(wrong.py, line 1\)$"):
        load_function(f"{tmp_path}/wrong.py:f")


def test_functions_in_a_notebook():
    with pytest.raises(UserError, match="'nb.ipynb' does not exist; write the function to a file"):
        load_function("nb.ipynb:f")
