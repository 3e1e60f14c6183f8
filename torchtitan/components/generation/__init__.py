"""Text generation with any model: sampling, a key/value cache, incremental decoding."""

from torchtitan.components.generation.generate import Generation, KVCache, generate
from torchtitan.components.generation.sampling import Sampling
from torchtitan.components.generation.text import TextStream, start_id, stop_ids

__all__ = ["Generation", "KVCache", "Sampling", "TextStream", "generate", "start_id", "stop_ids"]
