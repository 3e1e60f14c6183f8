"""The command that draws the figures of the documentation."""

import json
import runpy
import xml.etree.ElementTree as ET

import pytest

from tests.conftest import PROJECT

SCRIPT = PROJECT / "docs/figures/run_curves.py"


def write_run(folder, **metrics):
    folder.mkdir()
    lines = [
        {"step": 10 * step, **{key: values[step] for key, values in metrics.items()}}
        for step in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_figures_show_the_metrics_of_runs(tmp_path, monkeypatch):
    """Lines have the points of the metrics, to scale; figures without all of their runs are
    skipped."""
    figures = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(figures["main"].__globals__, "HERE", tmp_path)
    write_run(tmp_path / "text", validation_loss=[4.0, 3.0, 2.5])
    write_run(tmp_path / "distilled", validation_cross_entropy=[4.0, 2.0, 2.25])
    figures["main"](tmp_path)
    assert [path.name for path in tmp_path.glob("*.svg")] == ["distillation.svg"]
    root = ET.parse(tmp_path / "distillation.svg").getroot()
    text, distilled = (
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    )
    assert text[0] == distilled[0] and text[1][0] - text[0][0] == pytest.approx(
        text[2][0] - text[1][0], abs=0.2
    )
    heights = [y for _, y in (*text, *distilled)]
    # Heights are rounded to 0.1; values 4, 3, 2.5, 4, 2, 2.25 lie on one straight line with them.
    per_unit = (heights[4] - heights[0]) / 2
    assert per_unit > 0 and heights[1] - heights[0] == pytest.approx(per_unit, abs=0.2)
    assert heights[5] - heights[2] == pytest.approx(0.25 * per_unit, abs=0.2)
    labels = [label.text for label in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"text alone", "distilled", "0", "10", "20"} <= {*labels}


def test_a_run_without_the_metric_is_named(tmp_path):
    points = runpy.run_path(str(SCRIPT))["points"]
    write_run(tmp_path / "text", loss=[1.0, 1.0, 1.0])
    with pytest.raises(SystemExit, match="text/metrics.jsonl has no validation_loss"):
        points(tmp_path / "text", "validation_loss")


def test_the_front_page_has_the_table_of_performance(monkeypatch):
    """Figure and text need the run on the page, and are written with it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    front = runpy.run_path(str(SCRIPT.parent / "first_page.py"))
    page = front["PAGE"].read_text()
    assert page == front["with_part"](page, "speed", front["table"]())
    assert "](performance.md#compared-with-other-trainers)" in page and "](#" not in page
    sample = page.partition("<!-- sample:begin -->")[2].partition("<!-- sample:end -->")[0]
    assert sample.startswith(f"\n```text\n{front['PROMPT']}")
    assert (SCRIPT.parent / "first_run.svg").stat().st_size > 1000
