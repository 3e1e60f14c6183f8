"""Files behind HTTP: what a server that does not answer, or refuses, is reported as."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training import train
from torchtitan.components.checkpoint.catalog import open_checkpoint
from torchtitan.components.checkpoint.filesystem import folder_at
from torchtitan.components.checkpoint.identity import identify_content
from torchtitan.components.data.disk_cache import data_digest
from torchtitan.components.data.sources import stored
from torchtitan.components.data.sources.source import HubDataset, StreamSource, resolve_source
from torchtitan.components.data.sources.stored import with_patience
from torchtitan.tools.errors import UserError
from torchtitan.tools.redact import redact

SIGNATURES = ("right", "renewed")
ROWS = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(3))
UNKNOWN_HOST = "http://USERNAME:PASSWORD@host.invalid"
CLOSED_PORT = "http://USERNAME:PASSWORD@127.0.0.1:9"


class Answers(http.server.BaseHTTPRequestHandler):
    """`/200/…` is a file of rows if it has one of the signatures; `/404/…` is answered with status
    404."""

    def do_HEAD(self) -> None:
        path, _, query = self.path.partition("?")
        status = int(path.split("/")[1])
        # Like many servers, this one does not read on after the signature.
        is_signed = query.rpartition("Signature=")[2].startswith(SIGNATURES)
        self.send_response(status if is_signed or status != 200 else 403)
        self.send_header("Content-Length", str(len(ROWS)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(ROWS.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as opened:
        threading.Thread(target=opened.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{opened.server_port}"
        opened.shutdown()


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        (f"{UNKNOWN_HOST}/a.jsonl", "Name or service not known|resolution|nodename"),
        (f"{UNKNOWN_HOST}/folder/", "Name or service not known|resolution|nodename"),
        (
            f"{UNKNOWN_HOST.replace('http', 'ftp')}/a.jsonl",
            "Name or service not known|resolution|nodename",
        ),
        (f"{CLOSED_PORT}/a.jsonl", "Connect call failed"),
        ("http://USERNAME:PASSWORD@SERVER/401/a.jsonl", "the server answers 401"),
        (
            "http://USERNAME:PASSWORD@SERVER/403/a.jsonl?X-Amz-Signature=dead",
            "the server answers 403 Forbidden",
        ),
        ("http://USERNAME:PASSWORD@SERVER/404/a.jsonl", "the server answers 404 Not Found"),
        ("http://USERNAME:PASSWORD@SERVER/500/folder/", "the server answers 500"),
        ("http://SERVER/200/a.jsonl?X-Amz-Signature=dead", "the server answers 403"),
    ],
)
def test_the_cause_is_reported_in_one_line(url, cause, server, monkeypatch):
    monkeypatch.setattr(stored, "ATTEMPTS", 1)
    with pytest.raises(UserError, match=cause) as raised:
        resolve_source(url.replace("SERVER", server))
    message = redact(str(raised.value))
    assert message.count("\n") == 0 and url[:5] in message
    assert "no data file" not in message and "PASSWORD" not in message and "dead" not in message


@pytest.mark.parametrize("url", [UNKNOWN_HOST, CLOSED_PORT])
def test_checkpoints_in_a_store_that_does_not_answer(url):
    """Both a message for the command line and an error of the system, which a run survives."""
    with pytest.raises(UserError, match="cannot be reached, or refuses access: .*; check the URL"):
        open_checkpoint(f"{url}/checkpoint/step-1")
    with pytest.raises(OSError, match="cannot be reached"):
        folder_at(url).write("a", b"")


def test_a_signed_url_is_a_file(server):
    source = resolve_source(f"http://{server}/200/a.jsonl?X-Amz-Signature=right")
    texts = [
        "".join(document)
        for part in source.parts
        for document in part.documents(lambda n_bytes: None)
    ]
    assert texts == ["text 0", "text 1", "text 2"]
    assert [part.name for part in source.parts] == ["a.jsonl"] and "right" not in source.name


def test_a_run_resumes_with_another_signature_which_is_not_written(server, tmp_path):
    for steps, signature in enumerate(SIGNATURES, start=1):
        query = f"X-Amz-Date={steps}&X-Amz-Expires=60&X-Amz-Signature={signature}"
        trainer = train(
            tmp_path / "run",
            dataloader__dataset=f"http://{server}/200/a.jsonl?{query}",
            dataloader__cache_dir=tmp_path / "cache",
            checkpoint__enable=True,
            training__steps=steps,
        )
        assert trainer.start.start and trainer.step == steps if steps > 1 else trainer.step == 1
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        content = path.read_bytes()
        assert not any(f"Signature={signature}".encode() in content for signature in SIGNATURES)


def test_only_the_signature_of_a_file_may_change():
    def location(query: str) -> str:
        return identify_content(f"s3://h/a, http://h/a.jsonl{query}", "")["location"]

    assert location("?X-Amz-Date=1&X-Amz-Signature=a") == location("?sv=2&sig=b%3D&se=1")
    assert location("?file=1") != location("?file=2") and "file=1" in location("?file=1")


@pytest.mark.parametrize(
    ("path", "n_requests"), [("/404/a", 1), ("/403/a", 1), ("/429/a", 3), ("/503/a", 3)]
)
def test_what_lasts_is_asked_for_once(path, n_requests, server, monkeypatch, log):
    monkeypatch.setattr(stored, "ATTEMPTS", 3)
    monkeypatch.setattr(stored.time, "sleep", lambda seconds: None)
    calls = []

    def read() -> bytes:
        calls.append(path)
        return folder_at(f"http://{server}").read(path[1:])

    with pytest.raises(UserError, match="reading it failed"):
        with_patience("reading it", read)
    assert len(calls) == n_requests == 1 + log.text.count("trying again")


def test_a_log_line_says_once_that_content_is_not_compared(server, tmp_path, log):
    url = f"http://{server}/200/a.jsonl?X-Amz-Signature=right"
    for _ in range(2):
        assert data_digest(resolve_source, str(tmp_path), url)
        data_digest(
            lambda name: StreamSource(
                name=name, dataset=HubDataset(path="a/b"), split="train", text_column="t"
            ),
            "",
            "x",
        )
    compared = "a run that resumes compares"
    assert (
        log.text.count(
            f"{compared} sizes, and the checksums or times that the store lists, not the content"
        )
        == 1
    )
    assert log.text.count(f"x: {compared} its name, not the content") == 1
