"""`torchtitan ls`: sizes of models, and the page of families."""

import pytest

from tests.conftest import PROJECT
from tests.models_page import page
from torchtitan.cli.main import main
from torchtitan.config.registry import built_in_modules
from torchtitan.models.families import families_with


def test_sizes_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page below has the sizes of all families."""
    two = {name: folder for name, folder in built_in_modules().items() if name in ("llama3", "qwen3")}
    monkeypatch.setattr("torchtitan.cli.ls.modules_on_disk", lambda: two)
    assert main(["ls"]) == 0
    printed = capsys.readouterr().out
    assert "flavors: debugmodel, 1B (1.24 B), 3B (3.21 B), 8B (8.03 B)" in printed
    assert "0.6B (596 M)" in printed
    assert printed.endswith("\nEvery family also has the configurations of auto, with --hf_assets_path DIR.\n")


def test_page_of_models_is_current() -> None:
    """docs/models.md is the output of the command that it names, and has every family."""
    printed = "\n".join(page()) + "\n"
    assert printed == (PROJECT / "docs/models.md").read_text()
    for family in families_with("hf"):
        assert f"| {family.__name__.rpartition('.')[2]} |" in printed
