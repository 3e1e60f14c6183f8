"""The server's page beside chats: curves of runs, and rows of data, over HTTP and in a browser."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.components.serving.servers import listening
from tests.components.serving.test_page import HOSTILE, app_of
from torchtitan.cli.served_views import DataView, RunsView
from torchtitan.components.chat_template import resolve_chat_template
from torchtitan.tools.errors import UserError

pytest.importorskip("httpx")

from starlette.testclient import TestClient  # noqa: E402


def write_run(folder: Path, metrics: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in metrics)
    (folder / "metrics.jsonl").write_text(text)


def metrics_of(n_steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 8 / step, "lr": 1e-3} for step in range(1, n_steps + 1)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "first", [*metrics_of(9), {"step": 9, "validation_loss": 1.5}])
    start = {"event": "start", "time": 1.0, "begun": 1.0, "step": 0, "seconds": {}}
    line = json.dumps({**start, "loss_unit": "nats per token"})
    (folder / "first" / "events.jsonl").write_text(f"{line}\n")
    write_run(folder / HOSTILE[:30].replace("/", "_"), metrics_of(3))
    (folder / "no run").mkdir()
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    answers = ["Hi", "", HOSTILE.replace("\0", ""), *map(str, range(20))]
    messages = [
        [{"role": "user", "content": "Say"}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"messages": each}) for each in messages]
    path.write_text("\n".join([*lines, "{broken"]) + "\n")
    return path


@pytest.fixture
def views(tokenizer: Any, runs: Path, rows: Path) -> dict[str, Any]:
    template = resolve_chat_template("alpaca", [], tokenizer)
    return {"runs": RunsView(runs), "data": DataView([str(rows)], tokenizer, template)}


def test_runs_are_listed_with_their_curves(tokenizer: Any, views: Any, runs: Path) -> None:
    app, _ = app_of(tokenizer, views=views)
    with TestClient(app, base_url="http://localhost") as client:
        names = [run["id"] for run in client.get("/v1/runs").json()["data"]]
        assert sorted(names) == sorted(
            each.name for each in runs.iterdir() if each.name != "no run"
        )
        answer = client.get("/v1/runs/first").json()
        curves = answer["curves"]
        units = {name: "nats per token" for name in ("loss", "validation_loss")}
        assert answer["units"] == {**units, "lr": ""}
        assert list(curves) == ["loss", "lr", "validation_loss"]
        assert curves["loss"] == [[step, 8 / step] for step in range(1, 10)]
        assert curves["validation_loss"] == [[9, 1.5]]
        for name in ("no run", "%2e%2e", "%2e%2e/runs/first", "/etc"):
            assert client.get(f"/v1/runs/{name}").status_code == 404
        assert client.get("/v1/views").json()["data"] == [{"id": "runs"}, {"id": "data"}]
        # a run that goes on
        with (runs / "first" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 10, "loss": 0.5}\n{"step": 11, "lo')
        assert client.get("/v1/runs/first").json()["curves"]["loss"][-1] == [10, 0.5]


def test_rows_are_shown_as_they_are_trained(tokenizer: Any, views: Any, rows: Path) -> None:
    app, _ = app_of(tokenizer, views=views)
    with TestClient(app, base_url="http://localhost") as client:
        [name] = [data["id"] for data in client.get("/v1/data").json()["data"]]
        assert name == str(rows)
        found = client.get(f"/v1/data/{rows}", params={"number": 3}).json()["rows"]
        assert [row["where"].rpartition(":")[2] for row in found] == ["1", "2", "3"]
        [tokens] = found[0]["samples"]
        text = "".join(piece for piece, _ in tokens)
        trained = "".join(piece for piece, is_trained in tokens if is_trained)
        assert text.startswith("<|begin_of_text|>Below") and "\nSay\n" in text
        assert trained == "Hi<|end_of_text|>"
        assert found[1]["samples"] == [] and found[1]["dropped"].startswith("empty")
        last = client.get(f"/v1/data/{rows}", params={"first": 23, "number": 50}).json()["rows"]
        assert [row["samples"] for row in last] == [[]] and "broken" in last[0]["dropped"]
        for query in ({"first": -1}, {"number": 51}, {"first": "1e3"}, {"first": "9" * 5000}):
            answer = client.get(f"/v1/data/{rows}", params=query)
            assert answer.status_code == 400 and "whole number" in answer.json()["error"]["message"]


def test_views_need_the_key(tokenizer: Any, views: Any) -> None:
    app, _ = app_of(tokenizer, key="secret", views=views)
    with TestClient(app, base_url="http://localhost") as client:
        for path in ("views", "runs", "runs/first", "data"):
            assert client.get(f"/v1/{path}").status_code == 401


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--runs .*absent is not a folder"):
        RunsView(tmp_path / "absent")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_shows_runs_and_data(
    width: int, tokenizer: Any, views: Any, runs: Path, tmp_path: Path
) -> None:
    """Names of runs and texts of data are hostile; a run goes on while it is shown."""
    app, _ = app_of(tokenizer, views=views)
    with Browser(tmp_path / "browser") as browser, listening(app) as port:
        browser.open(f"http://127.0.0.1:{port}/", width=width)
        browser.wait("!nav.hidden")
        browser.run("nav.children[1].click()")
        browser.wait("document.querySelectorAll('#run-list input').length === 2")
        browser.run("watched = ['first']; showRuns()")
        browser.wait("document.querySelector('figcaption').textContent.includes('0.8889')")
        captions = browser.run(
            "[...document.querySelectorAll('figcaption')].map(each => each.textContent)"
        )
        assert captions[0] == "loss, and validation_loss (points) (nats per token): 0.8889, 1.5"
        assert browser.run("document.querySelectorAll('figure circle').length") == 1
        assert "first: step 9" in browser.run("byId('run-facts').textContent")
        with (runs / "first" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 12, "loss": 0.25}\n')
        browser.wait("byId('run-facts').textContent.includes('first: step 12')")
        browser.run("document.querySelectorAll('#run-list input')[1].click()")
        browser.wait("watched.length !== 1")
        browser.run("nav.children[2].click()")
        browser.wait("document.querySelectorAll('#rows article').length === 10")
        assert browser.run("document.querySelectorAll('.tokens .trained').length") > 10
        assert browser.run("document.querySelector('#rows .error').textContent").startswith(
            "dropped"
        )
        browser.run("byId('next').click()")
        browser.wait("byId('row-numbers').textContent === 'rows 11 to 20'")
        browser.run("nav.children[0].click()")
        assert not browser.run("byId('composer').hidden || document.querySelector('#log').hidden")
        assert browser.run("window.hit") is None
        assert browser.run("document.documentElement.scrollWidth") <= width
        browser.run("nav.children[1].click()")
        browser.save_picture(tmp_path / "runs.png")
        assert browser.problems == []
