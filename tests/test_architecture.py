"""The layout of the package: who may import whom, and what importing costs."""

import ast
import subprocess
import sys

from tests.conftest import PROJECT

LAYERS = [
    "tools",
    "config",
    "protocols",
    "distributed",
    "components",
    "trainer",
    "models",
    "experiments",
    "train",
    "cli",
]
"""Lowest first: a module imports from its own layer and from those before it."""

PACKAGE = PROJECT / "torchtitan"


def imports_of(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += (
                [node.module] if node.module != "torchtitan" else [f"torchtitan.{alias.name}" for alias in node.names]
            )
    return [name for name in names if name.startswith("torchtitan.")]


def layer_of(name: str) -> str:
    return name.split(".")[1]


def test_dependencies_point_downwards():
    upwards, checked = [], 0
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PROJECT).with_suffix("").as_posix().replace("/", ".")
        if own == "torchtitan.__init__" or own.startswith("torchtitan.assets."):
            continue
        for name in imports_of(ast.parse(path.read_text())):
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
