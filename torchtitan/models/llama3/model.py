"""Llama 3 ("The Llama 3 Herd of Models", arXiv:2407.21783)."""

from torchtitan.models.common.decoder import Decoder


class Llama3Model(Decoder):
    """Llama 3, 3.1 and 3.2: they differ in sizes, tying and RoPE scaling alone."""
