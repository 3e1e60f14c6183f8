"""Commands that write conversions, exports and caches. Each is interrupted repeatedly; a folder
with its final name must equal the result of an uninterrupted command."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import PROJECT
from tests.kill_test.attempts import AttemptFailed
from tests.kill_test.disks import Disk
from tests.kill_test.modes import RUN, Options
from tests.training import flags

_SECONDS = 300
_POLL_SECONDS = 0.001
_BUILD_CACHE = """
import sys
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.tokenizer import PretrainedTokenizer

open_token_cache(resolve_source(sys.argv[1]), PretrainedTokenizer.Config().build(path=""), sys.argv[2])
"""

Content = Mapping[str, str]
"""Return the digest of each file of a folder, by name."""


@dataclass(frozen=True)
class Work:
    """A command and the location of its output."""

    name: str

    command: Callable[["Materials", Path], list[str]]
    """Return its words for an output folder."""

    product: str
    """Pattern of a complete output's name in the folder."""


@dataclass(frozen=True)
class Materials:
    """Inputs of the commands."""

    dataset: Path

    checkpoint: Path
    """The checkpoint of a short run."""


def make_materials(dataset: Path, folder: Path) -> Materials:
    """Train one step in `folder`."""
    materials = Materials(dataset, folder / "checkpoint" / "step-1")
    _run(
        Work("run", lambda materials, folder: _train(materials, folder), ""),
        materials,
        folder,
        None,
    )
    return materials


def _train(materials: Materials, folder: Path, **options: object) -> list[str]:
    """Train and save one step."""
    settings: Options = {
        **RUN,
        "dataloader.dataset": materials.dataset,
        "dump_folder": folder,
        "training.steps": 1,
    }
    module = ["--module", "tests.kill_test", "--config", "noisy_debugmodel"]
    return ["-m", "torchtitan.cli.main", "train", *module, *flags({**settings, **options})]


WORKS = (
    Work(
        "conversion",
        lambda materials, folder: [
            "-m",
            "torchtitan.cli.main",
            "convert",
            str(materials.checkpoint),
            str(folder / "out"),
            "--to",
            "hf",
            "--max_shard_size",
            "0.01",
        ],
        "out",
    ),
    Work(
        "export of a run",
        lambda materials, folder: _train(
            materials, folder / "run", **{"checkpoint.last_save_in_hf": True}
        ),
        "run/checkpoint/step-1",
    ),
    Work(
        "token cache",
        lambda materials, folder: [
            "-c",
            _BUILD_CACHE,
            str(materials.dataset),
            str(folder / "cache"),
        ],
        "cache/tokens/*[!k]",  # not .lock
    ),
)


def end_repeatedly(
    work: Work, materials: Materials, disk: Disk, ends: int, generator: random.Random
) -> tuple[int, list[str]]:
    """Interrupt the command `ends` times, by a signal or a power cut of `disk`; then let it finish.

    Returns:
        The number of interruptions that left an incomplete output, and the faults.

    Raises:
        AttemptFailed: if the command ends unexpectedly.
    """
    folder = disk.path / "work"
    n_halfway, faults = 0, []
    folder.mkdir()
    longest = _run(work, materials, folder, None)
    expected = _products(work, folder)
    assert len(expected) == 1, f"{work.name} has one product, and not {list(expected)}"
    shutil.rmtree(folder)
    for _ in range(ends):
        folder.mkdir(exist_ok=True)
        how = generator.choice(
            (None, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        )
        _run(work, materials, folder, _Ending(generator.random() ** 2 * longest, how, disk))
        if products := _products(work, folder):
            faults += (
                [] if products == expected else [f"after {how or 'a power cut'}: another product"]
            )
            shutil.rmtree(folder)
        else:
            n_halfway += any(folder.rglob("*"))
    folder.mkdir(exist_ok=True)
    _run(work, materials, folder, None)
    if _products(work, folder) != expected:
        faults.append("the last one, undisturbed, has another product")
    if left := [path.name for path in folder.rglob("*") if path.suffix in (".partial", ".tmp")]:
        faults.append(f"left behind: {', '.join(left)}")
    return n_halfway, faults


@dataclass(frozen=True)
class _Ending:
    """An interruption some time after the first file, by a signal or (None) a power cut."""

    delay: float
    signal: int | None
    disk: Disk


def _run(work: Work, materials: Materials, folder: Path, ending: _Ending | None) -> float:
    """Run the command to its end or to `ending`; return the seconds since its first file."""
    environment = {**os.environ, "NGPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment["TORCHTITAN_CACHE"] = str(materials.dataset.parent / "cache")
    before = _inodes(folder)
    process = subprocess.Popen(
        [sys.executable, *work.command(materials, folder)],
        cwd=materials.dataset.parent,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while process.poll() is None and _inodes(folder) <= before:
            time.sleep(_POLL_SECONDS)
        started = time.monotonic()
        try:
            process.wait(ending.delay if ending else _SECONDS)
        except subprocess.TimeoutExpired:
            if ending is None:
                raise
            _end(process, ending)
        seconds = time.monotonic() - started
        assert process.stderr
        printed = process.stderr.read()
        if process.returncode not in (0, -(ending.signal or signal.SIGKILL) if ending else 0):
            raise AttemptFailed(f"{work.name}, exit code {process.returncode}:\n{printed}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if ending and ending.signal is None:
            ending.disk.restart()
    return seconds


def _end(process: "subprocess.Popen[str]", ending: _Ending) -> None:
    if ending.signal is None:
        ending.disk.cut_power()
    os.killpg(process.pid, ending.signal or signal.SIGKILL)
    process.wait(_SECONDS)


def _inodes(folder: Path) -> set[int]:
    return {entry.inode() for place, *_ in os.walk(folder) for entry in _entries(place)}


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:  # it has been removed in the meantime
        return []


def _products(work: Work, folder: Path) -> dict[str, Content]:
    """Return the contents of each folder with a final name; checkpoints also need their last
    file."""
    found = [path for path in folder.glob(work.product) if path.suffix != ".partial"]
    return {
        path.name: _content(path)
        for path in found
        if path.name != "step-1" or (path / "complete.json").exists()
    }


def _content(folder: Path) -> Content:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "complete.json"]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
