"""The cache that a class of transformers keeps in generation: keys and values, windows of them, states."""

import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.transformers.description import build_class, transformers_config
from torchtitan.models.transformers.tiny import TEXT_IDS, tiny_config
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

_TOLERANCE = 1e-4
"""Largest change of a float32 logit by the cache and by padding, relative to the largest logit."""

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
        self._tokens: list[Tensor] = []
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
        self._tokens.append(tokens_BL)
        all_BS = torch.cat(self._tokens, dim=1)
        n_slots = all_BS.shape[1]
        n_padding_B1 = n_slots - 1 - attention.positions_BL[:, -1:]
        mask_BS = (torch.arange(n_slots, device=tokens_BL.device) >= n_padding_B1).long()
        takes = inspect.signature(model.forward).parameters
        positions = {"position_ids": (mask_BS.cumsum(-1) - 1).clamp(min=0)} if "position_ids" in takes else {}
        inputs = model.prepare_inputs_for_generation(
            all_BS,
            next_sequence_length=self._n_new if self._remembered else None,
            attention_mask=mask_BS,
            is_first_iteration=len(self._tokens) == 1,
            use_cache=True,
            **positions,
            **self._remembered,
        )
        if "logits_to_keep" in takes:
            inputs["logits_to_keep"] = 0  # all hidden states reach the head
        outputs = model(**{name: value for name, value in inputs.items() if name in takes}, return_dict=True)
        self._remembered = {name: outputs[name] for name in _NAMES if outputs.get(name) is not None}
        return outputs


@dataclass(frozen=True, kw_only=True, eq=False)
class NextTokens(AttentionMetadata):
    """Tokens that follow those in a cache."""

    cache: ClassCache
    """Runs the class."""


def has_cache(document: Mapping[str, Any], implementation: str | None) -> bool:
    """Return whether a tiny clone of the class of a config.json, with this attention, gives the same logits with its
    cache and padding as without."""
    return _has_cache(json.dumps(document, sort_keys=True), implementation)


@functools.cache
@torch.no_grad()
def _has_cache(document: str, implementation: str | None) -> bool:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), ClassCache() as cache:
        torch.manual_seed(0)
        try:
            model = build_class(tiny_config(transformers_config(json.loads(document))), implementation).eval()
            for parameter in model.parameters():
                parameter.normal_(std=max(parameter.shape[1:], default=1) ** -0.5)
            text, padding = torch.tensor(TEXT_IDS)[None, :20], torch.zeros(1, 5, dtype=torch.long)
            expected = model(input_ids=text, use_cache=False).logits[0, -1]
            for tokens_BL, end in (
                (torch.cat((padding, text[:, :-2]), 1), 18),
                (text[:, -2:-1], 19),
                (text[:, -1:], 20),
            ):
                positions_BL = torch.arange(end - tokens_BL.shape[1], end)[None].clamp(min=0)
                logits = cache.run(model, tokens_BL, cache.attention(positions_BL)).logits[0, -1]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        return bool((logits - expected).abs().max() <= _TOLERANCE * expected.abs().max())
