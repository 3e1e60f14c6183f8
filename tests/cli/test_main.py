"""Messages and exit codes of the command line for user errors, tested in this process."""

import importlib.metadata
import json
import os
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.conftest import PROJECT
from tests.training import TINY, flags
from torchtitan.cli.main import main
from torchtitan.tools import process
from torchtitan.tools.errors import UserError
from torchtitan.tools.process import COMMAND_VARIABLE, StopRequest, StopSignals

CONFIG_OF = """
import dataclasses

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def config_of(trainer_class):
    base = llama3_debugmodel()
    return trainer_class.Config(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})

"""
"""Head of a user's config_registry.py: the debug configuration with another trainer."""


def write_module(folder: Path, code: str) -> Path:
    """Write a module with the registry `code`."""
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(CONFIG_OF + code)
    return folder


def run(*words: str | Path) -> int:
    """Run `torchtitan train` with a tiny model and `words`; return the exit code."""
    try:
        return main(["train", *flags(TINY), *map(str, words)])
    except SystemExit as exit_:  # argparse and tyro exit this way
        assert isinstance(exit_.code, int)
        return exit_.code


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore environment variables, imported modules and signal handlers after a run."""
    for name in (
        "NGPU",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOG_RANK",
        "TORCHTITAN_PROGRAM",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(COMMAND_VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE)
    }
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bad data, bad modules, and an earlier run with its checkpoint."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TORCHTITAN_CACHE", str(folder / "cache"))
        patch.delenv("NGPU", raising=False)
        _write_data(folder)
        _write_modules(folder)
        options = ["--checkpoint.enable", "--dump_folder", "outputs"]
        assert run("--dataloader.dataset", "corpus.txt", *options) == 0
    _damage_checkpoints(folder)
    return folder


def _write_data(folder: Path) -> None:
    (folder / "corpus.txt").write_text(
        "".join(f"This is sentence {number}. " for number in range(400))
    )
    (folder / "empty.txt").touch()
    (folder / "no_files").mkdir()
    (folder / "latin1.txt").write_bytes("Größe".encode("latin-1"))
    (folder / "broken.jsonl").write_text('{"text": "good"}\n{"text": "cut sh\n')
    (folder / "column.jsonl").write_text('{"content": "good"}\n')
    (folder / "no_tokenizer").mkdir()
    (folder / "large_tokenizer").mkdir()
    vocabulary = {f"w{index}": index for index in range(128_257)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(
        str(folder / "large_tokenizer" / "tokenizer.json")
    )
    (folder / "a_file").write_text("not a folder")
    (folder / "typo.yaml").write_text("training:\n  stepz: 3\n")
    (folder / "value.yaml").write_text("training:\n  gc_freq: often\n")


def _write_modules(folder: Path) -> None:
    write_module(folder / "lacks_import", "import no_such_library\n")
    write_module(folder / "lacks_later", "def lacks_later():\n    import no_such_library\n")
    write_module(folder / "refuses", "raise ImportError('needs version 2 of itself')\n")


def _damage_checkpoints(folder: Path) -> None:
    step = folder / "outputs" / "checkpoint" / "step-4"
    for name in ("cut_short/step-4", "no_metadata", "emptied", "damaged_marker"):
        shutil.copytree(step, folder / name)
    (folder / "cut_short/step-4/complete.json").unlink()
    (folder / "no_metadata/.metadata").unlink()
    for data in (folder / "emptied").glob("*.distcp"):
        data.write_bytes(b"")
    (folder / "damaged_marker/complete.json").write_text("{")


MISTAKES = {
    "module": ("--module lama3", "unknown module 'lama3'", "did you mean 'llama3'"),
    "module folder": ("--module ./nowhere", "./nowhere", "the folder does not exist"),
    "module, dotted": ("--module no.such.thing", "unknown module 'no.such.thing'"),
    "folder without registry": ("--module no_files", "no_files", "config_registry.py"),
    "configuration": (
        "--config debugmodle",
        "unknown configuration 'debugmodle'",
        "did you mean 'debugmodel'",
    ),
    "key": ("--training.stepz 3", "--training.stepz", "--training.steps"),
    "section": ("--trainning.steps 3", "--trainning.steps", "--training.steps"),
    "model key": ("--model.dimm 3", "--model.dimm", "--model.dim"),
    "integer": ("--training.gc_freq often", "'often'", "--training.gc_freq"),
    "number": ("--optimizer.lr fast", "'fast'", "--optimizer.lr"),
    "choice": ("--lr_scheduler.decay_type cubic", "cubic", "cosine"),
    "file's key": (
        "--config_file typo.yaml",
        "typo.yaml",
        "training.stepz",
        "did you mean 'training.steps'",
    ),
    "file's value": ("--config_file value.yaml", "'often'", "training.gc_freq"),
    "file": ("--config_file nowhere.yaml", "nowhere.yaml", "No such file"),
    "import": (
        "--module lacks_import",
        "No module named 'no_such_library'",
        "lacks_import/config_registry.py, line",
    ),
    "late import": (
        "--module lacks_later --config lacks_later",
        "No module named 'no_such_library'",
        "lacks_later",
    ),
    "import error": ("--module refuses", "needs version 2 of itself"),
    "data absent": ("--dataloader.dataset corpus.tx", "'corpus.tx'", "did you mean 'corpus.txt'"),
    "data empty": ("--dataloader.dataset empty.txt", "empty.txt", "no text"),
    "data without files": ("--dataloader.dataset no_files", "'no_files'", "contains no data files"),
    "data undecodable": ("--dataloader.dataset latin1.txt", "latin1.txt", "UTF-8", "line 1"),
    "data broken": ("--dataloader.dataset broken.jsonl", "broken.jsonl:2", "broken JSON"),
    "data's column": ("--dataloader.dataset column.jsonl", "column.jsonl", "'text'", "content"),
    "column": (
        "--dataloader.dataset column.jsonl --dataloader.text_column txt",
        "'txt'",
        "content",
    ),
    "validation data": ("--validator.enable --validator.dataset nowhere.txt", "'nowhere.txt'"),
    "workers": (
        "--dataloader.num_workers 100000",
        "--dataloader.num_workers is 100000",
        "16 per CPU core",
    ),
    "tokenizer": (
        "--hf_assets_path no_tokenizer",
        "'no_tokenizer'",
        "tokenizer.json",
        "tokenizer.model",
    ),
    "tokenizer folder": ("--hf_assets_path nowhere", "nowhere does not exist"),
    "vocabulary": ("--model.vocab_size 100", "2048 tokens", "only 100"),
    "published vocabulary": (
        "--config 1b --checkpoint.no_enable --hf_assets_path large_tokenizer",
        "128257 tokens",
        "only 128256",
    ),
    "heads": ("--model.n_heads 3", "64", "3"),
    "batch": ("--training.global_batch_size 3", "--training.global_batch_size 3", "2 x "),
    "shard degree": (
        "--parallelism.data_parallel_shard_degree 3",
        "data_parallel_shard_degree 3",
        "processes",
    ),
    "replicate degree": (
        "--parallelism.data_parallel_replicate_degree 5",
        "replicate_degree 5",
        "processes",
    ),
    "sequence length": ("--training.seq_len 0", "--training.seq_len is 0", "at least 1"),
    "negative length": ("--training.seq_len -4", "--training.seq_len is -4", "at least 1"),
    "steps": ("--training.steps 0", "--training.steps is 0", "at least 1"),
    "most steps": ("--training.steps 1e13", "--training.steps is 10000000000000", "at most 1e12"),
    "seed": ("--debug.seed 1e19", "--debug.seed is 10000000000000000000", "from 0 to 2^63 - 1"),
    "checkpoint absent": ("--checkpoint.initial_load_path nowhere", "nowhere does not exist"),
    "no checkpoint": ("--checkpoint.initial_load_path no_files", "no_files is not a checkpoint"),
    "folder of checkpoints": (
        "--checkpoint.initial_load_path outputs",
        "outputs/checkpoint/step-4",
    ),
    "incomplete checkpoint": (
        "--checkpoint.initial_load_path cut_short/step-4",
        "cut_short/step-4 is incomplete",
    ),
    "damaged marker": (
        "--checkpoint.initial_load_path damaged_marker",
        "damaged_marker/complete.json is damaged",
    ),
    "own checkpoint": (
        "--checkpoint.enable --model.dim 32",
        "outputs/checkpoint/step-4 belongs to another run",
        "model.dim was 64 and is 32",
        "--dump_folder",
    ),
    "step": (
        "--checkpoint.enable --checkpoint.load_step 3",
        "step 3",
        "does not exist",
        "complete steps: 4",
    ),
    "dump folder": ("--dump_folder a_file", "--dump_folder 'a_file' cannot be written"),
    "dump folder's parent": (
        "--dump_folder a_file/run",
        "--dump_folder 'a_file/run' cannot be written",
    ),
}
"""Mistakes found before any process starts: the command line, and parts of the message."""

FOUND_BY_WORKERS = {
    "no metadata": (
        "--checkpoint.initial_load_path no_metadata",
        "no_metadata is damaged: .metadata is missing",
    ),
    "emptied": (
        "--checkpoint.initial_load_path emptied",
        "emptied is damaged: __0_0.distcp has 0 bytes instead of ",
    ),
    "other shape": (
        "--checkpoint.initial_load_path outputs/checkpoint/step-4 --dump_folder other "
        "--model.ffn_dim 96",
        "model.layers.0.feed_forward.w1.weight: [128, 64] in the checkpoint, [96, 64] in this run",
    ),
    "state": (
        "--checkpoint.exclude_from_loading optimizers",
        "'optimizers'",
        "did you mean 'optimizer'",
    ),
}
"""Mistakes found after the model is built."""


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def check_message(printed: str, words: tuple[str, ...]) -> None:
    assert all(word in printed for word in words), printed
    assert "Traceback" not in printed
    assert printed.count(words[0]) == 1, "said more than once"
    assert len(printed.splitlines()) <= 8, "not short"


def check_mistake(
    workplace: Path, capfd: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    before = contents(workplace / "outputs")
    code = run("--dataloader.dataset", "corpus.txt", "--dump_folder", "outputs", *shlex.split(text))
    printed = capfd.readouterr().err
    assert code == 2, printed
    check_message(printed, words)
    assert contents(workplace / "outputs") == before, "the earlier run's files have changed"


@pytest.fixture
def in_workplace(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(workplace / "cache"))
    return workplace


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported_once(
    mistake: str,
    processes: int,
    in_workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The mistake is found before processes start, also with two processes."""
    monkeypatch.setenv("NGPU", str(processes))
    text, *words = MISTAKES[mistake]
    check_mistake(in_workplace, capfd, text, tuple(words))


@pytest.mark.parametrize("mistake", FOUND_BY_WORKERS)
def test_late_mistake_is_reported_once(
    mistake: str, in_workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`tests/cli/test_launch.py` tests two processes."""
    text, *words = FOUND_BY_WORKERS[mistake]
    check_mistake(in_workplace, capfd, text, tuple(words))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NGPU": "0"}, ("NGPU is '0'", "at least 1")),
        ({"NGPU": "abc"}, ("NGPU is 'abc'", "at least 1")),
        ({"NGPU": "-1"}, ("NGPU is '-1'", "at least 1")),
        (
            {"NGPU": "5000"},
            ("NGPU is 5000", "CPU core(s)", "OVERSUBSCRIBE=1", "COMM_MODE=fake_backend"),
        ),
        ({"LOG_RANK": "all"}, ("LOG_RANK is 'all'", "ranks below 1")),
        ({"NGPU": "2", "LOG_RANK": "0,2"}, ("LOG_RANK is '0,2'", "ranks below 2")),
        ({"NNODES": "two"}, ("NNODES is 'two'", "at least 1")),
        ({"NNODES": "2", "MASTER_ADDR": "localhost"}, ("NODE_RANK",)),
        ({"NNODES": "2", "NODE_RANK": "0"}, ("MASTER_ADDR",)),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost"},
            ("NODE_RANK is 2", "below NNODES (2)"),
        ),
    ],
)
def test_environment_variables(
    variables: dict[str, str],
    words: tuple[str, ...],
    in_workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_mistake(in_workplace, capfd, "", words)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no login"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}, "no login"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost"}, "checked"),
        ({"COMM_MODE": "fake_backend"}, "dry run"),
    ],
)
def test_logins_are_asked_where_metrics_are_sent(
    variables: dict[str, str],
    message: str,
    in_workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On the first host, not in dry runs."""
    ends = {
        "torchtitan.components.observe.metrics.MetricsProcessor.Config.check_logins": "no login",
        "torchtitan.trainer.config.RunConfig.check": "checked",
        "torchtitan.cli.train._dry_run": "dry run",
    }
    for place, end in ends.items():

        def stop(*args: object, end: str = end) -> None:
            raise UserError(end)

        monkeypatch.setattr(place, stop)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_mistake(in_workplace, capfd, "", (message,))


def test_more_processes_than_gpus(
    in_workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("NGPU", "3")
    check_mistake(in_workplace, capfd, "", ("NGPU is 3", "has 2 GPU"))


def test_the_entry_point_of_one_process(
    in_workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.train import main as train_main

    assert train_main([*flags(TINY), "--dataloader.dataset", "empty.txt"]) == 2
    check_message(capfd.readouterr().err, ("empty.txt contains no text",))
    monkeypatch.setenv("LOG_RANK", "1")
    assert train_main(flags(TINY)) == 2
    check_message(capfd.readouterr().err, ("LOG_RANK is '1'", "ranks below 1"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["trian"],  # codespell:ignore
            ["unknown command 'trian'", "did you mean 'train'", "ls", "new"],  # codespell:ignore
        ),
        (["finetune", "lora"], ["unknown command 'finetune'; use torchtitan train --module M"]),
        (["lm-eval", "x"], ["unknown command 'lm-eval'; use torchtitan eval --tasks"]),
        (["axo.yml"], ["use torchtitan train --config_file axo.yml, or", "migrate axo.yml"]),
        (["migrate", "a.yml", "--output=b.yml"], ["unrecognized argument --output; use --out"]),
        (["migrate", "--config_file", "a.yml"], ["--config_file; the file needs no option"]),
        (["migrate", "a.yml", "b.yml"], ["b.yml; one FILE is read, and written to --out"]),
        (["migrate", "a.yml", "--lr", "1"], ["--lr; set values of the file in it"]),
        (["migrate", "a.yml", "--devcies", "2"], ["--devcies; did you mean '--devices'?"]),
        (["merge-lora"], ["use torchtitan convert, which merges an adapter"]),
        (["ls", "everything"], ["everything"]),
        (["new"], ["required: path", "torchtitan new --help"]),
        (
            ["report", "--txt", "outputs"],
            ["unrecognized argument --txt; did you mean '--text'?"],
        ),
    ],
)
def test_unknown_commands(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(args)
    except SystemExit as exit_:
        code = exit_.code  # type: ignore[assignment]
    assert code == 2
    printed = capsys.readouterr().err
    check_message(printed, tuple(words))
    assert printed.count("\n") == 1


def test_commands_that_print_do_not_import_torch(tmp_path: Path) -> None:
    """The help of every command, the report of a run, and a migration; `ls` and mistakes of `train`
    have their own tests."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 7.5, "lr": 0.1, "step_time": 1.0}\n')
    (tmp_path / "axolotl.yaml").write_text(
        "base_model: a/b\ndatasets: [{path: my.jsonl, type: alpaca}]\nlearning_rate: 1e-4\n"
    )
    script = """
import contextlib, io, sys
from torchtitan.cli.main import COMMANDS, main
for words in [[name, "--help"] for name in COMMANDS] + [
    ["tokenizer", "train", "--help"],
    ["data", "prepare", "--help"],
    ["report", "run"],
    ["migrate", "axolotl.yaml", "--out", "new.yaml"],
]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    if code or "torch" in sys.modules:
        sys.exit(f"{words}: {code}, {'torch' in sys.modules}")
"""
    command = [sys.executable, "-P", "-c", script]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "report.html").exists() and (tmp_path / "new.yaml").exists()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchtitan {importlib.metadata.version('torchtitan')}\n"


@pytest.mark.parametrize(
    "args", [["--list"], ["train", "--list"], ["train", "--module", "llama3", "--list"]]
)
def test_list_is_ls(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    expected = capsys.readouterr().out
    assert main(args) == 0
    assert capsys.readouterr().out == expected


def test_python_dash_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["torchtitan", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("torchtitan", run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("torchtitan ")


def test_help_is_grouped_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(
        f" {section} options " in printed
        for section in ("training", "optimizer", "model", "checkpoint")
    )
    assert main([]) == 0
    assert "torchtitan COMMAND" in capsys.readouterr().out


def test_module_in_current_folder_by_dotted_path(in_workplace: Path) -> None:
    write_module(in_workplace / "own" / "method", "def tiny():\n    return llama3_debugmodel()\n")
    words = [
        "--dataloader.dataset",
        "corpus.txt",
        "--dump_folder",
        "dotted",
        "--training.steps",
        "1",
    ]
    assert run("--module", "own.method", "--config", "tiny", *words) == 0


def test_long_sequence_warns(in_workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--dataloader.dataset", "corpus.txt", "--dump_folder", "long", "--training.steps", "1"]
    assert run(*words, "--training.seq_len", "33", "--model.max_seq_len", "32") == 0
    warnings = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert any("33" in line and "32" in line for line in warnings), warnings


def test_bug_keeps_its_traceback(in_workplace: Path) -> None:
    """Only errors with a clear message have no traceback."""
    write_module(in_workplace / "buggy", "def buggy():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        run("--module", "buggy", "--config", "buggy")


FULL_DISK = """
import resource


class FullDisk(Trainer):
    full = {steps}  # after these, no file may grow beyond 100,000 bytes: the model's weights do

    def complete_step(self, outcome):
        limit = 100_000 if self.step + 1 in self.full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        super().complete_step(outcome)


def debug():
    return config_of(FullDisk)
"""


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="the size of files is limited",
)
@pytest.mark.parametrize(
    ("name", "full", "code", "kept"),
    [("once_full", "(2,)", 0, ["step-1", "step-3"]), ("full_to_the_end", "(2, 3)", 3, ["step-1"])],
)
def test_full_disk(
    name: str,
    full: str,
    code: int,
    kept: list[str],
    in_workplace: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A failed save warns and keeps earlier checkpoints; the run fails only if its last save
    fails."""
    module = write_module(in_workplace / name, FULL_DISK.format(steps=full))
    words = [
        "--dataloader.dataset",
        "corpus.txt",
        "--dump_folder",
        f"{name}_run",
        "--training.steps",
        "3",
    ]
    words += ["--checkpoint.enable", "--checkpoint.interval", "1"]
    assert run("--module", module, "--config", "debug", *words) == code
    printed = capfd.readouterr().err
    assert "WARNING" in printed and "step-2 could not be saved" in printed
    assert "Traceback" not in printed
    assert ("ERROR" in printed) == (code == 3)
    folder = in_workplace / f"{name}_run" / "checkpoint"
    assert sorted(path.name for path in folder.glob("step-*")) == kept
    assert not list(folder.glob("weights_only/step-?"))  # no space for them either


def test_saved_configuration_matches_the_run(in_workplace: Path) -> None:
    words = ["--dataloader.dataset", "corpus.txt", "--training.steps", "2", "--dump_folder"]
    assert run(*words, "first") == 0
    again = ["--config_file", "first/config.yaml", "--dump_folder", "again"]
    assert main(["train", *again]) == 0
    losses = [
        [
            json.loads(line)["loss"]
            for line in (in_workplace / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("first", "again")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2


class TestSignals:
    def test_repeated_signal_is_one_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        stop = StopSignals(lambda _: calls.append("first"), lambda _: calls.append("second"))
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            # like `timeout`: to the process, then to its group
            os.kill(os.getpid(), signal.SIGTERM)
            assert calls == ["first"] and stop.first == signal.SIGTERM
            monkeypatch.setattr(process, "_SAME_REQUEST_SECONDS", 0.0)
            os.kill(os.getpid(), signal.SIGINT)
            assert calls == ["first", "second"] and stop.first == signal.SIGTERM
        finally:
            stop.close()

    def test_handlers_are_restored(self) -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        request = StopRequest()
        os.kill(os.getpid(), signal.SIGINT)
        assert request.received
        request.close()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    "args", [["ls"], pytest.param(["train", "--help"], marks=pytest.mark.slow)], ids=" ".join
)
def test_closed_pipe_ends_quietly(args: list[str]) -> None:
    """`torchtitan ls | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchtitan.cli.main", *args]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=PROJECT)
    os.close(writer)
    assert result.stderr == ""
    assert result.returncode == -signal.SIGPIPE


@pytest.mark.slow
def test_module_in_current_folder_does_not_hide_a_library(tmp_path: Path) -> None:
    for name in ("tyro", "torch", "dataclasses", "shlex"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger was here')")
    command = [sys.executable, "-m", "torchtitan.train", "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0 and "--dump_folder" in result.stdout, result.stderr
