"""Commands that tests fork behave like new interpreters: they fail, are killed, and leave nothing
behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.commands import RunningCommand, run_command

FORKED = "'torch' in sys.modules"
"""True in a forked process before any import."""


def python(code: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return run_command([sys.executable, "-c", code], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "exit_code", "printed"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('mistake')", 1, "mistake\n"),
        ("raise ValueError('mistake')", 1, "ValueError: mistake\n"),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_a_failure_is_that_of_a_new_interpreter(code: str, exit_code: int, printed: str) -> None:
    result = python(code)
    assert result.returncode == exit_code and result.stdout == ""
    assert result.stderr.endswith(printed) and ("Traceback" in result.stderr) == (
        "Error" in printed
    )


def test_a_check_raises() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        python("raise SystemExit(2)", check=True)


def test_a_command_that_takes_too_long_is_killed_with_its_processes(tmp_path: Path) -> None:
    code = f"""
import os, time
child = os.fork()
if child:
    open({str(tmp_path / "written")!r}, "w").write(f"{{os.getpid()}} {{child}}")
    os.rename({str(tmp_path / "written")!r}, {str(tmp_path / "pids")!r})
time.sleep(1000)
"""
    with pytest.raises(subprocess.TimeoutExpired):
        python(code, timeout=5)
    running = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 60
    while any(map(is_running, running)):
        assert time.monotonic() < deadline, running
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_signals_arrive() -> None:
    words = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(1000)"]
    for number, code in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)):
        with RunningCommand(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as command:
            assert command.stdout and command.stdout.readline() == "ready\n"
            command.send_signal(number)
            assert command.wait(60) == code


def test_nothing_stays_for_the_next_command(tmp_path: Path) -> None:
    found = (
        "os.environ.get('LEFT'), hasattr(torchtitan, 'left'), torch.is_grad_enabled(), sys.path[0]"
    )
    begin = "import os, sys, torch, torchtitan\n"
    change = "os.environ['LEFT'] = '1'; torchtitan.left = 1; torch.set_grad_enabled(False)\n"
    change += "sys.path.insert(0, '/left'); os.chdir('/')\n"
    report = f"print(({found}), os.getcwd())"
    before = python(begin + report, cwd=tmp_path).stdout
    assert before == f"(None, False, True, '') {tmp_path}\n"
    assert python(begin + change + report, cwd=tmp_path).stdout == "('1', True, False, '/left') /\n"
    assert python(begin + report, cwd=tmp_path).stdout == before
    assert "LEFT" not in os.environ


@pytest.mark.parametrize("variables", [{"ONLY": "this"}, {}])
def test_variables_are_those_given(variables: Mapping[str, str]) -> None:
    assert python("import os; print(dict(os.environ))", env=variables).stdout == f"{variables}\n"


STAGES = f"""
import sys
from torchtitan.cli.child import run_python
code = {f"import sys; print({FORKED}); print('error', file=sys.stderr); sys.exit(5)"!r}
log = open(sys.argv[1], "wb")
print(run_python(["-c", code], stdout=log, stderr=log), flush=True)
import subprocess
print(run_python(["-c", code], stdout=subprocess.PIPE), flush=True)
print(run_python(["-c", "import os; os.kill(os.getpid(), 9)"], stdout=None), flush=True)
"""


def test_stages_are_forked_and_fail_as_others(tmp_path: Path) -> None:
    """Stages of recipes, and runs of ladders."""
    result = run_command([sys.executable, "-c", STAGES, tmp_path / "log"], check=True)
    ended = "Ended(code={}, stopped_by=None, output={})"
    assert result.stdout.splitlines() == [
        ended.format(5, b""),
        ended.format(5, b"True\n"),
        ended.format(-9, b""),
    ]
    assert result.stderr == "error\n"
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["True", "error"]
