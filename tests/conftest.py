"""Fixtures for all tests."""

import contextlib
import gc
import logging
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.workers import Workers
from tests.processes import address_of_server, use_server
from torchtitan.components.tokenizer import PretrainedTokenizer, Tokenizer
from torchtitan.tools import device
from torchtitan.tools.logging import logger
from torchtitan.tools.process import COMMAND_VARIABLE

gc.disable()  # while the tests and the libraries that they need are imported

# Tiny models gain nothing from threads, and on a busy machine threads wait for each other.
torch.set_num_threads(1)

# A run first measures the machine's peak speed, longer than a tiny run takes. Tests measure only
# briefly, also in processes forked from `tests.preloaded`.
MEASUREMENT = device._CPU_SECONDS, device._CPU_SIZES
device._CPU_SECONDS, device._CPU_SIZES = 0.001, (128,)

PROJECT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a process of xdist the server of this one, from which tests fork."""
    node.workerinput["fork_server"] = address_of_server()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        use_server(config.workerinput["fork_server"])


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections, each of which would scan all of torch and
    transformers, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with real data for tests; skips the test if it is missing."""
    folder = Path(os.environ.get("TORCHTITAN_TEST_ASSETS", PROJECT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip(f"no test assets in {folder} (set TORCHTITAN_TEST_ASSETS)")
    return folder


@pytest.fixture(scope="session")
def stories(assets: Path) -> Path:
    """Hugging Face folder of a real model of 260K parameters."""
    return assets / "stories260K" / "hf-converted"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The built-in tokenizer."""
    return PretrainedTokenizer.Config().build()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Log messages of the package, from level INFO."""
    caplog.set_level(logging.INFO, logger="torchtitan")
    return caplog


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in an empty folder outside the package, with one process; unload the folder's modules
    after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setenv(COMMAND_VARIABLE, "set back afterwards")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Two processes with one process group, which run functions of a module."""
    with Workers(2) as workers:
        yield workers


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file raise OSError, as on a full disk (Python ignores
    SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Make this process end with a MemoryError if it takes `size` bytes more (Linux)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(autouse=True)
def own_log() -> None:
    """Undo the logging setup of commands that earlier tests called in this process, which bypasses
    `caplog`."""
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
