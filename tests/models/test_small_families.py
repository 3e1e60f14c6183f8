"""Families stay separate: no other file knows one, and configurations of common parts have few
fields."""

import ast
import re
from pathlib import Path

import pytest

import torchtitan
from torchtitan.config.registry import built_in_modules

PACKAGE = Path(torchtitan.__path__[0])
COMMON = PACKAGE / "models/common"
ANY_CLASS = "transformers"
"""The package for models of no family."""
FAMILIES = sorted(
    folder.name
    for folder in built_in_modules().values()
    if folder.parent.name == "models" and folder.name not in ("auto", ANY_CLASS)
)
DENOISERS = ("dit", "flux")
"""Families of no language model; their debug models train by `experiments/flow_matching`."""
DEFAULT = "llama3"
"""The family of experiments and templates."""


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {DEFAULT}))
def test_no_other_file_knows_the_family(name: str) -> None:
    folder = PACKAGE / "models" / name
    others = [file for file in PACKAGE.rglob("*.py") if folder not in file.parents]
    mention = re.compile(rf"torchtitan\.models\.{name}\b")
    assert not [str(file) for file in others if mention.search(file.read_text())]


def test_configurations_of_common_parts_have_few_fields() -> None:
    for file in COMMON.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(d) for d in node.decorator_list
            ):
                fields = [
                    statement for statement in node.body if isinstance(statement, ast.AnnAssign)
                ]
                assert len(fields) <= 10, f"{file.name}: {node.name}"
