"""The generation cache of a transformers class: keys and values, windows of them, states."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.generation import KVCache
from torchtitan.models.transformers.captions import (
    blank_image,
    caption_inputs,
    image_states,
    taken,
    without_image,
)
from torchtitan.models.transformers.cross_attention import cross_attention_arguments
from torchtitan.models.transformers.description import transformers_config
from torchtitan.models.transformers.images import (
    absent_images,
    counted_positions,
    reads_latest_image,
)
from torchtitan.models.transformers.packing import ClassOutputs
from torchtitan.models.transformers.tiny import (
    CLONE_TOLERANCE,
    TEXT_IDS,
    random_clone,
    text_inputs,
    trial,
)
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import OF_TOKENS


class ClassCache(KVCache):
    """Tokens of a text and what the class remembers of them; a class without a cache gets all
    tokens each time.

    Args:
        images: arguments of the class for the images of a single text.
    """

    def __init__(self, images: Mapping[str, Tensor] | None = None) -> None:
        self._images = images
        self._modules = []
        self.states = {}
        self._cleanup = ExitStack()
        self.clear()

    def clear(self) -> None:
        self._tokens_BL: Tensor | None = None
        self._image_positions: Tensor | None = None
        self._remembered: dict[str, object] = {}

    def attention(self, positions_BL: Tensor) -> "NextTokens":
        rows = AttentionMetadata.of_rows(*positions_BL.shape)
        return NextTokens(
            positions_BL=positions_BL,
            cu_seqlens=rows.cu_seqlens,
            max_seqlen=rows.max_seqlen,
            cache=self,
        )

    @property
    def has_images(self) -> bool:
        """True if the class has images for the texts."""
        return self._images is not None

    def newest(self, hidden_BSD: Tensor) -> Tensor:
        """Return the hidden states of the new tokens from those that the class computed."""
        return hidden_BSD[:, -self._n_new :]

    def advance(self, length: int) -> None:
        """Keep the tokens of the last forward pass; their number must be `length`."""
        assert length == self._n_new

    def run(
        self,
        model: Any,
        tokens_BL: Tensor,
        attention: "NextTokens",
        images: Mapping[str, Tensor] | None = None,
    ) -> ClassOutputs:
        """Call a class on the tokens that follow the remembered ones. Padding before a text is
        masked. The first tokens may have `images`: arguments of the class."""
        assert attention.positions_BL is not None
        if images is not None:
            self._images = images
        self._n_new = tokens_BL.shape[1]
        all_BS = (
            tokens_BL if self._tokens_BL is None else torch.cat((self._tokens_BL, tokens_BL), dim=1)
        )
        n_padding_B1 = all_BS.shape[1] - 1 - attention.positions_BL[:, -1:]
        mask_BS = (torch.arange(all_BS.shape[1], device=tokens_BL.device) >= n_padding_B1).long()
        if self._images is not None and self._tokens_BL is None:
            inputs = {**self._images, "input_ids": all_BS, "attention_mask": mask_BS}
            rows = caption_inputs(model, inputs)  # also of rows that end later
            self._images = {name: rows[name] for name in self._images}
        known_BS = all_BS
        if self._images is not None:
            all_BS, mask_BS = without_image(model, all_BS, mask_BS).values()
        takes = taken(model)
        more: dict[str, Tensor] = {}
        if self._images is not None and not self._remembered:
            # A class without a cache, such as Granite 4 Vision, reads the images each time.
            more = {
                name: F.pad(value, (0, all_BS.shape[1] - value.shape[1]))
                if name.endswith(OF_TOKENS)
                else value
                for name, value in self._images.items()
            }
        if self._images is not None:
            more |= cross_attention_arguments(model, all_BS, self._images)
        if "position_ids" in takes:
            more["position_ids"] = self._positions(model, all_BS, mask_BS, more)
        inputs = model.prepare_inputs_for_generation(
            all_BS,
            next_sequence_length=self._n_new if self._remembered else None,
            attention_mask=mask_BS,
            is_first_iteration=not self._remembered,
            use_cache=True,
            **more,
            **self._remembered,
        )
        inputs["logits_to_keep"] = 0  # all hidden states reach the head
        if self._images is None or (self._remembered and not reads_latest_image(model)):
            inputs |= absent_images(model, inputs["input_ids"])
        positions_BS = counted_positions(model, all_BS, mask_BS)
        if positions_BS is not None:  # which the class's method leaves out
            inputs["position_ids"] = positions_BS[:, -inputs["input_ids"].shape[1] :]
        outputs = model(
            **{name: value for name, value in inputs.items() if name in takes}, return_dict=True
        )
        self._tokens_BL = known_BS
        caches = ["past_key_values", "cache_params", "state"]
        if self._images is not None and reads_latest_image(model):
            caches.append("image_hidden_states")  # its layers read them again
        if self._images is not None or not image_states(model.config):  # GIT's takes one for given
            self._remembered = {
                name: outputs[name] for name in caches if outputs.get(name) is not None
            }
        results: ClassOutputs = outputs
        return results

    def _positions(
        self, model: Any, all_BS: Tensor, mask_BS: Tensor, images: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the positions of all tokens. With images, the class may give positions several
        dimensions."""
        if self._images is None:
            return (mask_BS.cumsum(-1) - 1).clamp(min=0)
        if self._image_positions is None:
            known = {"input_ids": all_BS, "attention_mask": mask_BS, **images}
            positions: Tensor = model._prepare_position_ids_for_generation(all_BS, known)
        else:
            new_N = torch.arange(1, self._n_new + 1, device=all_BS.device)
            earlier = self._image_positions
            positions = torch.cat((earlier, earlier[..., -1:] + new_N), dim=-1)
        self._image_positions = positions
        return positions


@dataclass(frozen=True, kw_only=True, eq=False)
class NextTokens(AttentionMetadata):
    """Tokens that follow the cached ones."""

    cache: ClassCache
    """Runs the class."""


@trial
def has_cache(document: Mapping[str, object], implementation: str | dict[str, str] | None) -> bool:
    """Return whether a tiny clone of the class of a config.json, with this attention, gives the
    same logits with its cache and padding as without."""
    text_1L = torch.tensor(TEXT_IDS)[None, :20]
    try:
        model = random_clone(transformers_config(document), implementation)
        images = blank_image(model)
        expected_V = model(**text_inputs(model, text_1L), **images).logits[0, -1]
        n_places = 5 + image_states(model.config) + text_1L.shape[1]
        padded_1S = F.pad(text_1L, (n_places - text_1L.shape[1], 0))
        positions_1S = torch.arange(-5, n_places - 5)[None].clamp(min=0)
        parts = [n_places - 2, 1, 1]
        steps = zip(padded_1S.split(parts, dim=1), positions_1S.split(parts, dim=1), strict=True)
        with ClassCache(images or None) as cache:
            for tokens_1L, positions_1L in steps:
                logits_V = cache.run(model, tokens_1L, cache.attention(positions_1L)).logits[0, -1]
    except Exception:  # classes raise various types
        return False
    return bool((logits_V - expected_V).abs().max() <= CLONE_TOLERANCE * expected_V.abs().max())
