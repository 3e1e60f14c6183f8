"""A damaged assets/model.json: runs fall back to the previous checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import training
from torchtitan.components.peft import LoRA
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LORA = LoRA.Config(rank=4, alpha=8.0)
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 1, "training__steps": 2}

DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "garbled": lambda file: file.write_bytes(b"\0" * file.stat().st_size),
    "other converters": lambda file: file.write_text(
        file.read_text().replace('"alpha": 8.0', '"alpha": 9.0')
    ),
}


def train(folder: Path, *, converters: bool, **options: Any) -> Any:
    return training.train(folder, *([LORA] if converters else []), **{**SAVING, **options})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(folder, converters=False)
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    train(folder, converters=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("plain", "empty"),
        ("adapted", "garbled"),
        ("adapted", "missing"),
        ("adapted", "other converters"),
    ],
)
def test_falls_back_to_the_previous_checkpoint(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, damage: str
) -> None:
    shutil.copytree(request.getfixturevalue(kind), tmp_path / "run")
    newest, converters = tmp_path / "run/checkpoint/step-2", kind == "adapted"
    DAMAGE[damage](newest / "assets/model.json")
    message = f"{newest} is damaged: assets/model.json .*; load another checkpoint"
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", converters=converters, checkpoint__load_step=2)
    with pytest.raises(UserError, match=message):
        train(tmp_path / "new", converters=converters, checkpoint__initial_load_path=newest)
    trainer = train(tmp_path / "run", converters=converters, training__steps=3)
    assert trainer.step == 3 and trainer.checkpointer._resumed_step == 1
