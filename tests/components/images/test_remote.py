"""Images behind URLs, from a server on this machine."""

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.components.images.test_rows import ONE, png
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.images import remote
from torchtitan.components.images.loader import ImageDataLoader
from torchtitan.components.images.remote import RemoteImages


class Server:
    """Answers `/NAME` with the statuses and bodies of `answers`, one after the other; the last one
    is repeated."""

    def __init__(self, answers: dict[str, list[tuple[int, bytes]]]):
        self.requests: Counter[str] = Counter()
        self.released = threading.Event()
        self.together = threading.Barrier(3)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path[1:].partition("?")[0]
                number = server.requests[name]
                server.requests[name] += 1
                if name.startswith("together"):
                    server.together.wait(30)
                if name == "silent":
                    server.released.wait(30)
                status, body = answers[name][min(number, len(answers[name]) - 1)]
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body.decode())
                missing = 5 if name == "cut" else 0
                self.send_header("Content-Length", str(len(body) + missing))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


ANSWERS = {
    "a.png": [(200, png(5))],
    "moved": [(302, b"/a.png")],
    "elsewhere": [(302, b"ftp://127.0.0.1/a.png")],
    "file": [(302, b"file:///etc/hosts")],
    "absent": [(404, b"no")],
    "busy": [(503, b"later"), (200, png(6))],
    "down": [(500, b"no")],
    "cut": [(200, png(5))],
    "silent": [(200, png(5))],
    "page": [(200, b"<html>Log in</html>")],
    **{f"together{n}": [(200, png(n + 1))] for n in range(3)},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(ANSWERS)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("name", "content"), [("a.png", png(5)), ("moved", png(5)), ("busy", png(6))]
)
def test_content_is_fetched_once(name: str, content: bytes, server: Server, tmp_path: Path) -> None:
    assert RemoteImages(tmp_path).fetch(server.url(name)).read_bytes() == content
    n_requests = server.requests.total()
    assert RemoteImages(tmp_path).fetch(server.url(name)).read_bytes() == content
    assert server.requests.total() == n_requests


@pytest.mark.parametrize(
    ("name", "reason", "n_requests"),
    [
        ("absent", "^it cannot be fetched: HTTP status 404", 1),
        ("down", "^it cannot be fetched: HTTP status 500 .*, 3 times$", 3),
        ("cut", "the connection ended after 68 of 73 bytes, 3 times$", 3),
        ("silent", "^it cannot be fetched: timed out, 3 times$", 3),
        ("elsewhere", "unknown url type: ftp", 3),
        ("file", "HTTP status 302", 1),
    ],
)
def test_a_failure_is_reported(
    name: str,
    reason: str,
    n_requests: int,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_SILENT_SECONDS", 0.2)
    with pytest.raises(BrokenSample, match=reason):
        RemoteImages(tmp_path).fetch(server.url(name))
    assert server.requests[name] == n_requests
    assert list(tmp_path.iterdir()) == []


def test_large_and_slow_content_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = RemoteImages(tmp_path)
    monkeypatch.setattr(remote, "MOST_BYTES", 67)
    with pytest.raises(BrokenSample, match="^it has more than 67 bytes; reduce it$"):
        images.fetch(server.url("a.png"))
    monkeypatch.setattr(remote, "MOST_BYTES", 68)
    monkeypatch.setattr(remote, "_MOST_SECONDS", 0.0)
    with pytest.raises(BrokenSample, match="it took more than 0 s, 3 times$"):
        images.fetch(server.url("a.png"))


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:x/a", "http:///a", "s3://b/a"])
def test_other_urls_are_refused(url: str, server: Server, tmp_path: Path) -> None:
    with pytest.raises(
        BrokenSample, match="it is not a valid URL|it cannot be fetched: |only images"
    ):
        RemoteImages(tmp_path).fetch(url)


@pytest.mark.parametrize(
    "address", ["169.254.10.20", "fe80::1%eth0", "::ffff:169.254.10.20", "fd00:ec2::254"]
)
def test_hosts_with_credentials_are_refused(address: str) -> None:
    def accept(address: str) -> None:
        with remote._Deadline():
            remote._accept(SimpleNamespace(getpeername=lambda: (address, 80)))  # type: ignore[arg-type]

    with pytest.raises(BrokenSample, match="may have credentials"):
        accept(address)
    accept("10.0.0.1")
    accept("::ffff:10.0.0.1")


def test_slow_headers_end_at_the_deadline(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of the headers comes in time, and all of them do not."""
    monkeypatch.setattr(remote, "_MOST_SECONDS", 0.3)
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connected, _ = listening.accept()
            with connected, contextlib.suppress(OSError):
                connected.sendall(b"HTTP/1.1 200 OK\r\n")
                while not server.released.wait(0.02):
                    connected.sendall(b"X-Slow: 1\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/a.png"
        with pytest.raises(BrokenSample, match="it took more than 0.3 s"):
            RemoteImages(tmp_path).fetch(url)


def test_images_are_fetched_at_the_same_time(server: Server, tmp_path: Path) -> None:
    """Each of three requests is answered only when all have arrived."""
    images = RemoteImages(tmp_path)
    urls = [server.url(name) for name in ("together0", "together1", "together2", "absent")]
    images.prefetch(urls)
    contents = [images.fetch(url).read_bytes() for url in urls[:3]]
    assert contents == [png(1), png(2), png(3)]
    for _ in range(2):
        with pytest.raises(BrokenSample, match="HTTP status 404"):
            images.fetch(urls[3])
    assert server.requests.total() == 4
    images.prefetch(urls[3:])
    assert server.requests.total() == 5


def test_rows_with_urls_are_those_with_files(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    url = {"type": "image_url", "image_url": {"url": server.url("a.png?signature=secret")}}
    rows = [
        {"messages": [{"role": "user", "content": [url, ONE[0]["content"][1]]}, ONE[1]]},
        {"prompt": "What?", "response": "yes", "image": server.url("a.png?signature=secret")},
    ]
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row))
        config = ImageDataLoader.Config(dataset=[str(path)], fetch_images=True)
        [(source, format)] = config.rows()
        values = [row.values for row in source.rows(lambda n_bytes: None)]
        assert format.prefetch is not None
        format.prefetch([row for row in values if row is not None])
        assert server.requests["a.png"] == 1
        sample = format.convert(values[0])  # type: ignore[arg-type]
        assert sample.messages == ONE  # type: ignore[union-attr]
        [image] = sample.images  # type: ignore[union-attr]
        assert Path(image.path).read_bytes() == png(5) and image.content == b""

    [(_, format)] = ImageDataLoader.Config(dataset=[str(path)]).rows()
    assert format.prefetch is None
    with pytest.raises(
        BrokenSample,
        match="/a.png' is a remote URL, which only training with --dataloader.fetch_imag",
    ):
        format.convert(rows[1])


def test_content_that_is_no_image_is_fetched_again(server: Server, tmp_path: Path) -> None:
    config = ImageDataLoader.Config(
        dataset=["chats"], fetch_images=True, cache_dir=str(tmp_path / "cache")
    )
    [(_, format)] = config.rows()
    row = {"messages": [{"role": "user", "content": [{"image": server.url("page")}]}, ONE[1]]}
    for _ in range(2):
        with pytest.raises(BrokenSample, match="^image 1: 'http://.*/page': it is not an image"):
            format.convert(row)
    assert server.requests["page"] == 2
