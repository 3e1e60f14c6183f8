"""`torchtitan serve`: answer OpenAI's API with a checkpoint's model."""

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.cli.model_options import (
    add_chat_template_option,
    add_model_options,
    open_model,
    run_command,
)
from torchtitan.tools.errors import UserError, in_words, require
from torchtitan.tools.files import read_object
from torchtitan.tools.logging import logger
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from torch import nn

    from torchtitan.components.serving.app import Limits, ServedModel
    from torchtitan.components.serving.views import View

KEY_VARIABLE = "TORCHTITAN_API_KEY"
"""Environment variable with the API key, which a command line would show to other users."""

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MOST_CONNECTIONS = 1000
_CLOSING_SECONDS = 5

FOLLOWING_SECONDS = 5.0
"""Time between two looks for a newer checkpoint."""


def serve(args: Sequence[str]) -> int:
    """Serve until Ctrl-C, and return the exit code."""
    parser = Parser(
        prog="torchtitan serve",
        description="Serve a model over HTTP with OpenAI's API: /v1/models, /v1/completions, "
        "/v1/chat/completions, /health, /metrics; and a page to chat with it at /. Requests join "
        "and leave the batch between tokens. Needs pip install 'torchtitan[serve]'. Any client of "
        "the API works: OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='…'). Ctrl-C ends.",
    )
    _add_options_of_the_server(parser)
    _add_options_of_models(parser)
    options = parser.parse_args(args)
    return run_command("serve", lambda: _serve(options))


def _add_options_of_the_server(parser: Parser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only); others need an API "
        "key or --insecure",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0: any free one (default: 8000)",
    )
    parser.add_argument(
        "--api_key",
        default="",
        metavar="KEY",
        help="key that requests must carry as Authorization: Bearer KEY (default: the environment "
        f"variable {KEY_VARIABLE}, which other users of this machine cannot see)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen on other addresses than this machine's without a key",
    )
    parser.add_argument(
        "--max_rows",
        type=int,
        default=64,
        metavar="N",
        help="texts that are computed at a time (default: 64)",
    )
    parser.add_argument(
        "--max_queue",
        type=int,
        default=256,
        metavar="N",
        help="texts that may wait; more requests get the status 429 (default: 256)",
    )


def _add_options_of_models(parser: Parser) -> None:
    """Add the options of models, runs and data."""
    parser.add_argument(
        "--model_name",
        default="",
        metavar="NAME",
        help="name of the model in requests (default: the name of the checkpoint's folder)",
    )
    add_chat_template_option(parser)
    parser.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="more models, by name: adapter checkpoints of the same base model, or others. They "
        "share the memory of equal weights, but have batches of their own",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="of a run in progress (--checkpoint is its folder): use each newer checkpoint as soon "
        "as the running texts have ended",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="folder of a run, or with the folders of runs: the page shows their curves, also "
        "while they train (default: with --follow, the run)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="fine-tuning data, as --dataloader.dataset takes it: the page shows its rows as the "
        "model would be trained on them",
    )
    add_model_options(parser, more=", or a run's folder, for its newest checkpoint")


def _serve(options: argparse.Namespace) -> None:
    _check(options)
    from torchtitan.components.serving.app import create_app  # needs starlette

    run = options.checkpoint
    views = _views_of_runs(options)
    served = _open_all(options)
    views |= _views_of_data(options, served[0])
    app = create_app(served, _limits(options), views)
    if options.follow:
        with _following(run, options, served[0]):
            _listen(app, served, options.host, options.port)
    else:
        with _lasting_objects():
            _listen(app, served, options.host, options.port)


@contextlib.contextmanager
def _lasting_objects() -> Iterator[None]:
    """Leave all objects of this time out of the searches for garbage within the block: each would
    stop all streams for the time of about 20 tokens. Models that are replaced must not be among
    them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _views_of_runs(options: argparse.Namespace) -> "dict[str, View]":
    from torchtitan.cli.served_views import RunsView

    folder = options.runs or (options.checkpoint if options.follow else None)
    return {"runs": RunsView(folder)} if folder else {}


def _views_of_data(options: argparse.Namespace, served: "ServedModel") -> "dict[str, View]":
    from torchtitan.cli.served_views import DataView

    if not options.data:
        return {}
    preparer = served.preparer
    return {"data": DataView(options.data, preparer.tokenizer, preparer.template)}


def _check(options: argparse.Namespace) -> None:
    from torchtitan.components.checkpoint.formats import check_checkpoint

    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be installed to serve (pip install 'torchtitan[serve]')"
        )
    require(0 <= options.port <= 65535, "--port", options.port, "0 to 65535")
    require(options.max_rows >= 1, "--max_rows", options.max_rows, "at least 1")
    require(options.max_queue >= 1, "--max_queue", options.max_queue, "at least 1")
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    if not key.isascii() or any(character.isspace() for character in key):
        raise UserError("--api_key has characters that no HTTP header can carry; use ASCII letters")
    if options.follow and options.adapters:
        raise UserError("--follow loads one model, and cannot be combined with --adapters")
    if options.follow and _newest(options.checkpoint) == options.checkpoint:
        raise UserError(
            f"--follow: {options.checkpoint} is not the folder of a run with a checkpoint; name "
            "the run's folder as --checkpoint"
        )
    check_checkpoint(_newest(options.checkpoint), "--checkpoint")
    for name, path in _adapters(options.adapters).items():
        check_checkpoint(_newest(path), f"--adapters {name}")
    if not (_is_loopback(options.host) or key or options.insecure):
        raise UserError(
            f"--host {options.host} is reachable from other machines; set --api_key or "
            f"{KEY_VARIABLE}, or --insecure to serve anyone who reaches it"
        )


def _limits(options: argparse.Namespace) -> "Limits":
    from torchtitan.components.serving.app import Limits

    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    is_local = _is_loopback(options.host)
    names = (*_LOCAL_NAMES, _in_url(options.host))
    return Limits(api_key=key, hosts=names if is_local and not key else ())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _open_all(options: argparse.Namespace) -> "list[ServedModel]":
    """Open the checkpoint and the adapters."""
    from torchtitan.components.serving.weights import share_weights

    paths = _adapters(options.adapters)
    first, model = _open(options, options.model_name or options.checkpoint.resolve().name)
    served = [first]
    for name, path in paths.items():
        own = argparse.Namespace(**vars(options))
        own.checkpoint = path
        other, other_model = _open(own, name)
        shared = share_weights(model, other_model)
        logger.info("%s shares %.0f%% of its weights with %s", name, 100 * shared, first.name)
        served.append(other)
    return served


@contextlib.contextmanager
def _following(run: Path, options: argparse.Namespace, served: "ServedModel") -> Iterator[None]:
    """Load newer checkpoints of a run in a thread within the block. At its end, a load in progress
    gets a few seconds; it is a daemon's, so that it ends with the process."""
    ends = threading.Event()
    follower = threading.Thread(target=_follow, args=(run, options, served, ends), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ends.set()
        follower.join(_CLOSING_SECONDS)


def _follow(
    run: Path, options: argparse.Namespace, served: "ServedModel", ends: threading.Event
) -> None:
    failure = ""
    while not ends.wait(FOLLOWING_SECONDS):
        try:
            _load_newer(run, options, served, ends)
            failure = ""
        except Exception as error:
            # such as a checkpoint that the run removes, or memory that is short for a while
            reason = str(error) if isinstance(error, UserError) else in_words(error)
            if reason != failure:
                logger.warning("a newer checkpoint of %s is not loaded: %s", run, reason)
            failure = reason


def _load_newer(
    run: Path, options: argparse.Namespace, served: "ServedModel", ends: threading.Event
) -> None:
    """Load the newest checkpoint of a run, if it has another one than at the last call. One that
    fails is not tried again."""
    newest = _newest(run)
    if newest in (run, options.checkpoint):  # the run itself: it has none at the moment
        return
    options.checkpoint = newest
    model = open_model(options).model
    if ends.is_set():
        return

    def show() -> None:
        served.description["checkpoint"] = newest.name
        logger.info("%s: %s from now on", served.name, newest)

    served.scheduler.replace(model, show)


def _adapters(words: Sequence[str]) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path) or name in paths:
            raise UserError(f"--adapters {word} must be NAME=PATH, with a new NAME")
        paths[name] = Path(path)
    return paths


def _open(options: argparse.Namespace, name: str) -> "tuple[ServedModel, nn.Module]":
    from torchtitan.components.chat_template import load_chat_template, resolve_chat_template
    from torchtitan.components.serving.app import ServedModel
    from torchtitan.components.serving.prompts import Preparer
    from torchtitan.components.serving.scheduler import Scheduler

    options.checkpoint = _newest(options.checkpoint)
    opened = open_model(options)
    tokenizer = opened.tokenizer
    template = load_chat_template(*opened.folders)
    if options.chat_template:
        template = resolve_chat_template(
            options.chat_template, opened.folders, tokenizer, option="--chat_template"
        )
    if reads_images(opened.folders[0]):
        logger.warning("%s reads images, but the server answers texts only", name)
    config: Any = opened.model.config
    preparer = Preparer(
        tokenizer,
        opened.folders,
        context=opened.context,
        vocab_size=min(config.vocab_size, tokenizer.vocab_size),
        template=template,
    )
    if preparer.unread_calls:
        logger.warning("%s", preparer.unread_calls)
    scheduler = Scheduler(
        opened.model, tokenizer, max_rows=options.max_rows, max_queue=options.max_queue
    )
    description = {"checkpoint": options.checkpoint.name}
    served = ServedModel(name=name, preparer=preparer, scheduler=scheduler, description=description)
    return served, opened.model


def reads_images(folder: Path) -> bool:
    """Return whether the model in a folder reads images, by its files."""
    has_processor = (folder / "preprocessor_config.json").is_file()
    return has_processor or "vision_config" in read_object(folder / "config.json")


def _newest(path: Path) -> Path:
    """Return the newest complete checkpoint of a run, or the path itself."""
    from torchtitan.components.checkpoint.catalog import list_checkpoints

    for folder in (path, path / "checkpoint"):
        complete = [info for info in list_checkpoints(folder) if info.is_complete]
        if usable := [info for info in complete if not info.damage]:
            return Path(str(usable[-1].path))
    return path


def _listen(app: "Starlette", served: "Sequence[ServedModel]", host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn

    from torchtitan.components.serving.connections import TimedConnection

    class Server(uvicorn.Server):
        """A server whose process ends normally on a signal."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Stop on a signal. Uvicorn's own method sends it again afterwards, which would end
            this process as if it had failed."""
            numbers = (signal.SIGINT, signal.SIGTERM)
            previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Give requests some time, then end them with an error."""
            ending = asyncio.create_task(self._end_requests())
            await super().shutdown(sockets)
            ending.cancel()

        async def _end_requests(self) -> None:
            await asyncio.sleep(_CLOSING_SECONDS)
            for model in served:
                await asyncio.to_thread(model.scheduler.close)

    warnings = logging.getLogger("uvicorn.error")
    warnings.handlers[:] = logger.handlers
    warnings.setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        http=TimedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=2 * _CLOSING_SECONDS,
    )
    with _bound(host, port) as listener:
        address = f"http://{_in_url(host)}:{listener.getsockname()[1]}/"
        names = ", ".join(model.name for model in served)
        words = "serving %s at %sv1 (chat in a browser: %s; Ctrl-C ends)"
        logger.info(words, names, address, address)
        try:
            Server(config).run([listener])
        finally:
            for model in served:
                model.scheduler.close()
    logger.info("the server has ended")


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raise `UserError` if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--host {host} --port {port} cannot be used: {reason}; choose another port (0: any "
            "free one) or an address of this machine"
        ) from error
