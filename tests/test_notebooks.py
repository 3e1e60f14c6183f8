"""The notebooks run, as a kernel with IPython's commands would run them, and are committed without
results."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.training import read_metrics
from torchtitan.cli.main import main

NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def run(name: str) -> dict[str, Any]:
    """Run the code of a notebook in this folder; return its variables. Commands, which begin with
    `!torchtitan`, run without another process, with the values of variables in braces."""
    variables: dict[str, Any] = {}
    for index, cell in enumerate(cells(PROJECT / "notebooks" / f"{name}.ipynb", "code")):
        code = "".join(cell["source"])
        if code.startswith("!"):
            code = re.sub(r"\{(\w+)\}", lambda match: str(variables[match[1]]), code)
            command, *words = shlex.split(code[1:].replace("\\\n", " "))
            assert command == "torchtitan" and main(words) == 0, code
        else:
            exec(compile(code, f"{name}, cell {index + 1}", "exec"), variables)
    return variables


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_results(path: Path):
    document = json.loads(path.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert set(document["metadata"]) == {"kernelspec", "language_info"}
    ids = [cell["id"] for cell in document["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch("[a-z0-9-]+", one) for one in ids)
    for cell in cells(path, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert "".join(cells(path, "markdown")[0]["source"]).startswith("# ")


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
def test_first_run(capfd: pytest.CaptureFixture[str]):
    losses = run("first_run")["losses"]
    assert losses[1] == pytest.approx(math.log(2048), abs=0.3) and losses[100] < losses[1] - 2
    assert "Once upon a time" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
def test_fine_tune_your_data(capfd: pytest.CaptureFixture[str]):
    run("fine_tune_your_data")
    assert [step for (step,) in read_metrics(Path("outputs/tuned"))][-1] == 100
    assert capfd.readouterr().out.rstrip().endswith("Moo.")


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
def test_read_a_run(capfd: pytest.CaptureFixture[str]):
    variables = run("read_a_run")
    code = cells(PROJECT / "notebooks/read_a_run.ipynb", "code")
    assert str(code).count(str(variables["RUN"])) == 1, "a user sets the folder in one place"
    assert variables["CHECKPOINT"].name == "step-100"
    assert list(variables["validation"]) == [20, 40, 60, 80, 100]
    assert variables["validation"].keys() <= variables["training"].keys()
    assert "<html" in Path("report.html").read_text()
    assert "goodput" in capfd.readouterr().out
