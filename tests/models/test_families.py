"""A model family outside the package, with its converters, in every command: it is selected by
`--module` or an installed package, and never imported just because a checkpoint names it."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from tests.training import TINY, flags
from torchtitan.cli.main import main
from torchtitan.config.manager import ConfigManager
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

INIT = """
import dataclasses

from torchtitan.models import llama3
from torchtitan.models.families import Family

LLAMA = llama3.FORMATS["hf"]
FLAVORS = {"debugmodel": llama3.FLAVORS["debugmodel"]}
FORMATS = {
    "hf": dataclasses.replace(
        LLAMA,
        to_external=lambda config: {
            **LLAMA.to_external(config),
            "model_type": "homemade",
            "architectures": ["HomemadeForCausalLM"],
        },
        from_external=lambda document: LLAMA.from_external({**document, "model_type": "llama"}),
        model_types={"homemade": "HomemadeForCausalLM"},
    )
}
FAMILY = Family(module=__name__, flavors=FLAVORS, formats=FORMATS)
model_spec, model_registry = FAMILY.spec, FAMILY.registry
"""

REGISTRY = """
from homemade import model_registry
from homemade.converters import Mine
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def homemade_debugmodel():
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    return config


def llama3_with_mine():
    config = llama3_debugmodel()
    config.model_converters = [Mine.Config(rank=2)]
    return config
"""

CONVERTERS = """
from torchtitan.components.peft import LoRA


class Mine(LoRA):
    pass
"""


def run(*words: object) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        return exit_.code


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unload modules imported from outside the package after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("NGPU", "1")
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "homemade"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the family, its checkpoint and Hugging Face export, and a llama3 checkpoint
    with its converter."""
    place = tmp_path_factory.mktemp("workplace")
    (place / "homemade").mkdir()
    files = {"__init__.py": INIT, "config_registry.py": REGISTRY, "converters.py": CONVERTERS}
    for name, text in files.items():
        (place / "homemade" / name).write_text(text)
    module = ("--module", place / "homemade")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("NGPU", "1")
        for config, folder in (("debugmodel", "native"), ("llama3_with_mine", "converted")):
            options = ("--config", config, "--dump_folder", place / "run", "--checkpoint.enable")
            assert run("train", *module, *options, *flags({**TINY, "training.steps": 1})) == 0
            (place / "run/checkpoint/step-1").rename(place / folder)
            shutil.rmtree(place / "run")
        assert run("convert", *module, "--to", "hf", place / "native", place / "hf") == 0
    forget()
    return place


@pytest.fixture
def in_workplace(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the folder as current folder and on the import path, so that a careless import would find
    the family."""
    monkeypatch.chdir(workplace)
    sys.path.insert(0, str(workplace))
    return workplace


def words_of(command: str, checkpoint: str, out: Path) -> list[object]:
    (out / "text.txt").write_text("Once upon a time")
    model = ["--checkpoint", checkpoint, "--device", "cpu"]
    return {
        "generate": [command, *model, "--prompt", "Once", "--max_new_tokens", 4],
        "chat": [command, *model, "--chat_template", "chatml"],
        "eval": [command, *model, "--tasks", out / "text.txt"],
        "convert": [command, "--to", "dcp", checkpoint, out / "out"],
        "inspect": [command, checkpoint],
    }[command]


COMMANDS = ("generate", "chat", "eval", "convert", "inspect")
ADVICE = {
    "native": "package 'homemade', which is neither built in nor installed; if you trust that "
    "package, name it with "
    "--module PATH (its folder, or 'homemade' where Python finds it)",
    "hf": "--module PATH names a family of your own",
    "converted": "converter homemade.converters:Mine, which is not built in; if you trust it, set "
    "--module to the "
    "module whose config_registry.py imports it",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("checkpoint", ADVICE)
def test_checkpoint_does_not_import_its_family(in_workplace, tmp_path, capsys, command, checkpoint):
    """Every command gives the same message and imports nothing, though the family is in the current
    folder."""
    code = run(*words_of(command, checkpoint, tmp_path))
    out, error = capsys.readouterr()
    assert (code, error.count(ADVICE[checkpoint])) == (0 if command == "inspect" else 2, 1), error
    assert len(error.splitlines()) == 1
    assert not any(name.startswith("homemade") for name in sys.modules)
    if command == "inspect":
        assert "complete         yes" in out
        assert " tensors, " in out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("checkpoint", ADVICE)
def test_module_option_selects_the_family(
    in_workplace, tmp_path, monkeypatch, capsys, command, checkpoint
):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(*words_of(command, checkpoint, tmp_path), "--module", "./homemade") == 0
    out, error = capsys.readouterr()
    assert "--module" not in error
    if command == "generate":
        assert out.startswith("Once")


def test_exports_are_equal(in_workplace):
    sys.path.insert(0, str(in_workplace))
    import homemade  # type: ignore[import-not-found]

    tokens = torch.arange(20)[None]
    native, exported = (
        load_model(path, device="cpu", family=homemade) for path in ("native", "hf")
    )
    assert json.loads(Path("hf/config.json").read_text())["model_type"] == "homemade"
    assert exported.spec.name == native.spec.name == "homemade"
    assert torch.equal(native.model(tokens), exported.model(tokens))


@pytest.mark.parametrize("config", ["pretrain", "sft", "lora", "qlora"])
def test_module_option_trains_a_folder_of_its_family(in_workplace, config):
    """The family provides configurations of `auto`, which override the built-in ones."""
    words = ["--module", "./homemade", "--config", config, "--hf_assets_path", "hf"]
    resolved = ConfigManager().parse_args(words).config
    assert (resolved.model_spec.module, resolved.registered_as) == ("homemade", f"auto.{config}")
    assert resolved.checkpoint.initial_load_path == "hf"


def test_auto_does_not_import_an_unnamed_family(in_workplace):
    with pytest.raises(
        UserError, match="model_type is 'homemade'.*--module PATH names a family of your own"
    ):
        ConfigManager().parse_args(
            ["--module", "auto", "--config", "sft", "--hf_assets_path", "hf"]
        )
    assert "homemade" not in sys.modules


def test_configuration_of_the_family_overrides_auto(in_workplace, tmp_path):
    shutil.copytree("homemade", tmp_path / "homemade")
    file = tmp_path / "homemade/config_registry.py"
    own = "\n\ndef homemade_sft():\n    return llama3_debugmodel()\n"
    file.write_text(file.read_text() + own)
    resolved = ConfigManager().parse_args(
        ["--module", str(tmp_path / "homemade"), "--config", "sft"]
    )
    assert resolved.config.registered_as == "homemade.homemade_sft"


def test_wrong_module_is_reported(in_workplace, capsys):
    assert run("generate", "--checkpoint", "native", "--module", "llama3") == 2
    assert "; --module now names 'torchtitan.models.llama3'" in capsys.readouterr().err


def test_missing_module(in_workplace, tmp_path, capsys):
    for command in COMMANDS:
        assert run(*words_of(command, "native", tmp_path), "--module", "./nowhere") == 2
        assert "unknown module './nowhere': the folder does not exist" in capsys.readouterr().err


class TestInstalled:
    """A package whose entry point declares a family."""

    @pytest.fixture(autouse=True)
    def installed(self, in_workplace, tmp_path, monkeypatch):
        site = tmp_path / "site"
        shutil.copytree(in_workplace / "homemade", site / "homemade")
        (site / "own_models-1.0.dist-info").mkdir()
        (site / "own_models-1.0.dist-info/METADATA").write_text("Name: own-models\nVersion: 1.0\n")
        (site / "own_models-1.0.dist-info/entry_points.txt").write_text(
            "[torchtitan.models]\nours = homemade\n"
        )
        sys.path[:] = [str(site), *(path for path in sys.path if path != str(in_workplace))]
        self.site = site

    @pytest.mark.parametrize("command", ["generate", "convert", "inspect"])
    @pytest.mark.parametrize("checkpoint", ADVICE)
    def test_every_command_finds_the_family(self, tmp_path, capsys, command, checkpoint):
        assert run(*words_of(command, checkpoint, tmp_path)) == 0
        assert "--module" not in capsys.readouterr().err
        assert Path(sys.modules["homemade"].__file__).is_relative_to(self.site)

    def test_auto_finds_the_family(self):
        words = ["--module", "auto", "--config", "sft", "--hf_assets_path", "hf"]
        assert ConfigManager().parse_args(words).config.model_spec.module == "homemade"

    def test_trained_and_listed_by_name(self, tmp_path, capsys):
        words = flags({**TINY, "training.steps": 1, "dump_folder": tmp_path})
        assert run("train", "--module", "ours", "--config", "homemade_debugmodel", *words) == 0
        forget()
        capsys.readouterr()
        assert run("ls") == 0
        assert "ours\n  configs: homemade_debugmodel, llama3_with_mine\n" in capsys.readouterr().out
        assert "homemade" not in sys.modules

    def test_unknown_module_lists_it(self, capsys):
        assert run("train", "--module", "our") == 2
        assert "did you mean 'ours'? (there are: auto, " in capsys.readouterr().err


def test_removed_built_in_family(in_workplace, tmp_path):
    shutil.copytree("native", tmp_path / "native")
    file = tmp_path / "native/assets/model.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"module": "torchtitan.models.llama9"})
    )
    from torchtitan.models.pretrained import spec_of

    with pytest.raises(
        UserError, match="native holds a model of the package 'torchtitan.models.llama9': .*failed"
    ):
        spec_of(tmp_path / "native")


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom torchtitan.cli.main import COMMANDS, main\n"
        "of_data = [('data', name) for name in ('inspect', 'prepare', 'show')]\n"
        "of_folder = ('train', '--module', 'llama3', '--config', 'sft')\n"
        "for command in (*zip(COMMANDS), *of_data, of_folder):\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, command\n"
        "assert main(['report', 'no_run']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT
    )
    assert result.returncode == 0, result.stderr
