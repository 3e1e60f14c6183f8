"""Run Python commands in processes forked from one that has already imported the libraries. This
replaces `subprocess` in tests and saves the seconds that a new interpreter takes to import them.
Tests of interpreter startup, such as the import path or variables read on import, use
`subprocess`."""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from tests.processes import forking, use_default_start_method


def run_command(
    words: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `words`, which begin with `sys.executable`, and return the exit code, standard output and
    error.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds; the command and its processes are
            killed.
        subprocess.CalledProcessError: for an exit code other than 0, with `check`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with RunningCommand(
        words, cwd=cwd, env=env, **pipes, text=True, start_new_session=True
    ) as command:
        try:
            stdout, stderr = command.communicate(timeout)
        finally:
            command.kill_group()
    result = subprocess.CompletedProcess(words, command.wait(), stdout, stderr)
    if check:
        result.check_returncode()
    return result


class RunningCommand:
    """A command that was started, with the parameters, attributes and methods of `subprocess.Popen`
    that tests use."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ):
        program, *rest = map(str, words)
        assert program == sys.executable
        self.args = words
        ours: list[IO[Any] | None] = []
        theirs: list[int] = []
        for number, target in ((1, stdout), (2, stderr)):
            reader, writer = self._open(number, target)
            theirs.append(writer)
            ours.append(None if reader is None else open(reader, "r" if text else "rb"))
        self.stdout, self.stderr = ours
        environment = dict(os.environ if env is None else env)
        started = _Start(rest, str(cwd or os.getcwd()), environment, theirs, start_new_session)
        self._process = forking().Process(target=started.run)
        self._process.start()
        for writer in theirs:
            os.close(writer)
        assert self._process.pid
        self.pid = self._process.pid

    @staticmethod
    def _open(number: int, target: int | None) -> tuple[int | None, int]:
        if target == subprocess.PIPE:
            return os.pipe()
        if target == subprocess.DEVNULL:
            return None, os.open(os.devnull, os.O_WRONLY)
        return None, os.dup(number if target is None else target)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; minus the number of the signal that ended the command."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read standard output and error to their ends, and wait."""
        texts: list[Any] = [None, None]

        def read(index: int, file: IO[Any]) -> None:
            texts[index] = file.read()

        pipes = [(index, file) for index, file in enumerate((self.stdout, self.stderr)) if file]
        readers = [threading.Thread(target=read, args=pipe, daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout or 0)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """Kill the command and its processes; for `start_new_session`."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for file in (self.stdout, self.stderr):
            if file:
                file.close()


class _Start:
    """The data that a new process needs to become the command; sent to it."""

    def __init__(
        self,
        words: list[str],
        folder: str,
        environment: dict[str, str],
        output: list[int],
        session: bool,
    ):
        self.words, self.folder, self.environment, self.output = words, folder, environment, output
        self.session = session

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"output": [reduction.DupFd(number) for number in self.output]}

    def run(self) -> NoReturn:
        from tests.preloaded import PATH

        opened = [sent.detach() for sent in self.output]  # type: ignore[attr-defined]
        for number, descriptor in enumerate(opened, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if self.session:
            os.setsid()
        os.chdir(self.folder)
        import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as elastic
        import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic_rendezvous

        import torchtitan.cli.child as child
        import torchtitan.cli.launch as launcher

        # Ranks, also torchrun's, stages of recipes and runs of ladders are forked from this process.
        forks = types.SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE)
        assert child.subprocess is launcher.subprocess is subprocess
        launcher.subprocess = child.subprocess = forks  # type: ignore[assignment]
        elastic.Popen = _fork_rank_of_torchrun  # type: ignore[assignment, misc]
        # It names its caller in records of each meeting by `inspect.stack`, which reads the source
        # files of all imported modules: two thirds of the time of an elastic run.
        dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
        _become(self.words, self.environment, PATH)


def _fork_rank_of_torchrun(
    *, args: Sequence[str], stdout: None, stderr: None, **options: Any
) -> "_Forked":
    """Fork a rank whose output is the agent's."""
    return _Forked(args, **options)


class _Forked:
    """`subprocess.Popen` as the launcher, torchrun and `torchtitan.cli.child` use it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        stdin: int = 0,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | None = None,
        preexec_fn: Callable[[], None] | None = None,
        start_new_session: bool = False,
    ):
        from tests.preloaded import PATH

        self.returncode: int | None = None
        reader = None
        if stdout == subprocess.PIPE:
            reader, writer = os.pipe()
        else:
            assert not isinstance(stdout, int)
            writer = 1 if stdout is None else stdout.fileno()
        errors = 2 if stderr is None else stderr.fileno()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                if start_new_session:
                    os.setsid()
                os.dup2(stdin, 0)
                os.dup2(errors, 2)
                os.dup2(writer, 1)
                # Including the launcher's connections to the ranks; it holds only one end of each.
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                for number in signal.valid_signals():  # as `exec` does; torchrun handles several
                    if callable(signal.getsignal(number)):
                        signal.signal(number, signal.SIG_DFL)
                if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does
                if preexec_fn:
                    preexec_fn()
                _become(list(command[1:]), dict(os.environ) if env is None else env, PATH)
            finally:
                os._exit(1)
        self._output = None if reader is None else open(reader, "rb")
        if self._output:
            os.close(writer)

    def communicate(self) -> tuple[bytes | None, None]:
        """Read standard output, if it is a pipe, to its end, and wait."""
        output = None
        if self._output:
            with self._output:
                output = self._output.read()
        self.wait()
        return output, None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        if timeout is None:
            return self._wait(0)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.01)
        return self.returncode

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # A signal handler may call this within `wait`.
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(words: list[str], environment: Mapping[str, str], path: Sequence[str]) -> NoReturn:
    """Act as a new interpreter with these words and environment variables, and exit as it would."""
    use_default_start_method()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    safe = words[0] == "-P"
    unbuffered = words[0] == "-u"
    kind, *words = words[safe or unbuffered :]
    begin: Callable[[], Any]
    if kind == "-m":
        name, *words = words
        sys.argv = ["-m", *words]
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # `runpy` warns about a module that is already imported
        first, begin = (
            os.getcwd(),
            lambda: runpy.run_module(name, run_name="__main__", alter_sys=True),
        )
    elif kind == "-c":
        text, *words = words
        sys.argv = ["-c", *words]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        first, begin = "", lambda: exec(compile(text, "<string>", "exec"), module.__dict__)
    else:
        sys.argv = [kind, *words]
        first, begin = str(Path(kind).parent), lambda: runpy.run_path(kind, run_name="__main__")
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*([] if safe else [first]), *added, *path]
    code = 0
    try:
        begin()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
