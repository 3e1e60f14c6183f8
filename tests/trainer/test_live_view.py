"""The bar on a terminal: a pseudo terminal gets whole log lines and the bar, others only the
log."""

import contextlib
import io
import logging
import os
import pty
import re
import signal
import sys
import threading

import pytest

from tests.training import run, tiny_config
from torchtitan.cli.launch import _stop
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.progress import progress
from torchtitan.trainer import Trainer

WIDTH = 110


class Terminal:
    """A pseudo terminal as standard error. `text` is everything written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.text = ""
        self._master, slave = pty.openpty()
        self._file = open(slave, "w", buffering=1)
        monkeypatch.setattr(sys, "stderr", self._file)
        for name, value in {"COLUMNS": WIDTH, "LINES": 24, "TERM": "xterm-256color"}.items():
            monkeypatch.setenv(name, str(value))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while content := os.read(self._master, 4096):
                self.text += content.decode()
        except OSError:  # closed
            pass

    def close(self) -> str:
        self._file.close()
        self._reader.join()
        os.close(self._master)
        return self.text


def screen(text: str) -> list[str]:
    """Return the lines that a tall terminal shows after this text: only the movements that the bar
    needs."""
    lines, row, column = [""], 0, 0
    for control, piece in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", text):
        if piece:
            lines[row] = (
                lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            )
            column += len(piece)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif control == "\x1b[2K":
            lines[row] = ""
        elif control.endswith("A"):
            row -= int(control[2:-1] or 1)
        else:
            assert re.fullmatch(r"\x1b\[([\d;]*m|\?25[hl])", control), control
    return lines


class Talkative(Trainer):
    """Logs a long line, and prints to standard error, in the middle of the run."""

    def use_result(self, outcome, *step, **progress):
        super().use_result(outcome, *step, **progress)
        if self.step == 2:
            logger.warning("a long line " * 30 + "ends")
            print("from a library", file=sys.stderr)
        if self.step == 3 and self.config.debug.seed == 7:
            raise RuntimeError("stopped here")


@pytest.fixture
def slow_clock(monkeypatch) -> None:
    """Draw the bar after every step, however short."""
    monkeypatch.setattr("torchtitan.tools.progress.SECONDS_BETWEEN_BARS", -1.0)


@pytest.mark.usefixtures("slow_clock")
@pytest.mark.parametrize("seed", [1, 7])
def test_terminal_shows_a_bar_below_whole_log_lines(tmp_path, monkeypatch, seed):
    terminal = Terminal(monkeypatch)
    init_logger()
    config, of_user = (
        tiny_config(tmp_path, debug__seed=seed),
        logging.FileHandler(tmp_path / "log.txt"),
    )
    with contextlib.closing(of_user):
        logger.addHandler(of_user)
        with (
            pytest.raises(RuntimeError, match="stopped here")
            if seed == 7
            else contextlib.nullcontext()
        ):
            run(config, Talkative)
        logger.info("after the run")
    assert (tmp_path / "log.txt").read_text().count("a long line " * 30 + "ends\n") == 1
    text = terminal.close()
    bars = re.findall(
        r"step (\d)/4 ([▁-█]+) loss (\d+\.\d+)( +[\d,]+ tokens/s)? +━",
        re.sub(r"\x1b\[[\d;]*m", "", text),
    )
    # drawn again below each log line
    shown_bars = [*dict.fromkeys((step, len(losses)) for step, losses, *_ in bars)]
    assert {step for step, *_, speed in bars if not speed} == {"1"}, (
        "the speed is known from the second step on"
    )
    assert shown_bars == [("1", 1), ("2", 2), ("3", 3), ("4", 4)][: 4 if seed == 1 else 3]
    shown = screen(text)
    assert [line for line in shown if "━" in line] == []  # the bar is gone
    assert re.fullmatch(r"[\d:]+ INFO after the run", shown[-2]) and shown[-1] == ""
    logged = [line for line in shown if re.match(r"\d\d:\d\d:\d\d (INFO|WARNING)", line)]
    assert sum(" INFO step " in line for line in logged) == (4 if seed == 1 else 3)
    assert (
        any(line.endswith("a long line " * 30 + "ends") for line in logged)
        and "from a library" in shown
    )
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is hidden"


class Rewarded(Trainer):
    measures_named = ("rewards/margins", "rewards/chosen", "rewards/accuracies")

    def compute_loss(self, batch):
        loss, weight = super().compute_loss(batch)
        for name, value in zip(self.measures_named, (0.25, 0.5, 0.75), strict=True):
            self.measure(name, value * weight, weight)
        return loss, weight


@pytest.mark.usefixtures("slow_clock")
def test_the_bar_shows_rewards(tmp_path, monkeypatch):
    terminal = Terminal(monkeypatch)
    init_logger()
    run(tiny_config(tmp_path, training__steps=2), Rewarded)
    text = re.sub(r"\x1b\[[\d;]*m", "", terminal.close())
    assert re.search(r"step 1/2 ▁? ?.* loss \d+\.\d+  margin 0\.25  accuracy 0\.75", text)
    assert "rewards/" not in text


@pytest.mark.usefixtures("slow_clock")
@pytest.mark.parametrize("option", ["--metrics.no_enable_live_view", "LOG_RANK=0,1", "no terminal"])
def test_no_bar(tmp_path, monkeypatch, capsys, option):
    terminal = Terminal(monkeypatch) if option != "no terminal" else None
    if "=" in option:
        monkeypatch.setenv(*option.split("="))
    init_logger()
    run(tiny_config(tmp_path, metrics__enable_live_view=not option.startswith("--")))
    text = terminal.close() if terminal else capsys.readouterr().err
    assert " INFO step 4/4  loss" in re.sub(r"\x1b\[[\d;]*m", "", text).replace(
        "INFO \x1b", "INFO "
    )
    assert "━" not in text and "\x1b[2K" not in text and "▁" not in text


def test_a_file_gets_no_control_characters(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("title", 2) as advance:
        advance(1)
    assert capfd.readouterr().err == ""


def test_warning_of_the_launcher_replaces_the_bar(monkeypatch):
    terminal = Terminal(monkeypatch)
    init_logger()
    print(
        "step 3/4 ━━━━━━━━━ loss 2.3026  1,000 tokens/s  ETA 0:00:01^C",
        end="",
        file=sys.stderr,
        flush=True,
    )
    _stop([], signal.SIGINT)
    first, rest = screen(terminal.close())
    assert (
        re.fullmatch(r"[\d:]+ WARNING SIGINT received: the run stops after this step.*", first)
        and rest == ""
    )


def test_stop_signal_during_a_write_to_the_terminal(monkeypatch):
    terminal = Terminal(monkeypatch)
    init_logger()

    received = []
    others = threading.enumerate()

    class Interrupted(io.FileIO):
        def write(self, content):
            if not received:
                received.append(_stop([], signal.SIGINT))
            return super().write(content)

    raw = Interrupted(sys.stderr.fileno(), "w", closefd=False)
    monkeypatch.setattr(
        sys, "stderr", io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    )
    print("a line", file=sys.stderr)
    for thread in {*threading.enumerate()} - {*others}:
        thread.join()
    first, second, rest = screen(terminal.close())
    assert first == "a line" and "WARNING SIGINT received" in second and rest == ""
