"""Choose how a class of transformers gets packed documents, by probing a tiny clone of the model."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.packing import Packing
from torchtitan.models.transformers.tiny import TEXT_IDS, tiny_config
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

TOLERANCE = 1e-4
"""Largest change of a logit by the other documents, relative to the largest logit: float32 rounding is far below this,
and a leak far above, as the weights of the clone are large."""

_MEANINGS = {
    "masks": "packed documents are kept apart by masks of all pairs of tokens",
    "rows": "each packed document gets a row, padded to the length of the longest",
}

_chosen: dict[str, Packing] = {}


def choose_packing(config: PretrainedConfig) -> Packing:
    """Return the fastest way in which a class keeps packed documents apart, and log one line if it is not the fastest.

    Raises:
        UserError: tokens see later ones, as in an encoder.
    """
    key = config.to_json_string()
    if key not in _chosen:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            _chosen[key] = _probe(config)
        if _chosen[key].mode != "kernel":
            logger.info("%s: %s (%s)", config.model_type, _MEANINGS[_chosen[key].mode], _chosen[key].reason)
    return _chosen[key]


def _probe(config: PretrainedConfig) -> Packing:
    try:
        tiny = tiny_config(config)
        model = build_class(tiny).eval()
        _randomize(model)
        ids = torch.tensor(TEXT_IDS)
        tokens_BL = ids[torch.randint(len(ids), (2, 64))]
        documents = tokens_BL.flatten().split(_LENGTHS)
        alone = [model(input_ids=document[None]).logits for document in documents]
    except Exception as error:
        return Packing("rows", f"a tiny clone cannot be built ({_first_line(error)})")
    largest = max(float(logits.abs().max()) for logits in alone)

    def change(logits: Tensor, expected: Tensor) -> float:
        return float((logits - expected).abs().max() / largest)

    start = model(input_ids=documents[0][None, :10]).logits
    if change(start, alone[0][:, :10]) > TOLERANCE:
        raise UserError(f"model_type {config.model_type}: its tokens see later ones, so it cannot predict them")
    attention = AttentionMetadata.from_positions(torch.cat([torch.arange(n) for n in _LENGTHS]).view(2, 64))
    packed, rows = torch.cat(alone, 1), model(input_ids=tokens_BL).logits
    if change(rows.reshape(packed.shape), packed) < 100 * TOLERANCE:
        return Packing("rows", "no leak would be seen in a tiny clone")
    reasons: list[str] = []
    for mode in ("kernel", "masks", "rows"):
        packing = Packing(mode, "; ".join(reasons))
        try:
            candidate = build_class(tiny, packing.implementation).eval()
            candidate.load_state_dict(model.state_dict())
            plain = change(packing.run(candidate, tokens_BL, None).logits, rows)
            logits = packing.gather(packing.run(candidate, tokens_BL, attention).logits, attention)
            leak = change(logits.reshape(packed.shape), packed)
        except Exception as error:
            reasons.append(f"{mode}: {_first_line(error)}")
            continue
        if max(plain, leak) <= TOLERANCE:
            return packing
        reasons.append(f"{mode}: " + (f"logits change by {plain:.1e}" if plain > TOLERANCE else f"leak {leak:.1e}"))
    return Packing("rows", "; ".join(reasons))


_LENGTHS = [27, 5, 1, 31, 40, 24]
"""Tokens of the documents of the probe, in two rows; some are longer than the windows and chunks of the clone."""


def _randomize(model: nn.Module) -> None:
    """Draw weights so large that each part of the model changes its logits."""
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.normal_(std=max(parameter.shape[1:]) ** -0.5)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
