"""The server as an ASGI application, which programs can mount in their own."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from torchtitan.components.serving.errors import RequestError
from torchtitan.components.serving.fields import parse_body, shown
from torchtitan.components.serving.metrics import Metrics
from torchtitan.components.serving.page import chat_page
from torchtitan.components.serving.prompts import Preparer
from torchtitan.components.serving.requests import chat_request, completion_request
from torchtitan.components.serving.responses import ChatAnswer, CompletionAnswer, TokenTexts
from torchtitan.components.serving.scheduler import Scheduler, Ticket
from torchtitan.components.serving.views import View, ViewEndpoints
from torchtitan.tools.errors import UserError, suggest

_CLIENT_LEFT = 499
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of requests."""

    api_key: str = ""
    """Key that requests must carry as `Authorization: Bearer KEY`; empty: none."""

    hosts: Sequence[str] = ()
    """Names in the `Host` header that are answered; empty: all. A web page that resolves its own
    name to this machine is refused by it."""

    body_bytes: int = 16 * 2**20
    """Largest body."""

    body_seconds: float = 30.0
    """Time in which a body must arrive."""


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """A model that a server offers. Several have a scheduler each, so that their texts are computed
    in batches of their own."""

    name: str
    preparer: Preparer
    scheduler: Scheduler
    description: dict[str, str] = field(default_factory=dict)
    """More fields of its entry in `/v1/models`, such as its checkpoint."""


Endpoint = Callable[[HTTPRequest], Awaitable[Response]]


def create_app(
    served: ServedModel | Sequence[ServedModel],
    limits: Limits | None = None,
    views: Mapping[str, View] | None = None,
) -> Starlette:
    """Return the application for models with different names. Its lifespan starts and closes the
    schedulers. A mounted application has none, so the first request starts them; to close them,
    enter `app.router.lifespan_context(app)` in the outer one's. `views` by kind (runs, data) are
    shown by the page, and answered at `/v1/KIND`. Raise `UserError` if a name occurs twice."""
    models = [served] if isinstance(served, ServedModel) else list(served)
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two models have the name {name}; give each its own")
    server = _Server({model.name: model for model in models}, limits or Limits())
    app = Starlette(
        routes=[
            Route("/", server.answered(server.page)),
            Route("/health", server.health),
            Route("/metrics", server.guarded(server.show_metrics)),
            Route("/v1/models", server.guarded(server.models)),
            Route("/v1/models/{name:path}", server.guarded(server.one_model)),
            Route("/v1/completions", server.guarded(server.completions), methods=["POST"]),
            Route("/v1/chat/completions", server.guarded(server.chat), methods=["POST"]),
            *_view_routes(server, views or {}),
        ],
        exception_handlers={HTTPException: server.http_error, Exception: _failure},
        lifespan=server.lifespan,
    )
    for route in app.routes:
        assert isinstance(route, Route)
        server.paths[route.endpoint] = route.path
    return app


def _view_routes(server: "_Server", views: Mapping[str, View]) -> list[Route]:
    async def kinds(request: HTTPRequest) -> Response:
        """List the kinds of views."""
        return JSONResponse({"object": "list", "data": [{"id": kind} for kind in views]})

    routes = [Route("/v1/views", server.guarded(kinds))]
    for kind, view in views.items():
        endpoints = ViewEndpoints(kind, view)
        routes.append(Route(f"/v1/{kind}", server.guarded(endpoints.list)))
        routes.append(Route(f"/v1/{kind}/{{name:path}}", server.guarded(endpoints.one)))
    return routes


def _answer_error(error: RequestError) -> Response:
    return JSONResponse(error.to_dict(), status_code=error.status, headers=error.headers)


def _failure(request: HTTPRequest, error: Exception) -> Response:
    return _answer_error(RequestError("the server failed; its log says why", status=500))


class _Server:
    def __init__(self, served: dict[str, ServedModel], limits: Limits):
        self._served = served
        self._schedulers = [model.scheduler for model in served.values()]
        self._limits = limits
        self._metrics = Metrics(self._schedulers)
        self.paths: dict[Endpoint, str] = {}
        """Paths of the routes by their endpoints."""
        self._token_texts = {
            name: TokenTexts(model.preparer.tokenizer) for name, model in served.items()
        }
        self._created = int(time.time())
        # One thread: a slow template or a long text delays other new requests, but no stream.
        self._preparing = ThreadPoolExecutor(1, "prepare")

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._start()
        try:
            yield
        finally:
            for scheduler in self._schedulers:
                await asyncio.to_thread(scheduler.close)
            self._preparing.shutdown()

    def _start(self) -> None:
        for scheduler in self._schedulers:
            scheduler.start()

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that also checks the key."""

        async def checked(request: HTTPRequest) -> Response:
            self._check_key(request)
            return await endpoint(request)

        return self.answered(checked)

    def answered(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that checks the host, counts, and answers errors."""

        async def answer(request: HTTPRequest) -> Response:
            self._start()
            try:
                self._check_host(request)
                response = await endpoint(request)
            except RequestError as error:
                response = _answer_error(error)
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_LEFT)
            self._metrics.count(self.paths[answer], response.status_code)
            return response

        return answer

    def http_error(self, request: HTTPRequest, error: Exception) -> Response:
        """Answer a request that has no endpoint."""
        assert isinstance(error, HTTPException)
        # `request.url` cannot be read if Host is not a name.
        path = shown(request.scope["path"])
        words = {
            404: f"there is no {path}; see GET /v1/models, POST /v1/chat/completions and "
            "POST /v1/completions",
            405: f"{path} does not take {request.method}",
        }
        message = words.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        self._metrics.count(None, error.status_code)
        return _answer_error(RequestError(message, status=error.status_code, headers=headers))

    def _check_host(self, request: HTTPRequest) -> None:
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        hosts = self._limits.hosts
        if hosts and name.lower() not in map(str.lower, hosts):
            raise RequestError(
                f"the host {shown(name)} is not served; use {', '.join(hosts)}",
                status=421,
            )

    def _check_key(self, request: HTTPRequest) -> None:
        if not self._limits.api_key:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._limits.api_key.encode()):
            raise RequestError(
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def page(self, request: HTTPRequest) -> Response:
        """Show the page for chats. It needs no key, since it holds nothing but its own code; it
        asks for the key."""
        content, headers = chat_page()
        return HTMLResponse(content, headers=headers)

    async def health(self, request: HTTPRequest) -> Response:
        """Say whether requests are computed."""
        self._start()
        is_alive = all(scheduler.is_alive for scheduler in self._schedulers)
        return JSONResponse(
            {"status": "ok" if is_alive else "closing"}, status_code=200 if is_alive else 503
        )

    async def show_metrics(self, request: HTTPRequest) -> Response:
        """Show counters in Prometheus' text format."""
        return PlainTextResponse(
            self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def models(self, request: HTTPRequest) -> Response:
        """List the models."""
        models = [self._description(model) for model in self._served.values()]
        return JSONResponse({"object": "list", "data": models})

    async def one_model(self, request: HTTPRequest) -> Response:
        """Describe a model."""
        return JSONResponse(self._description(self._model(request.path_params["name"])))

    def _description(self, model: ServedModel) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "torchtitan",
            "max_model_len": model.preparer.context,
            "has_chat_template": model.preparer.has_template,
            **model.description,
        }

    def _model(self, name: str) -> ServedModel:
        if name not in self._served:
            names = ", ".join(map(shown, self._served))
            raise RequestError(
                f"the server has no model {shown(name)}, but {names}" + suggest(name, self._served),
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._served[name]

    async def completions(self, request: HTTPRequest) -> Response:
        """Continue texts."""
        return await self._generate(request, self._prepare_completion)

    async def chat(self, request: HTTPRequest) -> Response:
        """Answer a conversation."""
        return await self._generate(request, self._prepare_chat)

    def _prepare_completion(self, content: bytes) -> CompletionAnswer:
        request = completion_request(parse_body(content))
        model = self._model(request.model)
        model.scheduler.check_room(len(request.prompts), request.n)
        prepared = model.preparer.completion(request)
        return CompletionAnswer(request, prepared, self._token_texts[request.model])

    def _prepare_chat(self, content: bytes) -> ChatAnswer:
        request = chat_request(parse_body(content))
        model = self._model(request.model)
        model.scheduler.check_room(1, request.n)
        prepared = model.preparer.chat(request)
        return ChatAnswer(request, prepared, self._token_texts[request.model])

    async def _generate(
        self, request: HTTPRequest, prepare: Callable[[bytes], CompletionAnswer | ChatAnswer]
    ) -> Response:
        started = time.monotonic()
        content = await self._body(request)
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._preparing, partial(prepare, content))
        except UserError as error:
            raise RequestError(str(error)) from None
        except RecursionError:
            raise RequestError("the body is nested too deeply", code="invalid_json") from None
        ticket = self._served[answer.model].scheduler.submit(answer.jobs)
        if answer.streams:
            return _TicketStream(ticket, self._stream(ticket, answer, started))
        with ticket:
            whole = asyncio.create_task(self._collect(ticket, answer, started))
            left = asyncio.create_task(_disconnected(request))
            try:
                await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
                if not whole.done():
                    raise ClientDisconnect
                return JSONResponse(whole.result())
            finally:
                whole.cancel()
                left.cancel()

    async def _body(self, request: HTTPRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A web page may send other types to any server without asking it first.
            raise RequestError(
                f"the header Content-Type is {shown(kind)}, but must be application/json",
                status=415,
            )
        limit = self._limits.body_bytes
        content = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > limit:
                        raise RequestError(
                            f"the body has more than {limit:,} bytes; send a shorter one",
                            status=413,
                        )
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive in {self._limits.body_seconds:g} seconds",
                status=408,
                headers={"Connection": "close"},
            ) from None
        return bytes(content)

    async def _collect(
        self, ticket: Ticket, answer: CompletionAnswer | ChatAnswer, started: float
    ) -> dict[str, object]:
        async for update in ticket.updates():
            answer.add(update)
        self._metrics.finish(time.monotonic() - started)
        return answer.to_dict()

    async def _stream(
        self, ticket: Ticket, answer: CompletionAnswer | ChatAnswer, started: float
    ) -> AsyncIterator[str]:
        is_first = True
        for chunk in answer.first_chunks():
            yield _event(chunk)
        try:
            async for update in ticket.updates():
                if is_first:
                    self._metrics.first_text(time.monotonic() - started)
                    is_first = False
                for chunk in answer.chunks(update):
                    yield _event(chunk)
        except RequestError as error:
            yield _event(error.to_dict())
            return
        for chunk in answer.last_chunks():
            yield _event(chunk)
        self._metrics.finish(time.monotonic() - started)
        yield "data: [DONE]\n\n"


class _TicketStream(StreamingResponse):
    """A stream of events, at whose end, or when the client leaves, its jobs end."""

    def __init__(self, ticket: Ticket, content: AsyncIterator[str]):
        super().__init__(content, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ticket:
            await super().__call__(scope, receive, send)


def _event(document: Mapping[str, object]) -> str:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n"


async def _disconnected(request: HTTPRequest) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
