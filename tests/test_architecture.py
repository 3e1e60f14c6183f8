"""The layout of the package: who may import whom, and what importing costs."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

LAYERS = [
    "tools",
    "assets",
    "config",
    "protocols",
    "distributed",
    "components",
    "trainer_config",
    "trainer",
    "models",
    "experiments",
    "dry_run",
    "train",
    "cli",
    "__main__",
]
"""Lowest first: a module imports from its own layer and from those before it."""

PACKAGE = PROJECT / "torchtitan"


def imports_of(tree: ast.AST, package: str) -> list[str]:
    """Modules of this project that a module inside `package` imports."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [source] if source != "torchtitan" else [f"torchtitan.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("torchtitan.")]


def layer_of(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch, torchtitan.tools.device", ["torchtitan.tools.device"]),
        ("from torchtitan import trainer", ["torchtitan.trainer"]),
        ("from torchtitan.cli.main import main", ["torchtitan.cli.main"]),
        ("from . import job_config", ["torchtitan.config"]),
        ("from .registry import suggest", ["torchtitan.config.registry"]),
        ("from .. import trainer", ["torchtitan.trainer"]),
        ("def f():\n    from ..cli.main import main", ["torchtitan.cli.main"]),
    ],
)
def test_every_kind_of_import_is_seen(line, found):
    assert imports_of(ast.parse(line), "torchtitan.config") == found


def test_dependencies_point_downwards():
    upwards, checked = [], 0
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PROJECT).with_suffix("").as_posix().replace("/", ".")
        if own == "torchtitan.__init__":
            continue
        for name in imports_of(ast.parse(path.read_text()), own.rpartition(".")[0]):
            checked += 1
            if LAYERS.index(layer_of(name)) > LAYERS.index(layer_of(own)):
                upwards.append(f"{own} imports {name}")
    assert checked > 50
    assert upwards == []


def test_every_package_is_in_a_layer():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    found |= {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert found == set(LAYERS)


def test_importing_the_trainer_stays_cheap():
    """Heavy libraries are imported by the feature that needs them, when it is used."""
    heavy = ["datasets", "pandas", "pyarrow", "tensorboard", "wandb", "transformers", "torch.distributed.checkpoint"]
    code = f"import sys, torchtitan.trainer; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("files", [["__init__.py"], ["__init__.py", "cli/__init__.py"]])
def test_another_distribution_of_our_name_is_not_our_environment(tmp_path: Path, files: list[str]):
    """It has the package's name and not our command."""

    def suffices() -> bool:
        code = f"source {PROJECT}/scripts/environment.sh; active_environment_suffices ''"
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(["bash", "-c", code], env=environment, cwd=tmp_path).returncode == 0

    def install(names: list[str]) -> None:
        for name in names:
            (tmp_path / "site/torchtitan" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "site/torchtitan" / name).touch()

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # only what is installed here
    (tmp_path / "bin/python").chmod(0o755)
    assert not suffices()
    (tmp_path / "site/torchtitan-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site/torchtitan-1.0.dist-info/METADATA").write_text("Name: torchtitan\nVersion: 1.0\n")
    install(files)
    assert not suffices()
    install(["__init__.py", "cli/__init__.py", "cli/main.py"])
    assert suffices()
