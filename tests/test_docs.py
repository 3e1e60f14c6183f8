"""Code, links and options in the documentation."""

import ast
import re

import pytest

from tests.conftest import PROJECT

PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    *sorted((PROJECT / "docs").glob("*.md")),
]
SLOW_PAGES = (
    "configuration.md",
    "dry_run.md",
    "foresight.md",
    "memory_and_speed.md",
    "extending.md",
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind == language]


def documented_class(page, name):
    """Execute a class of a page with only its own lines and the page's imports; return the
    class."""
    body = [node for code in blocks(page, "python") for node in ast.parse(code).body]
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    (definition,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    namespace = {"__name__": f"documented_{name}"}
    exec(compile(ast.Module([*imports, definition], []), page.name, "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page.name in SLOW_PAGES else page
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """Run all blocks of a page in order, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for index, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, block {index + 1}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_options_in_commands_exist():
    """Every --section.key in a shell block is an option of a debug model: adapters, fine-tuning,
    distillation, flow matching, reinforcement learning, mixture of experts, classes of
    transformers."""
    from torchtitan.config.configurable import leaves
    from torchtitan.experiments.distillation.config_registry import distillation_debugmodel
    from torchtitan.experiments.flow_matching.config_registry import (
        dit_debugmodel,
        flux_captions,
    )
    from torchtitan.experiments.rl.config_registry import rl_debugmodel
    from torchtitan.models.glm4_moe.config_registry import glm4_moe_debugmodel
    from torchtitan.models.llama3.config_registry import (
        llama3_debugmodel_lora,
        llama3_debugmodel_sft,
    )
    from torchtitan.models.transformers.config_registry import transformers_debugmodel

    configs = [
        llama3_debugmodel_lora(),
        llama3_debugmodel_sft(),
        distillation_debugmodel(),
        dit_debugmodel(),
        flux_captions(),
        rl_debugmodel(),
    ]
    configs += [glm4_moe_debugmodel(), transformers_debugmodel()]
    known = {key for config in configs for key in leaves(config.to_dict())}
    known |= {f"{key.rpartition('.')[0]}.no_{key.rpartition('.')[2]}" for key in known}
    unknown, checked = [], 0
    for page in PAGES:
        for option in re.findall(r"--([a-z_]+\.[a-z_.]+[a-z_])", "\n".join(blocks(page, "bash"))):
            checked += 1
            if option not in known:
                unknown.append(f"{page.name}: --{option}")
    assert checked > 10
    assert unknown == []
