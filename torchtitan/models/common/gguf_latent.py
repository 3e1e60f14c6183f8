"""Latent attention in GGUF: as one head of keys that are the latents, whose first part is also the
values."""

from dataclasses import dataclass

from torch import Tensor

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.gguf import check_eps, require_gguf
from torchtitan.models.common.gguf_rows import OneWay
from torchtitan.models.common.hugging_face import module_rows
from torchtitan.models.common.latent_attention import LatentDecoder
from torchtitan.protocols.state_dict_adapter import KeyMapping


@dataclass(frozen=True)
class _KeysAndValues(OneWay):
    """The projection of latents to keys and values, as one matrix of each head: of keys (latent,
    head width) and of values (head width, latent)."""

    n_heads: int
    plain_dim: int

    def to_external(self, tensors: list[Tensor]) -> list[Tensor]:
        heads = tensors[0].unflatten(0, (self.n_heads, -1))
        return [heads[:, : self.plain_dim].mT, heads[:, self.plain_dim :]]


_NAMES = {
    "q_latent.0": "attn_q_a",
    "q_latent.1": "attn_q_a_norm",
    "q_latent.2": "attn_q_b",
    "wkv_a": "attn_kv_a_mqa",
    "kv_norm": "attn_kv_a_norm",
}


def latent_rows(config: Decoder.Config) -> tuple[KeyMapping, ...]:
    """Return the rows of latent attention, without those that all attention has."""
    head_dim = config.resolved_head_dim
    plain_dim = head_dim - config.rope.rotated_dim(head_dim)
    return (
        *module_rows("layers.*.attention", "blk.*", _NAMES),
        KeyMapping(
            "layers.*.attention.attend.wkv_b.weight",
            ("blk.*.attn_k_b.weight", "blk.*.attn_v_b.weight"),
            _KeysAndValues(config.n_heads, plain_dim),
        ),
    )


def latent_keys(config: Decoder.Config) -> dict[str, object]:
    """Return the metadata of latent attention. Raise `UserError` for biases, which it does not
    have."""
    assert isinstance(config, LatentDecoder.Config)
    require_gguf(not config.attention_bias, "attention_bias", True, "False")
    check_eps(config)
    rank, head_dim = config.kv_lora_rank, config.resolved_head_dim
    queries = {} if config.q_lora_rank is None else {"attention.q_lora_rank": config.q_lora_rank}
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + config.rope.rotated_dim(head_dim),
        "attention.value_length": rank,
        "attention.key_length_mla": head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": rank,
        **queries,
    }
