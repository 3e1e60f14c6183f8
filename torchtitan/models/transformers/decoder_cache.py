"""The generation cache of an encoder-decoder: what its encoder read, and the keys and values of its
decoder."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from torchtitan.models.transformers.captions import caption_inputs
from torchtitan.models.transformers.description import transformers_config
from torchtitan.models.transformers.encoder_decoders import encoder_width
from torchtitan.models.transformers.generation import ClassCache, NextTokens
from torchtitan.models.transformers.tiny import CLONE_TOLERANCE, TEXT_IDS, random_clone, trial

_MASK = "attention_mask"


class DecoderCache(ClassCache):
    """The encoder reads the images of the first tokens once. Decoders take no positions, so that
    all tokens are computed each time, after shifting them to the left, if texts have different
    lengths."""

    def clear(self) -> None:
        super().clear()
        self._read: dict[str, Any] = {}
        self._n_padding_B: Tensor | None = None

    def newest(self, hidden_BSD: Tensor) -> Tensor:
        if self._n_padding_B is None:
            return super().newest(hidden_BSD)
        return _shifted(hidden_BSD, -self._n_padding_B)[:, -self._n_new :]

    def run(
        self,
        model: Any,
        tokens_BL: Tensor,
        attention: NextTokens,
        images: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """See `ClassCache.run`. The first tokens must have images."""
        assert attention.positions_BL is not None
        if images is not None:
            self._images = images
        self._n_new = tokens_BL.shape[1]
        known = [] if self._tokens_BL is None else [self._tokens_BL]
        all_BS = torch.cat((*known, tokens_BL), dim=1)
        n_padding_B = all_BS.shape[1] - 1 - attention.positions_BL[:, -1].to(all_BS.device)
        is_even = not n_padding_B.any()
        self._n_padding_B = None if is_even else n_padding_B
        new_BL = all_BS
        if not is_even:
            self._remembered = {}
            new_BL = _shifted(all_BS, n_padding_B)
        elif self._remembered:
            new_BL = tokens_BL
        mask_BL = torch.ones_like(new_BL)
        if self._read:
            inputs = {**self._read, "decoder_input_ids": new_BL}
        else:
            assert self._images is not None
            inputs = {**self._images, "input_ids": new_BL, _MASK: mask_BL}
            inputs = caption_inputs(model, inputs) | self._given()
            del inputs["decoder_attention_mask"]
        outputs = model(**inputs, **self._remembered, use_cache=is_even, return_dict=True)
        if not self._read:
            states = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
            self._read = {"encoder_outputs": states}
            self._read |= {_MASK: inputs[_MASK]} if _MASK in inputs else {}
        self._tokens_BL = all_BS
        if is_even:
            self._remembered = {"past_key_values": outputs.past_key_values}
        return outputs

    def _given(self) -> dict[str, Any]:
        """Return the states of the encoder that a trial gives instead of images."""
        assert self._images is not None
        return {name: x for name, x in self._images.items() if name == "encoder_outputs"}


def _shifted(x_BSX: Tensor, n_places_B: Tensor) -> Tensor:
    """Return rows (B, S, ...) whose first `n_places_B` items moved to their ends."""
    length = x_BSX.shape[1]
    places_BS = torch.arange(length, device=x_BSX.device) + n_places_B[:, None]
    rows_B1 = torch.arange(len(x_BSX), device=x_BSX.device)[:, None]
    return x_BSX[rows_B1, places_BS % length]


@trial
def has_decoder_cache(
    document: Mapping[str, object], implementation: str | dict[str, str] | None
) -> bool:
    """Return whether a tiny clone of the class of a config.json, with this attention, gives the
    same logits with its cache, and with padding, as without."""
    text_1L = torch.tensor(TEXT_IDS)[None, :20]
    try:
        model = random_clone(transformers_config(document), implementation)
        states = BaseModelOutput(last_hidden_state=torch.randn(1, 6, encoder_width(model.config)))
        read = {"encoder_outputs": states}
        expected_V = model(**read, decoder_input_ids=text_1L).logits[0, -1]
        found = []
        for n_padding in (0, 5):
            ids_1S = F.pad(text_1L, (n_padding, 0))
            positions_1S = torch.arange(ids_1S.shape[1])[None] - n_padding
            parts = [ids_1S.shape[1] - 2, 1, 1]
            steps = zip(ids_1S.split(parts, 1), positions_1S.split(parts, 1), strict=True)
            with DecoderCache(read) as cache:  # type: ignore[arg-type]
                for tokens_1L, positions_1L in steps:
                    attention = cache.attention(positions_1L.clamp(min=0))
                    logits = cache.newest(cache.run(model, tokens_1L, attention).logits)
            found.append(logits[0, -1])
    except Exception:  # classes raise various types
        return False
    most = CLONE_TOLERANCE * expected_V.abs().max()
    return all(bool((logits_V - expected_V).abs().max() <= most) for logits_V in found)
