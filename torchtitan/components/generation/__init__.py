"""Text generation with any model: sampling, a key/value cache, incremental decoding."""

from torchtitan.components.generation.engine import Engine, Generation, generate
from torchtitan.components.generation.kv_cache import KVCache
from torchtitan.components.generation.plain_loop import Arrivals
from torchtitan.components.generation.row import TextCoroutine
from torchtitan.components.generation.sampling import Sampling
from torchtitan.components.generation.session import Session
from torchtitan.components.generation.text import (
    StopFinder,
    TextStream,
    TextWriter,
    continuation_stop_ids,
    start_id,
    stop_ids,
)

__all__ = [
    "Arrivals",
    "Engine",
    "Generation",
    "KVCache",
    "Sampling",
    "Session",
    "StopFinder",
    "TextCoroutine",
    "TextStream",
    "TextWriter",
    "continuation_stop_ids",
    "generate",
    "start_id",
    "stop_ids",
]
