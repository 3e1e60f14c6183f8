"""Connections that a failing rank ends."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.distributed import connections
from torchtitan.trainer import failures


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a recorded connection."""
    monkeypatch.setattr(connections, "_recorded", {})
    with socket.create_server(("127.0.0.1", 0)) as server, connections.recorded():
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with client, accepted:
        yield client, accepted


def test_a_connection_ends_for_its_peer(pair: tuple[socket.socket, socket.socket]) -> None:
    _, accepted = pair
    accepted.settimeout(10)
    assert connections.end_connections()
    assert accepted.recv(1) == b""
    assert not connections.end_connections()  # each is ended once


@pytest.mark.parametrize("ends_first", ["close", "shutdown"])
def test_a_connection_that_its_peer_has_ended_counts(
    pair: tuple[socket.socket, socket.socket], ends_first: str
) -> None:
    """Another rank has failed first."""
    client, accepted = pair
    if ends_first == "close":
        accepted.close()
    else:
        client.shutdown(socket.SHUT_RDWR)
    assert connections.end_connections()


def test_connections_of_the_store_stay(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, accepted = pair
    monkeypatch.setenv("MASTER_PORT", str(client.getpeername()[1]))
    assert not connections.end_connections()
    accepted.sendall(b"x")
    assert client.recv(1) == b"x"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_collectives_of_a_gpu_are_not_ended(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's do not end with their connections, so the rank waits for a short time only."""
    ended = []
    monkeypatch.setattr(failures, "world_size", lambda: 2)
    monkeypatch.setattr(failures, "end_connections", lambda: ended.append(1) or True)
    trainer: Any = SimpleNamespace(
        rank=1,
        device=torch.device(device),
        agreement=SimpleNamespace(announce=lambda failure: None),
        config=SimpleNamespace(
            comm=SimpleNamespace(step_timeout_seconds=600, train_timeout_seconds=600)
        ),
    )
    seconds = failures._end_collectives(trainer, ValueError("no"))
    assert (seconds, len(ended)) == ((failures.SECONDS, 0) if device == "cuda" else (600.0, 1))
