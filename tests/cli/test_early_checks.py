"""Mistakes that depend on this host, found without torch, have the messages of a run's checks."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from torchtitan.cli import early_checks
from torchtitan.cli.early_checks import check_data, check_degrees, check_files, may_have_gpus
from torchtitan.config import ConfigManager, manager
from torchtitan.config.option_table import KnownConfiguration
from torchtitan.tools.errors import UserError

MISTAKES = {
    "--parallelism.tensor_parallel_degree=3": "does not divide the number of processes, 2 (NGPU)",
    "--parallelism.data_parallel_shard_degree=4": "is not the number of processes, 2 (NGPU)",
    "--parallelism.expert_tensor_parallel_degree=2": "must be 1 or",
    "--parallelism.expert_parallel_degree=3": "does not divide",
    "--training.global_batch_size=3": "not a multiple of local_batch_size x data-parallel ranks",
    "--training.batch_schedule=9:3": "not a multiple of local_batch_size x data-parallel ranks",
    "--parallelism.pipeline_parallel_layers_per_stage=1": "needs --parallelism.pipeline",
    "--dataloader.dataset=nowhere.txt": "is neither a registered name",
    "--dataloader.dataset=data/nowhere.txt": "data does not exist",
    "--validator.dataset=nowhere.txt": "is neither a registered name",
    "--hf_assets_path=nowhere": "nowhere does not exist; use the folder",
}


def early(*words: str) -> None:
    """Parse words with the early checks, which must run."""
    ran = []

    def check(known: KnownConfiguration, given: Mapping[str, object]) -> None:
        check_degrees(known, given)
        check_files(known, given)
        check_data(known, given)
        ran.append(known)

    ConfigManager(early_checks=[check]).parse_args(words)
    assert len(ran) == 1


def message_of(words: Sequence[str], monkeypatch: pytest.MonkeyPatch, *, world_size: int) -> str:
    """Return the message of the early checks, which equals the message of the run."""
    with monkeypatch.context() as without_import:
        without_import.delattr(manager, "load_config_function")
        with pytest.raises(UserError) as found:
            early(*words)
    with pytest.raises(UserError) as late:
        ConfigManager().parse_args(words).config.check(world_size=world_size)
    assert str(late.value) == str(found.value)
    return str(found.value)


@pytest.fixture(autouse=True)
def two_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.delenv("NNODES", raising=False)
    monkeypatch.delenv("COMM_MODE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("word", MISTAKES)
def test_mistakes_have_the_message_of_the_run(word, monkeypatch):
    assert MISTAKES[word] in message_of([word], monkeypatch, world_size=2)


@pytest.mark.parametrize(
    "words",
    [
        ["--parallelism.tensor_parallel_degree=2"],
        ["--parallelism.auto", "--parallelism.tensor_parallel_degree=3"],
        ["--dataloader.dataset", "stories", "there.txt", "tokens", "s3://bucket/x", "org/name"],
        ["--dataloader.dataset", "*.txt"],
        ["--validator.dataset", "name=there.txt", "--hf_assets_path=folder"],
        ["--validator.dataset", "nowhere.txt", "--validator.no_enable"],
        ["--module=llama3", "--config=debugmodel_sft", "--dataloader.dataset", "chats"],
    ],
    ids=" ".join,
)
def test_right_words_are_no_mistakes(words):
    Path("there.txt").write_text("text")
    Path("tokens.bin").touch()
    Path("tokens.idx").touch()
    Path("folder").mkdir()
    early(*words)


SFT = ["--config=debugmodel_sft"]
GRPO = ["--module=rl", "--config=debugmodel"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataloader.dataset=other.jsonl"], "no column 'text'"),
        (["--dataloader.dataset=broken.jsonl"], "broken.jsonl"),
        (["--dataloader.dataset=object.json"], "one object over several lines"),
        (["--dataloader.dataset=empty"], "contains no data files"),
        (["--dataloader.dataset=image.xyz"], "image.xyz"),
        (["--dataloader.shuffle_buffer=0"], "must be at least 1 document"),
        (["--dataloader.weights", "1", "2"], "weights"),
        ([*SFT, "--dataloader.dataset=other.jsonl"], "the rows have the columns a, b"),
        ([*SFT, "--dataloader.dataset=broken.jsonl"], "broken.jsonl"),
        ([*SFT, "--dataloader.dataset=empty"], "contains no data files"),
        ([*SFT, "--dataloader.dataset=chats.jsonl", "--dataloader.format=message"], "is unknown"),
        ([*SFT, "--dataloader.dataset=chats.jsonl", "--dataloader.columns=text=x"], "no column"),
        ([*SFT, "--dataloader.format=nowhere.py:rows"], "file nowhere.py does not exist"),
        ([*SFT, "--dataloader.token_range=9-1"], "must have the form LOW-HIGH"),
        ([*SFT, "--dataloader.pack_chunk=0"], "must be at least 1 sample"),
        ([*GRPO, "--rewards", "nowhere.py:score"], "^--rewards: .*nowhere.py does not exist"),
        ([*GRPO, "--rollout.function=nowhere.py:play"], "^--rollout.function: .* does not exist"),
    ],
    ids=str,
)
def test_wrong_data_and_functions_have_the_message_of_the_run(words, message, monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    Path("other.jsonl").write_text('{"a": "x", "b": "y"}\n')
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    Path("broken.jsonl").write_text('{"text": \n')
    Path("object.json").write_text('{\n"text": "x"\n}')
    Path("image.xyz").touch()
    Path("empty").mkdir()
    assert re.search(message, message_of(words, monkeypatch, world_size=1))


def test_first_rows_of_large_files_are_left_to_the_run(monkeypatch):
    Path("rows").mkdir()
    Path("rows/other.jsonl").write_text('{"a": "x"}\n')
    for dataset in ("rows", "rows/other.jsonl"):
        with pytest.raises(UserError, match="no column 'text'"):
            early(f"--dataloader.dataset={dataset}")
    monkeypatch.setattr("torchtitan.components.data.sources.paths._QUICK_SIZE", 5)
    for dataset in ("rows", "rows/other.jsonl"):
        early(f"--dataloader.dataset={dataset}")


def test_no_code_of_a_user_runs_early():
    Path("rows.py").write_text("from pathlib import Path; Path('ran').touch()")
    early(*SFT, "--dataloader.format=rows.py:convert")
    early(*GRPO, "--rewards=rows.py:score")
    early(*GRPO, "--rewards", "pattern=nowhere.py:score", "length=3")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [
                "--training.enable_cpu_offload",
                "--parallelism.data_parallel_shard_degree=1",
                "--parallelism.data_parallel_replicate_degree=2",
            ],
            "is a part of FSDP",
        ),
        (
            ["--training.seq_len_schedule=9:64", "--parallelism.pipeline_parallel_degree=2"],
            "cannot be combined with --training.seq_len_schedule",
        ),
    ],
    ids=str,
)
def test_sections_are_compared_as_by_the_run(words, message, monkeypatch):
    assert re.search(message, message_of(words, monkeypatch, world_size=2))


def test_numbers_in_a_file_are_names():
    Path("2024").mkdir()
    Path("2024/story.txt").write_text("text")
    Path("run.yaml").write_text("dataloader: {dataset: [2024]}\nhf_assets_path: 2024\n")
    early("--config_file=run.yaml")
    Path("run.yaml").write_text("dataloader: {dataset: [2024-01-01]}")
    with pytest.raises(UserError, match="'2024-01-01' is neither"):
        early("--config_file=run.yaml")


def test_quoted_booleans_are_refused():
    """Any text would be true."""
    Path("run.yaml").write_text('parallelism: {auto: "false"}')
    with pytest.raises(UserError, match="is 'false', but must be true or false"):
        early("--config_file=run.yaml")


def test_a_run_that_may_be_complete_needs_no_data():
    """The same command after its end says so, and its data may be gone."""
    words = ["--dataloader.dataset=nowhere.txt", "--checkpoint.enable"]
    with pytest.raises(UserError, match="neither"):
        early(*words)
    Path("outputs/checkpoint").mkdir(parents=True)
    early(*words)
    early(*SFT, "--dataloader.format=nowhere.py:rows", "--checkpoint.enable")
    early(*words, "--dump_folder=elsewhere", "--checkpoint.folder=s3://bucket/run")
    with pytest.raises(UserError, match="neither"):
        early(*words, "--checkpoint.no_enable")


def test_processes_are_unknown_if_there_may_be_gpus(monkeypatch, tmp_path):
    assert not may_have_gpus(tmp_path)
    (tmp_path / "nvme0").touch()
    assert not may_have_gpus(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert may_have_gpus(tmp_path)
    monkeypatch.delenv("NGPU")
    monkeypatch.setattr(early_checks, "may_have_gpus", lambda: True)
    early("--parallelism.tensor_parallel_degree=3")
    monkeypatch.setattr(early_checks, "may_have_gpus", lambda: False)
    with pytest.raises(UserError, match="processes, 1"):
        early("--parallelism.tensor_parallel_degree=3")


def test_a_dry_run_reads_no_data(monkeypatch):
    commands = [["--dataloader.dataset=nowhere.txt"], [*SFT, "--dataloader.format=nowhere.py:rows"]]
    for words in commands:
        with pytest.raises(UserError, match="nowhere"):
            early(*words)
    monkeypatch.setenv("COMM_MODE", "fake_backend")
    for words in commands:
        early(*words)
