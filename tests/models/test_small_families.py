"""Families stay small and separate: lines, fields, and no other file that knows one."""

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
SEVERAL_GENERATIONS = {"llama3", "gemma", "olmo", "granite", "phi3", "glm4", "qwen2", "mistral"}
SEVERAL_GENERATIONS |= {"qwen3_moe", "deepseek_v3", "gemma4"}
"""Or several designs of one generation."""
DEFAULT = "llama3"
"""The family of experiments and templates."""


def lines_in(files: list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_short(name: str) -> None:
    files = [file for file in (PACKAGE / "models" / name).glob("*.py") if file.name != "config_registry.py"]
    assert lines_in(files) <= (250 if name in SEVERAL_GENERATIONS else 150)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {DEFAULT}))
def test_no_other_file_knows_the_family(name: str) -> None:
    folder = PACKAGE / "models" / name
    others = [file for file in PACKAGE.rglob("*.py") if folder not in file.parents]
    mention = re.compile(rf"torchtitan\.models\.{name}\b")
    assert not [str(file) for file in others if mention.search(file.read_text())]


def test_package_of_any_class_is_short() -> None:
    assert lines_in(list((PACKAGE / "models" / ANY_CLASS).glob("*.py"))) <= 1500


def test_common_parts_are_short() -> None:
    of_experts = [COMMON / "latent_attention.py", *COMMON.glob("moe/*.py")]  # only DeepSeek's models have latents
    others = [*of_experts, COMMON / "cpu_attention.py"]  # a kernel
    assert lines_in([file for file in COMMON.glob("*.py") if file not in others]) <= 2500
    assert lines_in(of_experts) <= 950


def test_configurations_of_common_parts_have_few_fields() -> None:
    for file in COMMON.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
                assert len(fields) <= 10, f"{file.name}: {node.name}"
