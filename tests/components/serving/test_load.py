"""Many clients at once, for a while."""

import itertools
import json
import socket
import threading
import time

import pytest

from tests.components.serving.servers import listening, make_app
from tests.components.serving.test_serving import COMPLETIONS, texts_of
from torchtitan.components.serving.connections import TimedConnection

httpx = pytest.importorskip("httpx")

N_CLIENTS = 64
N_TOKENS = 24
STARTS = ["Once", "Lily", "Tom", "The dog", "One day", "A cat", "Mom", "She"]
PROMPTS = [f"{STARTS[n % 8]}{' and' * (n // 8)}" for n in range(N_CLIENTS)]
SLOW_PROMPT = "One day, a big dog"
SLOW_TOKENS = 120


class SlowReader:
    """A client that asks for a stream, and reads it only when told."""

    def __init__(self, port: int):
        body = {"model": "stories", "prompt": SLOW_PROMPT, "max_tokens": SLOW_TOKENS}
        body |= {"stream": True, "temperature": 0, "logprobs": 5}
        content = json.dumps(body)
        self._socket = socket.socket()
        # small, so that the server has to wait
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._socket.sendall((head + content).encode())

    def read(self) -> str:
        """Return the whole text."""
        received = b""
        while part := self._socket.recv(2**16):
            received += part
        self._socket.close()
        assert received.startswith(b"HTTP/1.1 200")
        lines = received.decode().splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "data: [DONE]" in lines
        return "".join(part["choices"][0]["text"] for part in parts)


def ask(http, number: int, round_number: int) -> str:
    """Return the text of one request, whole or as a stream."""
    body = {
        "model": "stories",
        "prompt": PROMPTS[number],
        "temperature": 0,
        "max_tokens": N_TOKENS,
    }
    if (number + round_number) % 2:
        return http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
        parts = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(part)["choices"][0]["text"] for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_rounds", "seconds"), [(2, None), pytest.param(None, 120, marks=pytest.mark.long)]
)
def test_many_clients_for_a_while(
    stories, stories_model, stories_tokenizer, monkeypatch, n_rounds, seconds
):
    """Each client gets its own texts, as often as it asks, while another one does not read its
    stream, which it still gets in full."""
    expected = texts_of(stories_model, stories_tokenizer, PROMPTS, N_TOKENS)
    slow_text = texts_of(stories_model, stories_tokenizer, [SLOW_PROMPT], SLOW_TOKENS)[0]
    paused = threading.Event()
    resumed = threading.Event()
    connection_made = TimedConnection.connection_made
    pause, resume = TimedConnection.pause_writing, TimedConnection.resume_writing

    def with_little_room(self, transport):
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection_made(self, transport)

    monkeypatch.setattr(TimedConnection, "connection_made", with_little_room)
    monkeypatch.setattr(TimedConnection, "write_seconds", 600.0)
    app, scheduler = make_app(stories, max_rows=16)
    wrong: list[tuple[int, str]] = []
    counts = [0] * N_CLIENTS
    failures: list[Exception] = []

    def work(http, number: int, deadline: float) -> None:
        try:
            for round_number in itertools.count():
                is_over = time.monotonic() > deadline
                if round_number == n_rounds or (n_rounds is None and is_over):
                    return
                text = ask(http, number, round_number)
                counts[number] += 1
                if text != expected[number]:
                    wrong.append((number, text))
        except Exception as error:
            failures.append(error)

    with listening(app) as port:
        url = f"http://127.0.0.1:{port}"
        limits = httpx.Limits(max_connections=N_CLIENTS)
        with monkeypatch.context() as patch:
            patch.setattr(
                TimedConnection, "pause_writing", lambda self: (paused.set(), pause(self))
            )
            slow = SlowReader(port)
            assert paused.wait(120), "the stream does not fill the buffers"
        monkeypatch.setattr(
            TimedConnection, "resume_writing", lambda self: (resumed.set(), resume(self))
        )
        deadline = time.monotonic() + (seconds or 0)
        with httpx.Client(base_url=url, timeout=300, limits=limits) as http:
            clients = [
                threading.Thread(target=work, args=(http, n, deadline)) for n in range(N_CLIENTS)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        assert slow.read() == slow_text
        assert resumed.is_set()
    assert not failures and not wrong
    assert all(count == n_rounds if n_rounds else count > 0 for count in counts)
    assert scheduler.totals.failed == scheduler.totals.cancelled == 0
    assert scheduler.n_running == scheduler.n_waiting == 0
