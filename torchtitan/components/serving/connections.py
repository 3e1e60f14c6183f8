"""Connections whose clients must send their headers in time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """Uvicorn's connection, closed if the headers of a request take too long. Uvicorn itself limits
    only the time before a request's first byte, except a connection's first one, so that a client
    which sends a byte now and then would hold its connection forever."""

    header_seconds = 20.0
    """Time in which headers must arrive."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

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
