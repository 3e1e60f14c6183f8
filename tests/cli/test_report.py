"""`torchtitan report`: a run that was killed twice, in text, as a page in a real browser, and bad
input."""

import html
import json
import math
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.training import killed_in, read_metrics, run, tiny_config
from torchtitan.cli.main import main
from torchtitan.cli.report import Chart, RunRecord, charts, page, sections, unit_of
from torchtitan.components.losses.loss import CrossEntropyLoss
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.tools.progress import sparkline
from torchtitan.trainer import Trainer

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;title\x07"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """The folders of a run that was killed in steps 4 and 6 of 7, and of a second, short one."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("killed", "other")]
    options = {"training__steps": 7, "checkpoint__enable": True, "checkpoint__interval": 2}
    for call in (4, 4):
        with killed_in(Trainer, "train_step", call):
            run(tiny_config(folders[0], **options))
    run(tiny_config(folders[0], **options))
    run(tiny_config(folders[1], training__steps=3, optimizer__lr=1e-3))
    rows = [{"step": 3, "reward": 0.5, "prompt": NASTY, "completion": "An answer."}, {"step": 4}]
    (folders[0] / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prediction = {"device": "this machine", "step_time": 0.125, "unknown": 1.0}
    (folders[0] / "foresight.json").write_text(json.dumps(prediction))
    # What a shell's configuration function would have written.
    for folder in folders:
        lr = 1e-3 if folder.name == "other" else 3e-4
        (folder / "config.yaml").write_text(
            f"module: llama3\nconfig: tiny\noptimizer:\n  lr: {lr}\n  name: AdamW\n"
        )
    with open(folders[1] / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "validation_loss": 7.5}\n{"step": 4, "loss": "high"}\n{"step"')
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "validation_loss": 7.5}\n{"step": 7, "validation_loss": 7.25}\n')
    return folders


def rows_of(runs: list[Path], title: str) -> dict[str, list[str]]:
    """Return the rows of a section by their first cell."""
    return {
        row[0]: list(row[1:])
        for part in sections([*map(RunRecord, runs)])
        if part.title == title
        for row in part.rows
    }


def test_sections_of_a_run_that_was_killed_twice(runs):
    killed = runs[:1]
    lines = map(json.loads, (runs[0] / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "loss" in line][-1]
    summary = rows_of(killed, "Summary")
    assert summary["last loss (nats per token)"] == [f"{last['loss']:.4g}"] and summary[
        "last step"
    ] == summary["total_steps"] == ["7"]
    assert summary["last event"][0].startswith("end, ") and summary["last n_tokens_seen"] == [
        f"{last['n_tokens_seen']:,}"
    ]
    assert {"training", "start-up", "restart", "lost steps", "data", "save"} <= {
        *rows_of(killed, "Where the time went")
    }
    (incidents,) = (
        part.rows for part in sections([RunRecord(runs[0])]) if part.title == "Incidents"
    )
    again = [what for _, _, _, event, what in incidents if event == "start"]
    assert (
        again[0] == ""
        and "at step 3 (killed, or ended by an error)" in again[1]
        and "at step 5 (killed" in again[2]
    )
    assert [step for _, _, step, event, _ in incidents if event == "save"] == ["2", "4", "6", "7"]
    phases = rows_of(killed, "Time of a step by phase")
    assert {"data", "forward", "backward", "gradient clipping", "optimizer step"} <= phases.keys()
    assert re.fullmatch(
        r"rows 12,000, tokens 2,271,264, epochs 0\.\d+", rows_of(killed, "Data")["stories"][0]
    )
    median = statistics.median(time for _, time in read_metrics(runs[0], "step_time"))
    text = f"predicted for this machine: 0.125, median here: {median:.4g}"
    assert rows_of(killed, "Foresight") == {"step_time": [text]}
    assert [*rows_of(killed, "Checkpoints")] == ["step 2", "step 4", "step 6", "step 7"]
    assert "torch" in rows_of(killed, "Environment")
    assert rows_of(killed, "Samples") == {str(runs[0]): ["4", "", "", ""]}
    assert rows_of(killed, "Differences") == {}
    assert rows_of(runs, "Differences") == {"optimizer.lr": ["0.0003", "0.001"]}


def test_page_names_models_and_units(runs):
    text = page([*map(RunRecord, runs)])
    start = json.loads((runs[0] / "events.jsonl").read_text().splitlines()[0])
    n_parameters = f"{start['parameters']:,} parameters, {start['parameters']:,} trained"
    assert f"{runs[0]}: llama3 tiny, {n_parameters}</p>" in text
    assert f"<title>{runs[0]}: llama3 tiny, {n_parameters}</title>" in page([RunRecord(runs[0])])
    assert f"<title>{runs[0]}, {runs[1]}</title>" in text
    frozen = {"parameters": 70, "trained_parameters": 7}
    record = RunRecord(runs[0])
    record.start = {**record.start, **frozen}
    assert record.model == "llama3 tiny, 70 parameters, 7 trained"
    assert 'step_time <span class="mute">(s)</span>' in text
    assert "grad_norm<small>" in text  # without a unit
    assert 'loss and validation_loss (dashed) <span class="mute">(nats per token)</span>' in text
    assert "last loss (nats per token)" in rows_of(runs, "Summary")
    rates = ("tokens_per_second", "validation_tokens_per_second", "waves_per_second")
    assert [unit_of(rate) for rate in rates] == ["tokens/s", "tokens/s", "waves/s"]


def test_losses_of_different_units_have_none(runs):
    """Nor has the loss of a run that was recorded without a unit, such as by an older version."""
    plain, other, old = (RunRecord(runs[0]) for _ in range(3))
    other.start = {**other.start, "loss_unit": ""}
    old.start = {key: value for key, value in old.start.items() if key != "loss_unit"}
    for together, unit in (
        ([plain], "nats per token"),
        ([plain, plain], "nats per token"),
        ([other], ""),
        ([plain, other], ""),
        ([plain, old], ""),
        ([], ""),
    ):
        starts = [record.start for record in together]
        for name in ("loss", "validation_loss", "loss/stories", "validation_loss/stories"):
            assert unit_of(name, starts) == unit
        if together:
            assert ('<span class="mute">(nats per token)' in page(together)) == bool(unit)
        assert unit_of("step_time", starts) == "s"


def test_only_the_cross_entropy_of_tokens_is_in_nats():
    class Squared(CrossEntropyLoss):
        def from_logits(self, logits, labels):
            return logits.square().sum()

    class Chunked(CrossEntropyLoss):
        """Another class of the same loss."""

    losses = [kind(CrossEntropyLoss.Config()) for kind in (CrossEntropyLoss, Chunked, Squared)]
    assert [loss.unit for loss in losses] == ["nats per token", "nats per token", ""]
    rl, sft = RLTrainer.__new__(RLTrainer), Trainer.__new__(Trainer)
    rl.loss = sft.loss = losses[0]
    assert (rl.loss_unit, sft.loss_unit) == ("", "nats per token")


def test_text_and_broken_lines(runs, capsys):
    assert main(["report", "--text", *map(str, runs)]) == 0
    out, err = capsys.readouterr()
    assert f"loss of {runs[0]}" in out and "Where the time went" in out and "\x1b" not in out
    assert err == f"torchtitan report: {runs[1]}: metrics.jsonl: skipped broken lines: 5, 6\n"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.yaml", "optimizer: [", "is not valid YAML"),
        ("config.yaml", "", "is empty"),
        ("foresight.json", '{"step_time": 1', "is not valid JSON"),
        ("foresight.json", "[1]", "must contain a JSON object, not list"),
    ],
)
def test_broken_files_are_left_out(tmp_path, capsys, file, content, problem):
    record_of(tmp_path, [{"step": 1, "loss": 2.5}])
    (tmp_path / file).write_text(content)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchtitan report: '{tmp_path / file}' {problem}") and line.endswith(
        "skips it"
    )
    written = (tmp_path / "report.html").read_text()
    assert problem in written and "skips it" in written and "last loss" in written


def test_run_in_progress_without_events(tmp_path):
    lines = [
        '{"step": 1, "loss": 2.5}',
        '{"step": 2, "loss": null}',
        '{"step": 3, "loss": NaN}',
        '{"step": 4, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    record = RunRecord(tmp_path)
    assert [part.title for part in sections([record])] == ["Summary"]
    assert rows_of([tmp_path], "Summary") == {"last step": ["2"], "last loss": ["2.5"]}
    assert "metrics.jsonl: skipped broken lines: 3, 4" in page([record])


def test_incidents_say_why(tmp_path):
    """A session that ended by itself has its reason; one whose last event is another was killed, or
    failed."""
    start = {"event": "start", "begun": 10.0, "command": "train"}
    events = [start, {"event": "skipped", "reason": "a spike"}, {"event": "returned", "to": 5}]
    events += [start, {"event": "end", "reason": "stopped"}, start]
    events += [{"event": "end", "reason": "ended early", "why": "no improvement"}]
    lines = [{"time": 9.0, "step": 7, "seconds": {}, **event} for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)))
    record_of(tmp_path, [{"step": 1, "loss": 1.0}])
    (incidents,) = (
        part.rows for part in sections([RunRecord(tmp_path)]) if part.title == "Incidents"
    )
    assert [tuple(row[3:]) for row in incidents] == [
        ("start", ""),
        ("skipped", "a spike"),
        ("returned", "to 5"),
        ("start", "1.0 s after the last event, at step 7 (killed, or ended by an error)"),
        ("end", "stopped"),
        ("start", "1.0 s after the last event, at step 7 (stopped)"),
        ("end", "ended early: no improvement"),
    ]


START = {
    "event": "start",
    "time": 9.0,
    "begun": 8.0,
    "step": 0,
    "seconds": {"data": 0.5},
    "command": "train",
}
LATER = {"event": "progress", "time": 19.0, "step": 3, "seconds": {"data": 1.5, "forward": 2.0}}


@pytest.mark.parametrize(
    "change",
    [
        {"time": 1e300},
        {"time": math.nan},
        {"time": -1.0},
        {"time": 10},
        {"time": "9.0"},
        {"begun": 1e18},
        {"begun": None},
        {"step": 10**400},
        {"step": -1},
        {"step": True},
        {"step": [[1]]},
        {"seconds": {"data": 1e300}},
        {"seconds": {"data": math.inf}},
        {"seconds": {"data": [[]]}},
        {"seconds": [["data", 1.0]]},
        {"seconds": None},
        {"event": ["start"]},
        {"event": {}},
        {"data": [1]},
        {"environment": "torch"},
    ],
)
def test_damaged_events_are_left_out(tmp_path, capsys, change):
    record_of(tmp_path, [{"step": 1, "loss": 2.5}])
    lines = [START, {**START, **change}, LATER]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in (["--text"], ["--output", str(tmp_path / "report.html")]):
        assert main(["report", str(tmp_path), *words]) == 0
        error = capsys.readouterr().err
        assert error == f"torchtitan report: {tmp_path}: events.jsonl: skipped broken lines: 2\n"


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": {}},
        {"time": 0.0},
        {"reason": [[{"a": "\ud800"}]]},
        {"data": {"\ud800": [[1]]}},
        {"to": {}},
    ],
)
def test_odd_events_are_shown(tmp_path, capsys, change):
    """Times that are all zero, or texts that no file can hold, are no reason to fail."""
    record_of(tmp_path, [{"step": 1, "loss": 2.5, "\ud800": 1}])
    start = {**START, "time": 0.0, "begun": 0.0, "seconds": {}}
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (start, {**start, **change}))
    )
    for words in (["--text"], ["--output", str(tmp_path / "report.html")]):
        assert main(["report", str(tmp_path), *words]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("folder", ["a" * 300, "\\0", "/dev/null", "."])
def test_a_folder_of_checkpoints_that_cannot_be_read_is_left_out(tmp_path, capsys, folder):
    record_of(tmp_path, [{"step": 1, "loss": 2.5}])
    (tmp_path / "config.yaml").write_text(f'checkpoint: {{folder: "{folder}"}}')
    assert main(["report", str(tmp_path), "--text"]) == 0
    assert capsys.readouterr().err.count("\n") == (1 if len(folder) == 300 else 0)


@pytest.mark.parametrize("step", ["1" + "0" * 400, "-1", "true", "[]", "1e300"])
def test_a_damaged_step_of_metrics_is_left_out(tmp_path, capsys, step):
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 1, "loss": 2.5}}\n{{"step": {step}, "loss": 2.5}}\n'
    )
    assert main(["report", str(tmp_path), "--text"]) == 0
    assert capsys.readouterr().err.endswith("metrics.jsonl: skipped broken lines: 2\n")


def test_a_name_that_is_too_long_is_one_line(capsys):
    assert main(["report", "a" * 300]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is too long for the name of a file" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no metrics.jsonl"),
        ("", "has no metrics.jsonl"),
        ("[1]\n{", "has no metrics.jsonl with metrics"),
    ],
)
def test_folder_without_metrics_is_one_line(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and str(tmp_path) in err


def test_other_mistakes_are_one_line(runs, tmp_path, capsys):
    for words, message in [
        ([tmp_path / "absent"], "has no metrics.jsonl with metrics"),
        ([runs[0], "--output", tmp_path / "no/report.html"], "cannot be written: No such file"),
    ]:
        assert main(["report", *map(str, words)]) == 2
        err = capsys.readouterr().err
        assert message in err.splitlines()[-1] and "Traceback" not in err


def record_of(folder: Path, lines: list[dict]) -> RunRecord:
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return RunRecord(folder)


def test_curves_of_long_runs_keep_their_extremes(tmp_path):
    lines = [{"step": step, "loss": math.sin(step / 50)} for step in range(1, 20_001)]
    lines[12_345]["loss"], lines[777]["loss"] = 9.0, None
    record = record_of(tmp_path, lines)
    curve = record.curve("loss")
    assert (
        len(curve) <= 1100 and curve == sorted(curve) and set(curve) <= set(record.points("loss"))
    )
    assert (12_346, 9.0) in curve and curve[0][0] == 1 and curve[-1][0] == 20_000
    short = record_of(tmp_path, lines[:1])
    assert charts([record, short]) == [Chart("loss", "loss", [curve, [(1, math.sin(0.02))]])]


def test_training_and_validation_loss_share_a_chart(tmp_path):
    lines: list[dict[str, float]] = [{"step": step, "loss": 8 / step} for step in (1, 2, 3)]
    validated = [*lines, {"step": 3, "validation_loss": 3.0, "validation_loss/news": 2.5}]
    records = [record_of(tmp_path, validated), record_of(tmp_path, lines)]
    (chart,) = charts(records)  # a single point of news has no curve
    assert chart.title == "loss and validation_loss (dashed)"
    losses = [(1, 8.0), (2, 4.0), (3, 8 / 3)]
    assert chart.series == [losses, losses, [(3, 3.0)], []]
    only = record_of(tmp_path, [{"step": step, "validation_loss": 1.0} for step in (1, 2)])
    assert [one.title for one in charts([only])] == ["validation_loss"]


def test_sparkline():
    assert (
        sparkline([]) == "" and sparkline([2.0, 2.0]) == "▁▁" and sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    )
    assert len(sparkline(range(1000))) == 60


def test_script_is_short_and_needs_no_network(runs):
    script = (PROJECT / "torchtitan/cli/templates/run_report.js").read_text()
    assert len(script.splitlines()) <= 150
    text = page([*map(RunRecord, runs)])
    assert "default-src 'none'" in text and not re.search(
        r"<(img|link|iframe|script|object)\b[^>]* (src|href)=", text
    )
    assert "alert(1)</script>" not in text and "\x1b" not in text


WRAPPER = """<!doctype html><pre id="out"></pre>
<iframe id="wide" width="1280" height="900"></iframe><iframe id="phone" width="360" height="800"></iframe>
<script>
const text = PAGE;
const found = {};
let left = 2;
for (const name of ["wide", "phone"]) {
  const frame = document.getElementById(name);
  frame.onload = () => {
    const view = frame.contentWindow, page = frame.contentDocument;
    const lines = () => [...page.querySelectorAll("polyline")].map(line => line.getAttribute("points"));
    const facts = found[name] = {width: page.documentElement.scrollWidth, lines: lines().length,
      charts: page.querySelectorAll("#charts figure").length,
      sections: [...page.querySelectorAll("h2, summary")].map(title => title.textContent),
      back: view.getComputedStyle(page.body).backgroundColor, text: view.getComputedStyle(page.body).color,
      images: page.querySelectorAll("img").length, points: page.querySelectorAll("circle").length,
      rings: page.querySelectorAll("circle[fill='var(--card)']").length,
      svg: page.querySelector("#charts svg").getBoundingClientRect().width};
    const svg = page.querySelector("#charts svg"), box = svg.getBoundingClientRect(), before = lines();
    view.SVGElement.prototype.setPointerCapture = () => {};
    const send = (kind, share) =>
      svg.dispatchEvent(new view.PointerEvent(kind, {clientX: box.left + share * box.width}));
    send("pointerdown", 0.3); send("pointermove", 0.7);
    facts.note = page.querySelector("#charts small").textContent;
    send("pointerup", 0.7);
    facts.zoomed = lines().every((line, i) => line !== before[i]);
    svg.dispatchEvent(new view.MouseEvent("dblclick"));
    facts.restored = lines().join() === before.join();
    page.querySelector("#legend input").click();
    facts.hidden = before.length - lines().length;
    page.getElementById("log").click();
    if (--left === 0) document.getElementById("out").textContent = JSON.stringify(found);
  };
  frame.srcdoc = text;
}
</script>"""


def browse(file: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a page in a headless browser; return its DOM as text, and the lines of the console."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        *flags,
    ]
    command += [
        "--disable-background-networking",
        f"--user-data-dir={file.parent / 'browser'}",
        "--dump-dom",
    ]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000", file.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_a_browser(runs, tmp_path, scheme):
    """On a desktop's and a phone's width: rendered without errors, nothing runs out of the page,
    and zoom works."""
    report = page([*map(RunRecord, runs)])
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(WRAPPER.replace("PAGE", json.dumps(report).replace("<", "\\u003c")))
    dom, console = browse(
        wrapper, f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    )
    assert console == []
    found = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dom)[1]))
    drawn = charts([*map(RunRecord, runs)])
    n_charts = len(drawn)
    n_points = sum(len(points) for chart in drawn for points in chart.series)
    validations = [RunRecord(run).points("validation_loss") for run in runs]
    n_validations = sum(map(len, validations))
    assert all(validations)
    titles = [part.title for part in sections([*map(RunRecord, runs)])]
    for name, width in {"wide": 1280, "phone": 360}.items():
        facts = found[name]
        assert facts["width"] <= width, "the page is wider than the screen"
        assert facts["charts"] == n_charts and facts["images"] == 0
        # One for each run, and one of the validation of the first.
        assert facts["lines"] == 2 * n_charts + 1
        assert facts["sections"] == [titles[0], "Curves", *titles[1:]]
        assert facts["points"] == n_points  # all series are short
        assert facts["rings"] == n_validations
        assert facts["zoomed"] and facts["restored"] and facts["hidden"] == n_charts + 1
        assert re.match(r"step \d+: [\d.]+ step \d+: [\d.]+", facts["note"])
        dark = [
            sum(map(int, re.findall(r"\d+", facts[key])[:3])) / 3 < 128 for key in ("back", "text")
        ]
        assert dark == [scheme == "dark", scheme == "light"]
    assert 270 < found["phone"]["svg"] < 360 and 300 < found["wide"]["svg"] < 640


@pytest.mark.slow
def test_errors_of_a_page_are_noticed(runs, tmp_path):
    """The test above would fail for an error in the script, and for a script that the page does not
    allow."""
    report = page([RunRecord(runs[0])])
    broken = tmp_path / "broken.html"
    broken.write_text(report.replace("</body>", "<script>alert(1)</script></body>"))
    assert any("Content Security Policy" in line for line in browse(broken)[1])
    broken.write_text("<!doctype html><script>undefined.x</script>")
    assert any("TypeError" in line for line in browse(broken)[1])


def test_of_a_file_of_broken_lines_little_is_read(tmp_path, capsys):
    """Each line takes time, and a file may have millions of them."""
    record_of(tmp_path, [{"step": 1, "loss": 2.5}])
    broken = "x\n" * 20_000
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(START)}\n{broken}{json.dumps(LATER)}\n")
    record = RunRecord(tmp_path)
    assert [event["event"] for event in record.events] == ["start"]
    assert record.problems == [
        f"{tmp_path}: events.jsonl: skipped broken lines: 2, 3, 4, 5, 6, ..., and all after line "
        "10,001"
    ]


def test_of_many_events_the_last_are_shown(tmp_path):
    record_of(tmp_path, [{"step": 1, "loss": 2.5}])
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(START)}\n" * 2000)
    (incidents,) = (
        part.rows for part in sections([RunRecord(tmp_path)]) if part.title == "Incidents"
    )
    assert len(incidents) == 501 and incidents[0][-1] == "1,500 earlier events are left out"
