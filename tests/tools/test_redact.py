"""Credentials leave in no message, log, record or report."""

import ast
import json
import logging
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.conftest import PROJECT
from tests.parsed import tree_of
from tests.training import TINY, flags, run
from torchtitan.cli.main import main
from torchtitan.cli.model_options import run_command
from torchtitan.components.checkpoint.filesystem import open_store
from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.config import ConfigManager
from torchtitan.dry_run.report import dry_run
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import _Formatter, _print_traceback
from torchtitan.tools.progress import progress
from torchtitan.tools.redact import hide_credentials_of, redact, redacted
from torchtitan.tools.tables import open_console, print_table

URL = "s3://AKIAIOSFODNN7EXAMPLE:wJalr/XUtnFEMI+K7@bucket/data.jsonl"
SECRETS = ("AKIAIOSFODNN7EXAMPLE", "wJalr", "XUtnFEMI")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("s3://KEY:SECRET@bucket/x", "SECRET"),
        (URL, "XUtnFEMI"),
        (URL.replace("//", "/", 1), "XUtnFEMI"),
        ("https://user:pa:ss@host/x y@z", "pa:ss"),
        ("https://tok3n@host/x", "tok3n"),
        ("ftp://:only@host", "only"),
        ("https://b/x?X-Amz-Algorithm=A&X-Amz-Credential=CRED%2F&X-Amz-Signature=dead", "CRED"),
        ("https://b/x?X-Amz-Signature=dead&X-Amz-Date=1", "dead"),
        ("https://b/x?X-Amz-Security-Token=dead", "dead"),
        ("https://a.blob.core/x?sv=1&sig=dead%3D&se=2", "dead"),
        ("gs://b/x?access_token=dead", "dead"),
        ("HF_TOKEN=dead", "dead"),
        ("AWS_SECRET_ACCESS_KEY='dead/beef'", "dead"),
        ("WANDB_API_KEY: dead", "dead"),
        ("--api_key deadbeef1", "deadbeef1"),
        ("storage_options={'secret': 'dead', 'token': 'beef'}", "dead"),
        ("storage_options={'secret': 'x', 'token': 'beef'}", "beef"),
        ('{"aws_secret_access_key": "dead"}', "dead"),
        ("Authorization: Bearer deadbeefdeadbee1", "deadbeefdeadbee1"),
        ("the token hf_abcdefghijklmnopqrstuvwxyz01234567 is wrong", "hf_abc"),
        ("ghp_abcdefghijklmnopqrst", "ghp_abc"),
        ("the id AKIAIOSFODNN7EXAMPLE", "AKIA"),
    ],
)
def test_credentials(text, secret):
    assert secret in text and secret not in redact(text) and "***" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b/c",
        "http://localhost:8000/v1/a@b",
        "git@github.com:a/b",
        "tokens: 5 n_tokens=7 tokenizer: x eos_token: </s> 'eos_token': '<s>' token 3",
        "the secret of life; no access key is needed",
        "--hf_assets_path assets/hf/model --tokenizer.added_tokens a",
        "train on 12:30@noon, hf_assets_path",
        "outputs/hf_checkpoint/hf_converted, runs/sk-experiment-number-12, basic misunderstandings",
    ],
)
def test_other_text_is_unchanged(text):
    assert redact(text) == text


def test_values():
    given = {
        "api_key": "dead",
        "a": [URL, 1, None, {"secret": "dead", "token": "beef"}],
        "password": "",
    }
    text = json.dumps(redacted(given))
    assert not any(secret in text for secret in (*SECRETS, "dead", "beef"))
    assert redacted({"n_tokens": 3, "tokenizer": {"x": "y"}}) == {
        "n_tokens": 3,
        "tokenizer": {"x": "y"},
    }


def test_every_way_out(tmp_path, capsys, monkeypatch):
    def fail() -> None:
        raise UserError(f"{URL} cannot be read")

    assert run_command("x", fail) == 2
    assert main([URL]) == 2
    with pytest.raises(SystemExit):
        main(["report", "--wrong", URL])
    assert main(["report", URL]) == 2
    _print_traceback(ValueError, ValueError(URL), None)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (URL,), None)
    print(_Formatter(colored=False, rank="0").format(record))
    print_table(open_console(), URL, ("column",), [[URL]])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert (
        not any(secret in text for secret in SECRETS) and text.count("***@bucket/data.jsonl") >= 6
    )
    assert not any(secret in str(identify_content(URL, "")) for secret in SECRETS)


def test_configurations_hold_none_and_say_so(tmp_path):
    resolved = ConfigManager().parse_args(
        ["--module", "llama3", "--config", "debugmodel", "--dataloader.dataset", URL]
    )
    resolved.save(tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert not any(secret in text for secret in SECRETS)
    [dataset] = yaml.safe_load(text)["dataloader"]["dataset"]
    with pytest.raises(
        UserError, match="lacks its credentials, which files of a run never contain"
    ):
        open_store(dataset)


def test_a_progress_bar_shows_escapes_and_no_credentials(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("torchtitan.tools.progress.SECONDS_BETWEEN_BARS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    title = f"a\x1b]0;title\x07[red]b {URL}"
    with progress(title, 10) as advance:
        advance(5)
        advance(1, title=f"{title} c")
    text = capsys.readouterr().err
    assert "a␛]0;title␇[red]b" in text and "\x1b]0;" not in text and "\x07" not in text
    assert not any(secret in text for secret in SECRETS)


def test_long_texts_are_searched_in_linear_time():
    """In quadratic time, this takes minutes."""
    text = 100_000 * "a."
    assert redact(text) == text
    assert redact(f"{text} s3://KEY:SECRET@bucket") == f"{text} s3://***@bucket"


STORED = "memory://KEYKEY:SECRETKEY@bucket"
"""A store whose library writes the user and the password of a URL as parts of a path."""


@pytest.fixture
def stored_text():
    store, root = open_store(STORED)
    texts = [f"the story of number {number}, which is long enough" for number in range(200)]
    store.pipe_file(
        f"{root}/data.jsonl", "\n".join(json.dumps({"text": text}) for text in texts).encode()
    )
    yield f"{STORED}/data.jsonl"
    store.rm(root, recursive=True)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_command_writes_or_prints_any(stored_text, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = f"--dataloader.cache_dir={tmp_path / 'cache'}"
    options = [
        "--dataloader.dataset",
        stored_text,
        "--debug.ledger",
        cache,
        *flags(TINY),
        "--training.steps=2",
    ]
    saving = ["--checkpoint.enable", "--checkpoint.folder", f"{STORED}/checkpoints"]
    resolved = ConfigManager().parse_args([*options, *saving])
    resolved.save(tmp_path / "config.yaml")
    run(resolved.config)
    monkeypatch.setenv("COMM_MODE", "fake_backend")
    train_options = [*options, "--dump_folder", "dry"]
    assert dry_run(ConfigManager().parse_args(train_options).config, 1)
    for command in (
        ["data", "inspect", *options, "--html", "page.html"],
        ["data", "show", *options, "--step", "1"],
        ["data", "show", *options, "--step", "1", "--dump_folder", "dry"],
        ["data", "prepare", stored_text, "--out", "prepared", "--workers", "1", cache],
        ["report", "outputs", "--output", "report.html"],
        ["report", "outputs", "--text"],
    ):
        assert main(command) == 0, command
    written = contents(tmp_path)
    assert {"config.yaml", "events.jsonl", "ledger.jsonl", "report.html", "page.html"} <= {
        path.name for path in written
    }
    assert [
        str(path)
        for path, content in written.items()
        if b"SECRETKEY" in content or b"KEYKEY" in content
    ] == []
    printed = capfd.readouterr()
    assert "SECRETKEY" not in printed.out + printed.err and "***@bucket" in printed.out


def test_the_names_of_runs_in_a_report_have_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "s3:" / "USERNAME:PASSWORD@bucket?X-Amz-Signature=dead"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\nbroken\n'
    )
    (folder / "config.yaml").write_text("module: [")
    for words in ([], ["--text"]):
        assert main(["report", "s3://USERNAME:PASSWORD@bucket?X-Amz-Signature=dead", *words]) == 0
    printed = capsys.readouterr()
    text = printed.out + printed.err + Path("report.html").read_text()
    assert (
        "PASSWORD" not in text
        and "=dead" not in text
        and text.count("s3:/***@bucket?X-Amz-Signature=***") >= 6
    )


def test_credentials_without_a_scheme_are_known_from_the_url():
    open_store("memory://USERNAME:PASS/WORD@bucket/x")
    text = "404: USERNAME:PASS/WORD@bucket/x, PASS/WORD"
    assert redact(text) == "404: ***@bucket/x, ***"


PRINTED_AS_IT_IS = {
    "cli/data.py": 3,  # names and descriptions of commands
    "cli/data_report.py": 6,  # what functions have made presentable, and tokens of data
    "cli/doctor.py": 1,  # numbers
    "cli/evaluate.py": 2,  # JSON that `redacted` has made
    "cli/generate.py": 2,  # numbers
    "cli/main.py": 2,  # constants
    "cli/mixture.py": 3,  # numbers
    "cli/plan.py": 1,  # numbers
    "cli/small_runs.py": 1,  # a number
    "cli/tokenizer.py": 2,  # numbers
    "components/rollout/math_process.py": 3,  # answers to the parent process
    "config/manager.py": 1,  # the name of a configuration that exists
    "foresight/this_machine.py": 1,  # answers to the parent process
    "tools/tables.py": 1,  # made presentable there
}
"""Calls in a file that print neither a constant nor the result of `presentable`, `for_output` or
`visible`."""


def name_of(function: ast.expr) -> str:
    """The name in a call, up to one dot; "" for others."""
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(owner), name):
            return f"{owner}.{name}"
    return ""


def test_whatever_is_printed_is_presentable():
    """A new call takes `presentable(…)`, or `for_output(…)` for the content of data and answers."""
    safe = {"presentable", "for_output", "visible"}
    found = Counter()
    for path in sorted((PROJECT / "torchtitan").rglob("*.py")):
        if {"assets", "templates", "experiments"} & set(path.parts) or path.name == "ls.py":
            continue
        for call in ast.walk(tree_of(path)):
            if isinstance(call, ast.Call) and name_of(call.func) in ("print", "console.print"):
                inner = [part.id for part in ast.walk(call) if isinstance(part, ast.Name)]
                constant = all(isinstance(value, ast.Constant) for value in call.args)
                if not constant and not safe & set(inner):
                    found[str(path.relative_to(PROJECT / "torchtitan"))] += 1
    assert found == PRINTED_AS_IT_IS


def test_user_names_are_no_secrets():
    """They may be parts of paths."""
    hide_credentials_of("sftp://ubuntu@host/data")
    assert redact("/home/ubuntu/outputs") == "/home/ubuntu/outputs"
    hide_credentials_of("https://0123456789abcdef0123@host/data")
    assert redact("token 0123456789abcdef0123 failed") == "token *** failed"


def test_ports_are_no_secrets():
    hide_credentials_of("https://host:8080/datasets/text@main")
    assert redact("cannot read host:8080/datasets/text") == "cannot read host:8080/datasets/text"
