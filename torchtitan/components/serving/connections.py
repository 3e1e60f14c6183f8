"""Connections whose clients must send their headers and read their answers in time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST_BYTES = 2**16


class TimedConnection(H11Protocol):
    """Uvicorn's connection, closed if the headers of a request take too long, or if the client
    stops reading. Uvicorn itself limits only the time before a request's first byte, except a
    connection's first one, so that a client which sends a byte now and then would hold its
    connection forever, as would one that does not read."""

    header_seconds = 20.0
    """Time in which headers must arrive."""

    write_seconds = 60.0
    """Time in which bytes that wait for the client must leave, or at least 64 KiB of them."""

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Report all bytes that the client does not take, also after the answer is finished.
        transport.set_write_buffer_limits(high=0)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _expect_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self._close_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _expect_reading(self) -> None:
        n_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_seconds, self._check_reading, n_bytes)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_reading(self, n_before: int) -> None:
        if n_before - self.transport.get_write_buffer_size() >= _LEAST_BYTES:
            self._expect_reading()
        else:
            self.transport.abort()  # closing would wait for the client
