"""A server of the small model for tests: in this process, without sockets or with them."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'torchtitan[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'torchtitan[serve]'")

import uvicorn
from starlette.applications import Starlette

from torchtitan.components.chat_template import ChatTemplate, resolve_chat_template
from torchtitan.components.serving.app import Limits, ServedModel, create_app
from torchtitan.components.serving.connections import TimedConnection
from torchtitan.components.serving.prompts import Preparer
from torchtitan.components.serving.scheduler import Scheduler
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.pretrained import load_model

CONTEXT = 512


def make_app(
    folder: Path, *, template: ChatTemplate | None = None, limits: Limits | None = None, **rows: int
) -> tuple[Starlette, Scheduler]:
    """Return an application for the model in a folder, named `stories`."""
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    loaded = load_model(folder, device="cpu")
    template = template or resolve_chat_template("chatml", [folder], tokenizer)
    preparer = Preparer(
        tokenizer, [folder], context=CONTEXT, vocab_size=tokenizer.vocab_size, template=template
    )
    scheduler = Scheduler(loaded.model, tokenizer, **rows)
    served = ServedModel(name="stories", preparer=preparer, scheduler=scheduler)
    return create_app(served, limits), scheduler


@contextlib.contextmanager
def listening(app: Starlette, **options: Any) -> Iterator[int]:
    """Serve an application in a thread; yield the port."""
    config = uvicorn.Config(
        app, port=0, http=TimedConnection, log_config=None, ws="none", lifespan="on", **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
