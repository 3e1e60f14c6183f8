"""The cache that a class of transformers keeps in generation: keys and values, windows of them, states."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

_NAMES = ("past_key_values", "cache_params", "state")
"""Names of the cache among the results of classes."""


class ClassCache:
    """Tokens of a text and what the class remembers of them; with the interface of `components.generation.KVCache`.

    A class that makes no cache gets all tokens again in each forward pass.
    """

    def __init__(self) -> None:
        self.states: dict[nn.Module, Any] = {}
        self.clear()

    def __enter__(self) -> "ClassCache":
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self._tokens_BL: Tensor | None = None
        self._remembered: dict[str, Any] = {}

    def attention(self, positions_BL: Tensor) -> "NextTokens":
        """Return the description of the next forward pass, over tokens at these positions."""
        rows = AttentionMetadata.of_rows(*positions_BL.shape)
        return NextTokens(positions_BL=positions_BL, cu_seqlens=rows.cu_seqlens, max_seqlen=rows.max_seqlen, cache=self)

    def advance(self, length: int) -> None:
        """Keep the tokens of the last forward pass, of which there must be `length`."""
        if length != self._n_new:
            raise UserError(
                "a class of transformers keeps every token in its cache, but tensor parallelism adds padding; generate "
                "without cache (use_cache=False)"
            )

    def run(self, model: Any, tokens_BL: Tensor, attention: "NextTokens") -> Any:
        """Call a class on the tokens that follow the remembered ones. Padding before a text is masked."""
        assert attention.positions_BL is not None
        self._n_new = tokens_BL.shape[1]
        first = self._tokens_BL is None
        self._tokens_BL = tokens_BL if first else torch.cat((self._tokens_BL, tokens_BL), dim=1)
        n_slots = self._tokens_BL.shape[1]
        n_padding_B1 = n_slots - 1 - attention.positions_BL[:, -1:]
        mask_BS = (torch.arange(n_slots, device=tokens_BL.device) >= n_padding_B1).long()
        takes = inspect.signature(model.forward).parameters
        positions = {"position_ids": (mask_BS.cumsum(-1) - 1).clamp(min=0)} if "position_ids" in takes else {}
        inputs = model.prepare_inputs_for_generation(
            self._tokens_BL,
            next_sequence_length=self._n_new if self._remembered else None,
            attention_mask=mask_BS,
            is_first_iteration=first,
            use_cache=True,
            **positions,
            **self._remembered,
        )
        outputs = model(**{name: value for name, value in inputs.items() if name in takes}, return_dict=True)
        self._remembered = {name: outputs[name] for name in _NAMES if outputs.get(name) is not None}
        return outputs


@dataclass(frozen=True, kw_only=True, eq=False)
class NextTokens(AttentionMetadata):
    """Tokens that follow those in a cache."""

    cache: ClassCache
    """Runs the class."""
