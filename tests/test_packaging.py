"""The wheel's files and its use outside the checkout; versions and pins that several files
repeat."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import torchtitan
from tests.conftest import PROJECT
from tests.training import TINY, flags, read_metrics

METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """Package → version in constraints.txt."""
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a clean copy; folders of earlier builds in the checkout would hide missing
    files."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        PROJECT / "torchtitan", source / "torchtitan", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        source,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a program in a new environment with the wheel and the other packages of this
    environment."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", with_pip=False)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    # Folders named in a .pth file come after the environment's own, and .pth files in them (an
    # editable install of the checkout is one) have no effect.
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", home / "venv/bin/python", *install], check=True
    )

    def run(program: str, *words: str) -> str:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        environment |= {
            "TORCHTITAN_CACHE": str(home / "cache"),
            "OMP_NUM_THREADS": "1",
            "NGPU": "1",
        }
        command = [home / "venv/bin" / program, *words]
        result = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert Path(
        run("python", "-c", "import torchtitan; print(torchtitan.__file__)")
    ).is_relative_to(packages)
    return run


@pytest.mark.slow
def test_wheel_contains_every_file(wheel: Path):
    wanted = {
        path.relative_to(PROJECT).as_posix()
        for path in (PROJECT / "torchtitan").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if not name.partition("/")[0].endswith(".dist-info")} == wanted
    assert f"torchtitan-{torchtitan.__version__}.dist-info/licenses/LICENSE" in names


@pytest.mark.slow
def test_installed_command_works_in_another_folder(installed: Callable[..., str]):
    assert installed("torchtitan", "--version") == f"torchtitan {torchtitan.__version__}\n"
    assert "usage: torchtitan COMMAND" in installed("torchtitan", "--help")
    assert "llama3_debugmodel" in installed("torchtitan", "ls")
    installed("torchtitan", "new", "mine")
    installed("torchtitan", "new", "--plain-loop", "loop.py")
    home = Path(installed("python", "-c", "import os; print(os.getcwd())").strip())
    assert (home / "loop.py").exists()
    small = flags({**TINY, "training.steps": 2})
    installed("torchtitan", "train", "--module", "./mine", "--config", "debugmodel", *small)
    assert [step for (step,) in read_metrics(home / "outputs")] == [1, 2]
    chats = [
        "--config",
        "llama3_debugmodel_sft",
        *small,
        "--training.seq_len",
        "512",
        "--dump_folder",
        "sft",
    ]
    installed("torchtitan", "train", *chats)
    assert [step for (step,) in read_metrics(home / "sft")] == [1, 2]


TRAIN_AND_LIST_PACKAGES = """
import importlib.metadata, sys
from torchtitan.config.manager import ConfigManager
trainer = ConfigManager().parse_args(sys.argv[1:]).config.build()
trainer.train()
trainer.close()
owners = importlib.metadata.packages_distributions()
print(*sorted({name for module in sys.modules for name in owners.get(module.split(".")[0], [])}))
"""


def required(name: str, found: set[str]) -> set[str]:
    """Add a distribution and those that it requires to `found`; return it."""
    found.add(canonicalize_name(name))
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # of another platform
        return found
    for requirement in map(Requirement, lines):
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and canonicalize_name(requirement.name) not in found:
            required(requirement.name, found)
    return found


@pytest.mark.slow
def test_a_run_imports_only_what_the_wheel_requires(installed: Callable[..., str]):
    """The other packages of this environment would hide a missing requirement."""
    words = flags({**TINY, "training.steps": 1, "dump_folder": "listed"})
    imported = installed("python", "-c", TRAIN_AND_LIST_PACKAGES, "--module", "llama3", *words)
    names = {canonicalize_name(name) for name in imported.splitlines()[-1].split()}
    known: set[str] = set()
    for line in METADATA["dependencies"]:
        required(Requirement(line).name, known)
    assert {"torch", "tyro"} <= names
    assert names - known - {"torchtitan"} == set()


def strict_for(*modules: str) -> str:
    """Return mypy's configuration of the checkout, with `--strict` for some modules."""
    from mypy.main import process_options
    from mypy.options import PER_MODULE_OPTIONS

    found, default = (
        process_options(["--config-file=", *words, "-c", ""])[1].snapshot()
        for words in (["--strict"], [])
    )
    strict = {name: found[name] for name in PER_MODULE_OPTIONS if found[name] != default[name]}
    assert strict["disallow_any_generics"] and not strict["implicit_reexport"]
    checkout = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["mypy"]
    common = {name: value for name, value in checkout.items() if name not in ("files", "exclude")}
    sections = {"mypy": common, f"mypy-{','.join(modules)}": {"ignore_missing_imports": False}}
    sections[f"mypy-{','.join(modules)}"] |= strict
    return "".join(
        f"[{name}]\n" + "".join(f"{option} = {value}\n" for option, value in options.items())
        for name, options in sections.items()
    )


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return what mypy reports on a program in a folder of its own, in a new environment with a
    copy of the checkout that is installed as scripts/environment.sh installs it. The program and
    the package are checked as by `mypy --strict`; other packages as the checkout checks them, so
    that what an earlier `mypy` of the checkout has learned of torch is not found out again."""
    pytest.importorskip("pip")
    home = tmp_path_factory.mktemp("editable")
    source = home / "checkout"
    shutil.copytree(
        PROJECT / "torchtitan", source / "torchtitan", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    venv.create(home / "venv", with_pip=False)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    setting = re.search(
        r"--config-settings (\S+)", (PROJECT / "scripts" / "environment.sh").read_text()
    )
    assert setting
    install = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--ignore-installed",
    ]
    words = [*install, "--config-settings", setting[1], "--editable", source]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", home / "venv/bin/python", *words], check=True
    )
    elsewhere = home / "elsewhere"
    shutil.copytree(PROJECT / "tests" / "waves", elsewhere / "waves")
    (elsewhere / "mypy.ini").write_text(strict_for("program", "waves.*", "torchtitan.*"))
    if (learned := PROJECT / ".mypy_cache").is_dir():
        shutil.copytree(learned, elsewhere / ".mypy_cache")

    def check(program: str) -> str:
        (elsewhere / "program.py").write_text(program)
        # mypy asks the environment's Python for the paths of packages, also those in its .pth
        # files.
        command = [sys.executable, "-m", "mypy", "--python-executable", home / "venv/bin/python"]
        result = subprocess.run(
            [*command, "program.py"], cwd=elsewhere, capture_output=True, text=True, timeout=300
        )
        return result.stdout + result.stderr

    return check


CALLBACK = """
from torchtitan.trainer import Callback, StepResult


class StopAtLoss(Callback):
    def after_step(self, outcome: StepResult) -> None:
        if outcome.loss < 1 and self.trainer.config.training.gc_freq > 1:
            self.trainer.total_steps = self.trainer.steps
"""


@pytest.mark.slow
def test_mypy_accepts_an_experiment_outside_the_checkout(editable: Callable[[str], str]):
    report = editable("import waves.config_registry\n")
    assert report == "Success: no issues found in 1 source file\n"


@pytest.mark.slow
def test_mypy_follows_the_package_from_another_folder(editable: Callable[[str], str]):
    (example,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert editable(example) == "Success: no issues found in 1 source file\n"
    wrong = example.replace("local_batch_size=2", 'local_batch_size="2"').replace(
        'path=""', 'folder=""'
    )
    wrong += "\nnames: list = []\n"
    report = editable(wrong + "\nreveal_type(tokenizer)\nreveal_type(loader)\nreveal_type(model)\n")
    assert 'Missing type arguments for generic type "list"' in report
    assert (
        'Argument "local_batch_size" to "build" of "Config" has incompatible type "str"; expected '
        '"int"' in report
    )
    assert 'Unexpected keyword argument "folder" for "build" of "Config"' in report
    report_of_callback = editable(CALLBACK)
    assert (
        '"Run" has no attribute "steps"' in report_of_callback
        and "Found 1 error" in report_of_callback
    )
    for kind in (
        "pretrained.PretrainedTokenizer",
        "dataloader.PretrainDataLoader",
        "model.BaseModel",
    ):
        assert re.search(rf'Revealed type is "torchtitan\.[\w.]*{kind}"', report), report


def test_version_is_consistent():
    assert METADATA["dynamic"] == ["version"]
    assert (
        yaml.safe_load((PROJECT / "CITATION.cff").read_text())["version"] == torchtitan.__version__
    )


def test_every_development_dependency_is_pinned():
    extras = dict(METADATA["optional-dependencies"])
    del extras["vllm"]  # brings its own torch, and needs a GPU
    for name in (
        "openenv",
        "verifiers",
        "fla",
    ):  # not part of dev; their tests are skipped without them
        del extras[name]
    wanted = {re.match(r"[\w.-]+", line)[0].lower() for lines in extras.values() for line in lines}  # type: ignore[index]
    assert wanted - {"torchtitan"} <= set(pins())


def test_commit_hooks_use_the_pinned_versions():
    repositories = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {one["hooks"][0]["id"].partition("-")[0]: one.get("rev") for one in repositories}
    assert (hooks["ruff"], hooks["codespell"]) == (f"v{pins()['ruff']}", f"v{pins()['codespell']}")


def test_every_supported_python_is_tested():
    prefix = "Programming Language :: Python :: 3."
    supported = [
        f"3.{one.removeprefix(prefix)}" for one in METADATA["classifiers"] if one.startswith(prefix)
    ]
    workflow = yaml.safe_load((PROJECT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == supported
    assert METADATA["requires-python"] == f">={supported[0]}"
