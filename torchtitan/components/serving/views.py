"""Further views on a server's page, such as runs."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchtitan.components.serving.errors import RequestError
from torchtitan.components.serving.fields import shown


class View(Protocol):
    """Records with names. Its methods run in a thread."""

    def names(self) -> list[str]:
        """Return the names of the present records."""
        ...

    def read(self, name: str, query: Mapping[str, str]) -> dict[str, object]:
        """Return a record as a JSON object. Raise `RequestError` for a wrong query."""
        ...


class ViewEndpoints:
    """Endpoints of a view: the list of its records, and one of them."""

    def __init__(self, kind: str, view: View):
        self._kind = kind
        self._view = view

    async def list(self, request: Request) -> Response:
        """List the records."""
        names = await asyncio.to_thread(self._view.names)
        return JSONResponse({"object": "list", "data": [{"id": name} for name in names]})

    async def one(self, request: Request) -> Response:
        """Show a record."""
        name = request.path_params["name"]
        if name not in await asyncio.to_thread(self._view.names):
            raise RequestError(
                f"there is no {shown(name)} in /v1/{self._kind}", status=404, param="name"
            )
        record = await asyncio.to_thread(self._view.read, name, request.query_params)
        return JSONResponse({"id": name, **record})
