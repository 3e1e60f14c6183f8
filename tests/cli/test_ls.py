"""`torchtitan ls`: sizes of models, and the page of families."""

import json
import subprocess
import sys

import pytest

from tests.conftest import PROJECT
from tests.model_sizes import short_name, sizes_of
from tests.models_page import page
from torchtitan.cli.ls import SIZES
from torchtitan.cli.main import main
from torchtitan.models.families import families_with


def test_sizes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    printed = capsys.readouterr().out
    assert "flavors: debugmodel, 1B (1.24 B), 3B (3.21 B), 8B (8.03 B)" in printed
    assert "0.6B (596 M)" in printed
    assert printed.endswith(
        "\nEvery language model also has the configurations of auto, with --hf_assets_path DIR.\n"
    )
    assert "\ndit\n  configs: none (models for another module)\n  flavors: " in printed


def test_nothing_slow_is_imported() -> None:
    script = (
        "import sys; from torchtitan.cli.main import main; main(['ls']); "
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    imported = finished.stderr.split()
    assert "torchtitan.cli.ls" in imported and "torch" not in imported


@pytest.mark.parametrize("name", [short_name(family) for family in families_with("hf")])
def test_table_of_sizes_is_current(name: str) -> None:
    [family] = [family for family in families_with("hf") if short_name(family) == name]
    assert json.loads(SIZES.read_text())[name] == sizes_of(family)


def test_page_of_models_is_current() -> None:
    """docs/models.md is the output of the command that it names, and has every family."""
    printed = "\n".join(page()) + "\n"
    assert printed == (PROJECT / "docs/models.md").read_text()
    for family in families_with("hf"):
        assert f"| {short_name(family)} |" in printed
