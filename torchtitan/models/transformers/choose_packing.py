"""Choose how a class of transformers gets packed documents, by a trial of a tiny clone."""

import copy

import torch
from torch import Tensor
from transformers import PretrainedConfig

from torchtitan.models.transformers.packing import Mode, Packing
from torchtitan.models.transformers.tiny import TEXT_IDS, random_clone, trial
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

TOLERANCE = 1e-4
"""Largest change of a logit by the other documents, relative to the largest logit: float32 rounding is far below this,
and a leak far above, as the weights of the clone are large."""

_LENGTHS = [27, 5, 1, 31, 40, 24]
"""Tokens of the documents of the trial, in two rows; some are longer than the windows and chunks of the clone."""

_MODES: tuple[Mode, ...] = ("kernel", "masks", "rows")

_MEANINGS = {
    "masks": "packed documents are kept apart by masks of all pairs of tokens",
    "rows": "each packed document gets a row, padded to the length of the longest",
}


@trial
def choose_packing(config: PretrainedConfig) -> Packing:
    """Return the fastest way in which a class keeps packed documents apart, and log one line if it is not the fastest.
    Raise `UserError` if tokens see later ones, as in an encoder."""
    packing, is_exact = _try(config)
    if not is_exact:
        logger.warning(
            "%s: packed documents get a row each, but a trial did not show that they cannot change each other (%s)",
            config.model_type,
            packing.reason,
        )
    elif packing.mode != "kernel":
        logger.info("%s: %s (%s)", config.model_type, _MEANINGS[packing.mode], packing.reason)
    return packing


def _try(config: PretrainedConfig) -> tuple[Packing, bool]:
    """Return the way, and whether the trial showed that it is exact."""
    config = copy.deepcopy(config)
    text, modes = config.get_text_config(decoder=True), _MODES
    if getattr(text, "attn_logit_softcapping", None):
        text.attn_logit_softcapping = 0.1  # so small that it changes the scores of the clone
        if getattr(text, "attention_dropout", 0):  # our attention has not both
            modes = modes[1:]
    try:
        model = random_clone(config)
        tokens_BL = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 64))
        documents = tokens_BL.flatten().split(_LENGTHS)
        alone = [model(input_ids=document[None]).logits for document in documents]
    except Exception as error:
        return Packing("rows", f"a tiny clone cannot be built ({_first_line(error)})"), False
    packed = torch.cat(alone, 1)
    rows, start = model(input_ids=tokens_BL).logits, model(input_ids=documents[0][None, :10]).logits

    def change(logits: Tensor, expected: Tensor) -> float:
        return float((logits.reshape(expected.shape) - expected).abs().max() / packed.abs().max())

    if change(start, alone[0][:, :10]) > TOLERANCE:
        raise UserError(f"model_type {config.model_type}: its tokens see later ones, so it cannot predict them")
    if change(rows, packed) < 100 * TOLERANCE:
        return Packing("rows", "no leak would be seen in a tiny clone"), False
    attention = AttentionMetadata.from_positions(torch.cat([torch.arange(n) for n in _LENGTHS]).view(2, 64))
    reasons: list[str] = []
    for mode in modes:
        packing = Packing(mode, "; ".join(reasons))
        try:
            candidate = random_clone(config, packing.implementation)
            plain = change(packing.run(candidate, tokens_BL, None).logits, rows)
            leak = change(packing.gather(packing.run(candidate, tokens_BL, attention).logits, attention), packed)
            if max(plain, leak) <= TOLERANCE:
                return packing, True
            reasons.append(f"{mode}: leak {leak:.1e}, and without other documents logits change by {plain:.1e}")
        except Exception as error:
            reasons.append(f"{mode}: {_first_line(error)}")
    return Packing("rows", "; ".join(reasons)), False


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
