"""Output to a terminal: text from files and models cannot control the terminal."""

import logging
import sys

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.cli.generate import _Printer
from torchtitan.cli.main import main
from torchtitan.cli.model_options import OpenedModel, run_command
from torchtitan.components.generation import Generation
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import _Formatter, visible

RED = "\x1b[31m"


def test_visible():
    assert visible("a\tb\n\x00\x7f\x9b\u2066é😀") == "a\tb\n␀\\u007f\\u009b\\u2066é😀"
    assert visible("plain") == "plain"


def test_errors_and_tables_show_escapes(tmp_path, capsys):
    save_file({f"weight{RED}": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "' + "\\u001b[31m" + '"}')
    assert main(["inspect", str(tmp_path), "--tensors"]) == 0
    printed = capsys.readouterr()
    assert "weight␛[31m" in printed.out and "model_type is" in printed.err
    (tmp_path / f"x{RED}").mkdir()
    assert main(["generate", "--checkpoint", str(tmp_path / f"x{RED}"), "--prompt", "a"]) == 2
    assert main([f"x{RED}"]) == 2
    printed_too = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err + printed_too.out + printed_too.err


def test_newlines_of_messages_are_kept(capsys):
    def fail() -> None:
        raise UserError(f"one\ntwo{RED}\r")

    assert run_command("x", fail) == 2
    assert capsys.readouterr().err == "torchtitan x: one\ntwo␛[31m␍\n"


def test_log_strips_foreign_colors():
    formatter = _Formatter(colored=True, rank="0")

    def line(message: str, **extra: bool) -> str:
        record = logging.LogRecord("x", logging.WARNING, "", 0, message, (), None)
        record.__dict__.update(extra)
        return formatter.format(record)

    assert line(f"a{RED}b").endswith("WARNING a␛[31mb\x1b[0m") and line("a").startswith("\x1b[33m")
    assert f"{RED}b" in line(f"a{RED}b", is_colored=True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_model_text_is_escaped_only_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    tokenizer = PretrainedTokenizer.Config().build()
    opened = OpenedModel(torch.nn.Module(), tokenizer, (), 8)
    ids = tokenizer.encode(f"ab{RED}c", add_bos=False, add_eos=False)
    for live in (True, False):
        texts = ["ab"] if live else ["ab", "ab"]
        printer = _Printer(opened, texts, [ids[:1]] * len(texts), [], as_json=False)
        for row in range(len(texts)):
            for token in ids[1:]:
                printer.on_token(row, token)
        printer.finish([Generation(ids)] * len(texts), 1, None)
        printed = capsys.readouterr().out
        assert (RED in printed) == (not is_terminal)
        assert ("␛[31m" in printed) == is_terminal
