"""Images behind URLs, fetched once per host."""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.tools import durable
from torchtitan.tools.digests import bytes_digest

MOST_BYTES = 2**28
"""Largest encoded image."""

THREADS = 16
"""Images that are fetched at the same time."""

ATTEMPTS = 3
"""Attempts for failures that may pass; the waiting time doubles after each, from one second."""

_SILENT_SECONDS = 10.0
_MOST_SECONDS = 60.0
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that may pass."""

_CHUNK = 1 << 18


class RemoteImages:
    """Fetches images over HTTP and HTTPS, also through the proxies of the environment.

    Args:
        folder: folder for the fetched files, which are not fetched again.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._opener = _http_opener()
        self._failures: dict[str, BrokenSample] = {}

    def prefetch(self, urls: Collection[str]) -> None:
        """Fetch images at the same time. Until the next call, `fetch` raises their failures."""
        self._failures = {}
        with ThreadPoolExecutor(THREADS) as pool:
            for url, result in zip(urls, pool.map(self._try, urls), strict=True):
                if isinstance(result, BrokenSample):
                    self._failures[url] = result

    def _try(self, url: str) -> Path | BrokenSample:
        try:
            return self.fetch(url)
        except BrokenSample as error:
            return error

    def fetch(self, url: str) -> Path:
        """Return the file with the content behind a URL.

        Raises:
            BrokenSample: the server refuses, does not answer, sends nothing for `_SILENT_SECONDS`,
                or needs more than `_MOST_SECONDS`; or the content is larger than `MOST_BYTES`.
            OSError: the file cannot be written.
        """
        if failure := self._failures.get(url):
            raise failure
        if not url.lower().startswith(("http://", "https://")):
            raise BrokenSample("only images behind http and https are fetched")
        name = bytes_digest(url.encode())
        path = self._folder / name[:3] / name
        if not path.exists():
            content = self._with_patience(url)
            durable.make_folder(path.parent)
            durable.write(path, content)
        return path

    def _with_patience(self, url: str) -> bytes:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            try:
                return self._download(url)
            except _Passing as error:
                reason = str(error)
        raise BrokenSample(f"it cannot be fetched: {reason}, {ATTEMPTS} times")

    def _download(self, url: str) -> bytes:
        with _Deadline() as deadline:
            try:
                request = urllib.request.Request(url, headers={"User-Agent": "torchtitan"})
                with self._opener.open(request, timeout=_SILENT_SECONDS) as response:
                    return _read(response, deadline)
            except (_Passing, BrokenSample):
                raise
            except urllib.error.HTTPError as error:
                reason = f"HTTP status {error.code} ({error.reason})"
                if error.code in _PASSING:
                    raise _Passing(reason) from error
                raise BrokenSample(f"it cannot be fetched: {reason}") from error
            except (OSError, http.client.HTTPException) as error:
                deadline.check()
                cause = getattr(error, "reason", None) or error
                raise _Passing(str(getattr(cause, "strerror", None) or cause)) from error
            except ValueError as error:  # no valid URL
                raise BrokenSample(f"it is not a valid URL: {error}") from error


class _Deadline:
    """Ends the connections that this thread opens in the block, also after redirections, when
    `_MOST_SECONDS` have passed: timeouts of sockets restart at each byte."""

    def __enter__(self) -> "_Deadline":
        self._until = time.monotonic() + _MOST_SECONDS
        self._timers: list[threading.Timer] = []
        _of_thread.deadline = self
        return self

    def __exit__(self, *_: object) -> None:
        del _of_thread.deadline
        for timer in self._timers:
            timer.cancel()

    def watch(self, connected: socket.socket) -> None:
        """Shut a connection down at the deadline."""
        timer = threading.Timer(self._until - time.monotonic(), _shut_down, [connected])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def check(self) -> None:
        """Raise `_Passing` after the deadline."""
        if time.monotonic() > self._until:
            raise _Passing(f"it took more than {_MOST_SECONDS:g} s")


_of_thread = threading.local()


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        # Not the method of TLS, which changes what the reading thread uses.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class _Passing(Exception):
    """Failure that another attempt may not meet."""


def _read(response: http.client.HTTPResponse, deadline: _Deadline) -> bytes:
    """Return the body of an answer. `read` returns less than announced without an error if the
    connection ends early."""
    announced = response.headers.get("Content-Length")
    content = bytearray()
    while chunk := response.read1(_CHUNK):
        content += chunk
        if len(content) > MOST_BYTES:
            raise BrokenSample(f"it has more than {MOST_BYTES:,} bytes; reduce it")
        deadline.check()
    deadline.check()
    if announced is not None and announced.isdecimal() and len(content) < int(announced):
        raise _Passing(f"the connection ended after {len(content):,} of {int(announced):,} bytes")
    return bytes(content)


def _http_opener() -> urllib.request.OpenerDirector:
    """Return an opener for HTTP and HTTPS alone; the default one also follows redirections to
    FTP."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _HTTPHandler(),
        _HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


class _HTTPConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _accept(self.sock)


class _HTTPSConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _accept(self.sock)


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPConnection, req)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPSConnection, req, context=ssl.create_default_context())


_METADATA = ipaddress.ip_address("fd00:ec2::254")
"""Address of a cloud's metadata that is not link-local."""


def _accept(connected: socket.socket) -> None:
    """Watch a new connection. Raise `BrokenSample` for one to an address where clouds answer with
    the credentials of the machine. A proxy must refuse such addresses itself."""
    _of_thread.deadline.watch(connected)
    address = ipaddress.ip_address(connected.getpeername()[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_link_local or address == _METADATA:
        raise BrokenSample(f"its host {address} may have credentials; nothing is fetched from it")
