"""A checkpoint folder belongs to one run: no other run resumes from it, or replaces or removes its
checkpoints."""

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands import run_command
from tests.pretrained import make_pretrained
from tests.replacements import REPLACEMENTS, Replace, moved, still_mapped, written_in_place
from tests.training import TINY, flags, launch, read_metrics, run, tiny_config
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import catalog, list_checkpoints
from torchtitan.components.checkpoint.identity import RunIdentity
from torchtitan.components.checkpoint.manifest import Marker
from torchtitan.components.data import PretrainDataLoader, SFTDataLoader
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER
from torchtitan.tools import digests
from torchtitan.tools.errors import RunComplete, UserError
from torchtitan.trainer import Trainer

SAVING = {
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
    "training.mixed_precision_param": "float32",
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|pad|>' + message['role'] + ': ' + message['content'] }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|pad|>assistant: ' }}{% endif %}"
)
AUTO = ("--module", "auto", "--config")

Torchtitan = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of token caches; building a cache takes longer than a run."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def torchtitan(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Torchtitan:
    """Return a function that runs `torchtitan train` in this process and returns its exit code and
    log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(cache))
    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def train(*words: str, **options: object) -> tuple[int, str]:
        overrides = {key.replace("__", "."): value for key, value in options.items()}
        code = main(["train", *words, *flags(overrides)])
        return code, capfd.readouterr().err

    return train


@pytest.fixture
def from_hf(tmp_path: Path) -> dict[str, object]:
    """Options of two-step runs from a tiny Llama in a Hugging Face folder."""
    folder = tmp_path / "pretrained"
    for file in EMBEDDED_TOKENIZER.iterdir():
        folder.mkdir(exist_ok=True)
        shutil.copy(file, folder)
    make_pretrained(folder, bos_token_id=0, eos_token_id=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "text.txt").write_text("Once upon a time. " * 200)
    rows = [{"prompt": f"Is {n} odd?", "response": "A number."} for n in range(8)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {"training.seq_len": 32, "training.steps": 2, "metrics.enable_tensorboard": False}
    return {"hf_assets_path": folder, **small, "dataloader.num_workers": 0}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_two_methods_in_the_default_folder(
    torchtitan: Torchtitan, from_hf: dict[str, object], tmp_path: Path
) -> None:
    """The second run does not overwrite the model of the first one; it needs its own folder."""
    chats = {"dataloader.dataset": "chats.jsonl", **from_hf}
    assert torchtitan(*AUTO, "sft", **chats)[0] == 0
    before = contents(tmp_path / "outputs")
    code, printed = torchtitan(*AUTO, "lora", **chats)
    assert code == 2 and "--dump_folder" in printed and len(printed.splitlines()) == 1, printed
    assert "outputs/checkpoint/step-2 belongs to another run" in printed
    assert "configuration was auto.sft and is auto.lora" in printed
    assert contents(tmp_path / "outputs") == before
    assert torchtitan(*AUTO, "lora", **chats, dump_folder="outputs/lora")[0] == 0


def test_another_method_does_not_resume(
    torchtitan: Torchtitan, from_hf: dict[str, object], tmp_path: Path
) -> None:
    """`pretrain` saves full checkpoints; otherwise `sft` could resume from them."""
    assert torchtitan(*AUTO, "pretrain", **from_hf, **{"dataloader.dataset": "text.txt"})[0] == 0
    code, printed = torchtitan(*AUTO, "sft", **from_hf, **{"dataloader.dataset": "chats.jsonl"})
    assert (
        code == 2
        and "auto.pretrain and is auto.sft" in printed
        and "dataloader.dataset was" in printed
    ), printed


@pytest.mark.slow
@pytest.mark.parametrize("last", ["last_save_in_hf", "last_save_model_only", ""])
def test_the_same_command_after_the_end(torchtitan: Torchtitan, tmp_path: Path, last: str) -> None:
    options = {**TINY, **SAVING, **({f"checkpoint.{last}": True} if last else {})}
    assert torchtitan(**options)[0] == 0
    before = contents(tmp_path / "outputs" / "checkpoint")
    losses = read_metrics(tmp_path / "outputs", "loss")
    code, printed = torchtitan(**options)
    assert code == 0 and "complete at step 4" in printed, printed
    assert contents(tmp_path / "outputs" / "checkpoint") == before
    assert read_metrics(tmp_path / "outputs", "loss") == losses, "the run trained again"


def test_the_same_command_after_the_data_ended(torchtitan: Torchtitan, tmp_path: Path) -> None:
    """With `training.epochs`, the number of steps does not show that the run is complete."""
    (tmp_path / "text.txt").write_text("Once upon a time. " * 40)
    data = {"dataloader.dataset": "text.txt", "training.epochs": 1}
    options = {**TINY, **SAVING, **data, "checkpoint.last_save_in_hf": True}
    assert torchtitan(**options)[0] == 0
    (step,) = [info.step for info in list_checkpoints(tmp_path / "outputs" / "checkpoint")]
    code, printed = torchtitan(**options)
    assert code == 0 and f"complete at step {step}:" in printed


@pytest.mark.slow
def test_a_final_checkpoint_of_another_kind_is_not_complete(
    torchtitan: Torchtitan, tmp_path: Path
) -> None:
    """Weights in native format, as saved after a failed Hugging Face export, do not complete the
    run."""
    options = {**TINY, **SAVING}
    assert torchtitan(**options, **{"checkpoint.last_save_model_only": True})[0] == 0
    before = contents(tmp_path / "outputs")
    code, printed = torchtitan(**options, **{"checkpoint.last_save_in_hf": True})
    assert code == 2 and "step-4 holds the model only; use `torchtitan convert`" in printed, printed
    assert contents(tmp_path / "outputs") == before


def test_changed_options_are_rejected(
    torchtitan: Torchtitan, from_hf: dict[str, object], tmp_path: Path
) -> None:
    """Other columns, turns, template or adapters, after a final checkpoint that no run can resume
    from."""
    options = {"dataloader.dataset": "chats.jsonl", **from_hf}
    code, printed = torchtitan(*AUTO, "lora", **options)
    assert code == 0, printed
    for change, message in (
        (
            {"dataloader.columns": ["prompt=response", "response=prompt"]},
            "dataloader.columns was none and is prompt=",
        ),
        ({"dataloader.train_on": "all"}, "dataloader.train_on was assistant and is all"),
        ({"dataloader.chat_template": "alpaca"}, "dataloader.chat_template was none and is alpaca"),
        ({"model_converters.lora.rank": 2}, "model_converters.lora.rank was 16 and is 2"),
    ):
        code, printed = torchtitan(*AUTO, "lora", **{**options, **change})
        assert code == 2 and message in printed, printed
    code, printed = torchtitan(*AUTO, "lora", **options)
    assert code == 0, printed


def test_a_checkpoint_of_an_unknown_run_is_not_replaced(
    torchtitan: Torchtitan, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "checkpoint"
    marker = Marker(step=4, kind="model_only", world_size=1)
    path = Path(str(catalog.commit(catalog.start_partial(folder, 4), marker)))
    before = contents(path)
    code, printed = torchtitan(**TINY, **SAVING)
    assert code == 2 and "of an unknown run" in printed, printed
    assert contents(path) == before


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """All ranks end the same way, even if nothing was checked before they started."""
    options = {key.replace(".", "__"): value for key, value in SAVING.items()}
    launch(tmp_path, 2, **options, checkpoint__last_save_in_hf=True)
    before = contents(tmp_path)
    assert "complete at step 4" in launch(tmp_path, 2, **options, checkpoint__last_save_in_hf=True)
    words = flags(
        {
            **TINY,
            **SAVING,
            "dump_folder": tmp_path,
            "checkpoint.last_save_in_hf": True,
            "model.dim": 32,
        }
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "torchtitan.train",
    ]
    result = run_command([*torchrun, *words])
    assert result.returncode != 0 and "model.dim was 64 and is 32" in result.stderr
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_longer_run_after_an_export_is_rejected(torchtitan: Torchtitan, tmp_path: Path) -> None:
    """Without a full checkpoint to resume from, the run would start over in the folder of the
    finished model."""
    options = {**TINY, **SAVING, "checkpoint.last_save_in_hf": True}
    assert torchtitan(**options)[0] == 0
    before = contents(tmp_path / "outputs")
    code, printed = torchtitan(**{**options, "training.steps": 6})
    advice = (
        "--checkpoint.initial_load_path outputs/checkpoint/step-4 --checkpoint.initial_load_in_hf"
    )
    assert code == 2 and advice in printed, printed
    assert contents(tmp_path / "outputs") == before
    words = advice.split()
    assert (
        torchtitan(*words, **{**options, "training.steps": 6, "dump_folder": "outputs/longer"})[0]
        == 0
    )


@pytest.mark.slow
def test_a_longer_run_keeps_the_finished_export(torchtitan: Torchtitan, tmp_path: Path) -> None:
    """It resumes from the full checkpoint before the export, and neither replaces nor removes the
    export."""
    options = {**TINY, **SAVING, "checkpoint.last_save_in_hf": True, "checkpoint.keep_latest_k": 1}
    assert torchtitan(**{**options, "training.steps": 4, "checkpoint.interval": 3})[0] == 0
    finished = tmp_path / "outputs" / "checkpoint" / "step-4"
    before = contents(finished)
    code, printed = torchtitan(**{**options, "training.steps": 8, "checkpoint.interval": 2})
    assert (
        code == 0
        and "outputs/checkpoint/step-4 is the final checkpoint of a finished run" in printed
    ), printed
    assert contents(finished) == before
    saved = list_checkpoints(finished.parent)
    assert [(info.step, info.kind) for info in saved] == [
        (4, "huggingface"),
        (6, "full"),
        (8, "huggingface"),
    ]


CHANGES = {
    "architecture": ({"model__ffn_dim": 96}, "model.ffn_dim was 128 and is 96"),
    "nested option": ({"model__rope__theta": 1e6}, "model.rope.theta was 10000.0 and is 1000000.0"),
    "base weights": (
        {"checkpoint__initial_load_path": "other/step-4"},
        "base weights was none and is",
    ),
    "tokenizer": ({"tokenizer__added_tokens": ["<|new|>"]}, "tokenizer (.*) has changed since"),
    "data": (
        {"dataloader__dataset": "other.txt"},
        "dataloader.dataset was .*text.txt and is .*other.txt",
    ),
    "trainer": ({}, "trainer was .*:Trainer and is .*:Other"),
    "split": (
        {"dataloader__split": "validation", "dataloader__dataset": "stories"},
        "dataloader.split was train",
    ),
}


class Other(Trainer):
    """Another training method."""


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an unfinished run, in `run`, and its data."""
    folder = tmp_path_factory.mktemp("unfinished")
    (folder / "text.txt").write_text("Once upon a time. " * 200)
    (folder / "other.txt").write_text("Long ago and far away. " * 200)
    run(_config(folder, training__steps=2))
    return folder


def _config(folder: Path, **changes: object) -> object:
    data = {
        "dataloader__cache_dir": folder / "cache",
        "dataloader__dataset": str(folder / "text.txt"),
    }
    options = {key.replace(".", "__"): value for key, value in SAVING.items()} | data | changes
    if not str(options["dataloader__dataset"]).startswith(("/", "stories")):
        options["dataloader__dataset"] = str(folder / str(options["dataloader__dataset"]))
    return tiny_config(folder / "run", **options)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_makes_another_run_is_rejected(unfinished: Path, change: str) -> None:
    """Found by the check before the run, or, if a script builds a Trainer without the check, on
    loading."""
    changes, message = CHANGES[change]
    config = _config(unfinished, **changes)
    if change == "trainer":
        config = Other.Config(
            **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        )
    with pytest.raises(UserError, match=message):
        config.check(world_size=1)
    config.checkpoint.initial_load_path = ""
    trainer = config.build()
    try:
        if change != "base weights":
            with pytest.raises(UserError, match=message):
                trainer.train()
    finally:
        trainer.close()


@pytest.mark.parametrize("loader", ["pretraining", "finetuning", "token file"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_data_that_another_program_replaces_makes_another_run(
    unfinished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replacement: Callable[[Path], Replace],
    loader: str,
) -> None:
    """With its size and time as before, also if its digest is remembered."""
    monkeypatch.setattr(digests, "_RECENT_NS", 10**7)
    names = {"pretraining": "a.txt", "finetuning": "a.jsonl", "token file": "a.bin"}
    path = tmp_path / "data" / names[loader]
    path.parent.mkdir()
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n' * 4)
    os.utime(path, (1e9, 1e9))
    replace = replacement(path)
    time.sleep(0.05)
    kind = SFTDataLoader if loader == "finetuning" else PretrainDataLoader
    config = kind.Config(dataset=[str(path)], cache_dir=str(tmp_path / "cache"))

    def identity() -> RunIdentity:
        return RunIdentity(config.identity(), {"steps": 1})

    before = identity()
    with monkeypatch.context() as patch:
        patch.setattr(digests, "hash_file", lambda *_: pytest.fail("read again"))
        assert identity().describe_differences(before.properties) == []
    replace(b'{"prompt": "a", "response": "c"}\n' * 4)
    [difference] = identity().describe_differences(before.properties)
    assert difference.startswith("dataloader.dataset ")


@pytest.mark.parametrize("replacement", [written_in_place, moved, still_mapped])
def test_resuming_with_replaced_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacement
) -> None:
    monkeypatch.setattr(digests, "_RECENT_NS", 10**7)
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time. " * 200)
    os.utime(path, (1e9, 1e9))
    replace = replacement(path)
    time.sleep(0.05)
    run(_config(tmp_path, training__steps=1))
    _config(tmp_path, training__steps=2).check(world_size=1)
    replace(b"Once upon a tide. " * 200)
    with pytest.raises(UserError, match=r"dataloader.dataset \(.*text.txt\) has changed since"):
        _config(tmp_path, training__steps=2).check(world_size=1)


@pytest.mark.slow
def test_allowed_changes(unfinished: Path, tmp_path: Path) -> None:
    """Steps, learning rate, batch, workers, saves, validation, logging, the cache folder, and the
    dump folder."""
    shutil.copytree(unfinished / "run", tmp_path / "run")
    changes = {
        "training__steps": 4,
        "optimizer__lr": 1e-4,
        "training__global_batch_size": 4,
        "debug__seed": 3,
    }
    changes |= {
        "dataloader__num_workers": 1,
        "dataloader__cache_dir": tmp_path / "cache",
        "checkpoint__interval": 1,
    }
    config = _config(unfinished, **changes, checkpoint__last_save_in_hf=True)
    config.dump_folder, config.metrics.log_freq, config.validator.enable = (
        str(tmp_path / "run"),
        2,
        True,
    )
    config.check(world_size=1)
    assert run(config).step == 4


def test_base_weights_are_identified_by_content(tmp_path: Path, from_hf: dict[str, object]) -> None:
    """They may be moved or deleted, but other weights in the same folder make it another run."""
    folder = Path(str(from_hf["hf_assets_path"]))

    def config(base: Path) -> object:
        load = {"checkpoint__initial_load_path": base, "checkpoint__initial_load_in_hf": True}
        options = {key.replace(".", "__"): value for key, value in SAVING.items()}
        return tiny_config(tmp_path / "run", **options, **load)

    run(config(folder))
    folder.rename(tmp_path / "moved")
    config(tmp_path / "moved").check(world_size=1)
    make_pretrained(folder, torch.bfloat16)
    with pytest.raises(UserError, match=r"base weights \(.*pretrained\) has changed since"):
        config(folder).check(world_size=1)
    shutil.rmtree(folder)
    assert run(config(folder)).step == 4, "the checkpoint contains the weights"


@pytest.mark.slow
def test_a_complete_run_does_not_need_its_base_weights(
    torchtitan: Torchtitan, tmp_path: Path
) -> None:
    assert torchtitan(**TINY, **SAVING, dump_folder="base")[0] == 0
    options = {**TINY, **SAVING, "checkpoint.initial_load_path": "base/checkpoint/step-4"}
    options |= {"checkpoint.last_save_in_hf": True}
    assert torchtitan(**options)[0] == 0
    shutil.rmtree(tmp_path / "base")
    code, printed = torchtitan(**options)
    assert code == 0 and "complete at step 4" in printed, printed


@pytest.mark.slow
@pytest.mark.parametrize("config", ["debugmodel", "llama3_debugmodel_sft"])
def test_data_is_identified_by_content(torchtitan: Torchtitan, tmp_path: Path, config: str) -> None:
    """The data may be moved, renamed, or deleted after the run; other content makes it another
    run."""
    rows = [
        json.dumps({"prompt": f"Is {n} odd?", "response": "A number.", "text": "A. " * 40})
        for n in range(8)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = {**TINY, **SAVING, "checkpoint.last_save_in_hf": True, "training.seq_len": 64}
    words = ("--config", config)

    def train(dataset: str) -> tuple[int, str]:
        return torchtitan(*words, **{**options, "dataloader.dataset": dataset})

    assert train("data.jsonl")[0] == 0
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "folder" / "renamed.jsonl")
    for path in (
        "folder/../data.jsonl",
        str(tmp_path / "data.jsonl"),
        "folder/renamed.jsonl",
        "folder",
    ):
        code, printed = train(path)
        assert code == 0 and "complete at step 4" in printed, printed
    (tmp_path / "data.jsonl").write_text("\n".join(rows[1:]))
    code, printed = train("data.jsonl")
    assert code == 2 and "data.jsonl) has changed since" in printed, printed
    (tmp_path / "data.jsonl").unlink()
    assert train("data.jsonl")[0] == 0
    code, printed = train("stories")
    assert code == 2 and "data.jsonl and is stories" in printed, printed


@pytest.mark.slow
def test_load_step_restarts_from_an_earlier_checkpoint(
    torchtitan: Torchtitan, tmp_path: Path
) -> None:
    """Later checkpoints, including the final one, are replaced."""
    options = {**TINY, **SAVING, "checkpoint.last_save_in_hf": True, "checkpoint.interval": 2}
    assert torchtitan(**options)[0] == 0
    before = contents(tmp_path / "outputs" / "checkpoint" / "step-4")
    assert torchtitan(**{**options, "checkpoint.load_step": 2, "optimizer.lr": 1e-2})[0] == 0
    after = contents(tmp_path / "outputs" / "checkpoint" / "step-4")
    assert (
        after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    )


def test_a_script_whose_run_is_complete(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """`train` logs it and returns; `load_checkpoint` raises, for custom training loops."""
    options = {key.replace(".", "__"): value for key, value in SAVING.items()}
    config = tiny_config(tmp_path, **options, checkpoint__last_save_model_only=True)
    run(config)
    before = contents(tmp_path)
    assert run(config).step == 0 and "complete at step 4" in log.text
    assert contents(tmp_path) == before
    trainer = config.build()
    with pytest.raises(RunComplete, match="complete at step 4"):
        trainer.load_checkpoint()
    trainer.close()


@pytest.mark.parametrize("begin", ["check", "train"])
def test_the_next_start_of_a_complete_run_removes_what_a_killed_process_did_not(
    begin: str, tmp_path: Path
) -> None:
    """It was killed after its last save, while it removed older checkpoints. The other ones stay,
    also with another `keep_latest_k` than the run's."""
    options = {key.replace(".", "__"): value for key, value in SAVING.items()}
    config = tiny_config(tmp_path, **options, checkpoint__last_save_model_only=True)
    config.checkpoint.keep_latest_k, config.checkpoint.interval = 0, 1
    run(config)
    folder = tmp_path / "checkpoint"
    (folder / "step-1").rename(folder / "step-1.removed.partial")
    config.checkpoint.keep_latest_k = 1
    if begin == "check":
        with pytest.raises(RunComplete):
            config.check(1)
    else:
        run(config)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3", "step-4"]


def test_missing_properties_count_as_equal() -> None:
    """For example, a configuration that was built in Python has no registered name."""
    identity = RunIdentity({"model.dim": 8, "configuration": "a.b"}, {"steps": 3})
    assert identity.describe_differences({"model.dim": 8}) == []
    assert identity.describe_differences({"model.dim": 4, "loss": 1}) == [
        "model.dim was 4 and is 8"
    ]


def test_when_a_run_is_finished() -> None:
    by_steps, by_epochs = RunIdentity({}, {"steps": 3}), RunIdentity({}, {"epochs": 2})
    assert [by_steps.is_finished(step, {"steps": 5}) for step in (2, 3, 5)] == [False, True, True]
    assert by_steps.is_finished(2, {"steps": 3}), "the data ended earlier"
    assert [by_epochs.is_finished(9, {"epochs": epochs}) for epochs in (1, 2, 3)] == [
        False,
        True,
        True,
    ]
    assert not by_epochs.is_finished(9, {"steps": 9})
