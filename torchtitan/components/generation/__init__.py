"""Generation of text from any model: sampling, a key/value cache, decoding as it comes."""

from torchtitan.components.generation.generate import Generation, generate
from torchtitan.components.generation.kv_cache import KVCache
from torchtitan.components.generation.prompts import start_id, stop_ids
from torchtitan.components.generation.sampling import Sampling
from torchtitan.components.generation.text_stream import TextStream

__all__ = ["Generation", "KVCache", "Sampling", "TextStream", "generate", "start_id", "stop_ids"]
