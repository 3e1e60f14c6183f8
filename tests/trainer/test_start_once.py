"""A start decides once where it begins, reads each marker once, and builds each part once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.training import TINY, flags
from torchtitan import train
from torchtitan.components.checkpoint import catalog, manager
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import ConfigManager
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer
from torchtitan.trainer.config import Preflight


@dataclass
class Calls:
    """Numbers of calls that read what a start depends on: so far, and when a run began its
    steps."""

    so_far: Counter[str] = field(default_factory=Counter)
    before_steps: list[dict[str, int]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()

    def count(owner: Any, name: str, key: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.so_far[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(manager, "decide_start", "decisions")
    count(catalog, "list_checkpoints", "listings")
    count(catalog, "read_marker", "markers")
    count(PretrainedTokenizer, "__init__", "tokenizers")
    count(PretrainDataLoader, "_open", "loaders")
    count(PretrainDataLoader.Config, "validate", "validated loaders")
    run_steps = Trainer.run_steps

    def record(self: Trainer) -> Any:
        calls.before_steps.append(dict(calls.so_far))
        return run_steps(self)

    monkeypatch.setattr(Trainer, "run_steps", record)
    return calls


def words(folder: Path, **options: Any) -> list[str]:
    chosen = {
        **TINY,
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "dump_folder": str(folder),
    }
    return flags({**chosen, **{key.replace("__", "."): value for key, value in options.items()}})


def start(
    calls: Calls, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, int]:
    """Run `python -m torchtitan.train` in this process, and return the counts before its first
    step."""
    calls.so_far.clear()
    monkeypatch.setenv("TORCHTITAN_COMMAND", "")
    assert train.main(words(folder, **options)) == 0
    return calls.before_steps[-1]


def test_a_new_run_and_its_resumption(tmp_path, calls, monkeypatch):
    new = start(calls, tmp_path, monkeypatch, training__steps=4)
    # A second listing compares the space that checkpoints will take with the free space.
    once = {"decisions": 1, "listings": 2, "tokenizers": 1, "loaders": 1, "validated loaders": 2}
    assert new == once
    resumed = start(calls, tmp_path, monkeypatch, training__steps=6)
    # A third listing finds the checkpoints that a killed process should have removed.
    n_markers = 3 * 2 + 1  # of steps 2 and 4 in each listing, and of the verified step 4
    assert resumed == {**once, "listings": 3, "markers": n_markers}


def resolved(folder: Path, **options: Any) -> Any:
    return ConfigManager().parse_args(words(folder, **options)).config


def trained(config: Any) -> Trainer:
    trainer: Trainer = config.build()
    trainer.train()
    trainer.close()
    return trainer


def test_a_checkpoint_that_appears_after_the_check_counts(tmp_path, calls):
    """Another run may end between the check and the lock."""
    config = resolved(tmp_path, training__steps=6)
    config.preflight = config.check(1)
    assert config.preflight.start.start is None
    trained(resolved(tmp_path, training__steps=4))
    calls.so_far.clear()
    trainer = config.build()
    assert calls.so_far["decisions"] == 1 and trainer.start.start.checkpoint.step == 4
    trainer.load_checkpoint()
    assert trainer.step == 4
    trainer.close()


def test_a_configuration_that_was_checked_has_the_same_document(tmp_path):
    config = resolved(tmp_path)
    before = config.to_dict()
    config.preflight = config.check(1)
    assert isinstance(config.preflight, Preflight)
    assert config.to_dict() == before and "preflight" not in before
    with pytest.raises(UserError, match="unknown option --preflight"):
        ConfigManager().parse_args(["--preflight", "x"])
