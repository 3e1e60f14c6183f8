"""Credentials leave in no message, log, record or report."""

import json
import logging
import sys

import pytest
import yaml

from torchtitan.cli.main import main
from torchtitan.cli.model_options import run_command
from torchtitan.components.checkpoint.filesystem import open_store
from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.config import ConfigManager
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import _Formatter, _print_traceback
from torchtitan.tools.progress import progress
from torchtitan.tools.redact import redact, redacted
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
    given = {"api_key": "dead", "a": [URL, 1, None, {"secret": "dead", "token": "beef"}], "password": ""}
    text = json.dumps(redacted(given))
    assert not any(secret in text for secret in (*SECRETS, "dead", "beef"))
    assert redacted({"n_tokens": 3, "tokenizer": {"x": "y"}}) == {"n_tokens": 3, "tokenizer": {"x": "y"}}


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
    assert not any(secret in text for secret in SECRETS) and text.count("***@bucket/data.jsonl") >= 6
    assert not any(secret in str(identify_content(URL, "")) for secret in SECRETS)


def test_configurations_hold_none_and_say_so(tmp_path):
    resolved = ConfigManager().parse_args(["--module", "llama3", "--config", "debugmodel", "--dataloader.dataset", URL])
    resolved.save(tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert not any(secret in text for secret in SECRETS)
    [dataset] = yaml.safe_load(text)["dataloader"]["dataset"]
    with pytest.raises(UserError, match="is without its credentials, which files of a run never contain"):
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
