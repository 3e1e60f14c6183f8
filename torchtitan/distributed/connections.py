"""Connections of gloo's process groups, which a rank that fails ends: the ranks that wait for it in
a collective then fail at once, since gloo (PyTorch 2.13) cannot abort one."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")  # Linux

_recorded: dict[int, str] = {}
"""Descriptor → socket, of the process groups of training."""


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record the sockets that the block opens: the process groups that it makes."""
    before = _sockets()
    yield
    _recorded.update(_sockets().items() - before.items())


def end_connections() -> bool:
    """End the recorded connections, except the store's, and return whether there were any.
    Collectives of these groups then fail on all ranks; other groups keep working."""
    ended = False
    sockets = _sockets()
    for descriptor, name in _recorded.items():
        if sockets.get(descriptor) != name:
            continue
        # gloo may close the descriptor at any time.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if _is_connection(connection) and not _is_of_store(connection):
                ended = True
                connection.shutdown(socket.SHUT_RDWR)
    _recorded.clear()
    return ended


def _sockets() -> dict[int, str]:
    """Return the sockets of this process by descriptor; none where the system does not list
    them."""
    found = {}
    for path in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        with contextlib.suppress(OSError):
            if (name := os.readlink(path)).startswith("socket:"):
                found[int(path.name)] = name
    return found


def _is_connection(one: socket.socket) -> bool:
    """Return whether a socket is a TCP connection, and does not listen."""
    is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return one.family in (socket.AF_INET, socket.AF_INET6) and not is_listening


def _is_of_store(connection: socket.socket) -> bool:
    """Return whether a connection is one of the store's; False if its peer has closed it."""
    port = int(os.environ.get("MASTER_PORT", "0"))
    with contextlib.suppress(OSError):
        return port in (connection.getsockname()[1], connection.getpeername()[1])
    return False
