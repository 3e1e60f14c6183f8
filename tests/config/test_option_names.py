"""Mistakes in names, found without importing torch, with the same messages."""

import json
import subprocess
import sys

import pytest

from tests.config.test_config import parse
from tests.options_table import options_by_configuration
from torchtitan.config import manager, option_names, registry
from torchtitan.config.option_names import options_of
from torchtitan.config.registry import built_in_modules, load_config_function
from torchtitan.tools.errors import UserError


@pytest.mark.slow
def test_table_has_the_options_of_every_configuration():
    options = options_by_configuration()
    for module, configs in json.loads(option_names.TABLE.read_text())["configurations"].items():
        listed = {name: options_of(module, name) for name in configs}
        assert listed == options.pop(module), "run python -m tests.options_table"
    assert not any(options.values()), "run python -m tests.options_table"


@pytest.mark.parametrize("module", built_in_modules())
def test_unknown_configurations_have_one_message(module, monkeypatch):
    with pytest.raises(UserError, match="^unknown configuration 'nowhere'") as early:
        load_config_function(module, "nowhere")
    monkeypatch.setattr(registry, "_check_is_written", lambda module, config: None)
    with pytest.raises(UserError) as late:
        load_config_function(module, "nowhere")
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--training.stepz", "3"],
        ["--training.stepz=3"],
        ["--trainingz.steps", "3"],
        ["--stepz"],
        ["--validator.no_enablez"],
        ["--no-enablez"],
        ["--training.steps", "3", "--optimizer.lrz", "--loss.x"],
    ],
)
def test_unknown_options_have_one_message(words, monkeypatch):
    with pytest.raises(UserError, match="^unknown option ") as early:
        parse(*words)
    monkeypatch.setattr(manager, "certainly_unknown", lambda *words: None)
    with pytest.raises(UserError) as late:
        parse(*words)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "words",
    [["--config", "nowhere"], ["--module", "nowhere"], ["--training.stepz", "3"]],
)
def test_torch_is_not_imported(words):
    code = (
        "import sys; from torchtitan.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "train", *words], capture_output=True, text=True
    )
    assert result.returncode == 2 and "unknown" in result.stderr


def test_a_name_in_newer_source_than_the_table_is_looked_up(tmp_path, monkeypatch):
    table = tmp_path / "options.json"
    older = json.loads(option_names.TABLE.read_text())
    older["sections"] = [
        [name for name in section if name != "training.steps"] for section in older["sections"]
    ]
    table.write_text(json.dumps(older))
    monkeypatch.setattr(option_names, "TABLE", table)
    assert parse("--training.steps", "3").config.training.steps == 3
