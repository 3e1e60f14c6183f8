"""Qwen3, its dense models ("Qwen3 Technical Report", arXiv:2505.09388)."""

from torchtitan.models.common.decoder import BlockDesign, Decoder


class Qwen3Model(Decoder):
    """Llama's blocks, with norms of each head's queries and keys."""

    design = BlockDesign(qk_norm=True)
