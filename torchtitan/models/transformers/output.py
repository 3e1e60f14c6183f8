"""How a class changes its logits, found by a trial of a tiny clone, since every class writes that in its own way."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.transformers.description import build_class, transformers_config
from torchtitan.models.transformers.tiny import TEXT_IDS, text_inputs, tiny_config, trial
from torchtitan.protocols.output_head import LogitTransform
from torchtitan.tools.errors import UserError

_LARGE, _SMALL = 1e8, 1e-3
_TOLERANCE = 1e-5
"""Largest relative difference of float32 logits: a soft cap and its product are rounded in another order."""


class _GivenLogits(nn.Module):
    """An output layer that returns the same logits for every token."""

    def __init__(self, logits_V: Tensor):
        super().__init__()
        self.logits_V = self.weight = logits_V  # some classes read the type of the weight

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        return self.logits_V.expand(*hidden_BLD.shape[:-1], -1).clone()


@trial
def logit_transform(document: Mapping[str, Any]) -> LogitTransform | None:
    """Return the change that the class of a config.json makes to the logits of its output layer; None if it is no
    `LogitTransform`, or the class calls its output layer in another way."""
    try:
        model = build_class(tiny_config(transformers_config(document))).eval()
    except Exception:  # such sizes do not fit this class
        return None
    _check_text_alone(model)

    def change(logits_V: Tensor) -> Tensor:
        model.set_submodule(name, _GivenLogits(logits_V))
        logits: Tensor = model(**text_inputs(model, torch.zeros(1, 2, dtype=torch.long))).logits[0, -1]
        return logits

    try:
        output = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is output)
        grid_V = torch.linspace(-60, 60, output.weight.shape[0])
        multiplier = (change(torch.full_like(grid_V, _SMALL))[0] / _SMALL).item()
        most = change(torch.full_like(grid_V, _LARGE))[0].item()
        is_capped = abs(most) < abs(multiplier) * _LARGE / 2
        transform = LogitTransform(multiplier, most if is_capped else None)
        difference = (change(grid_V) - transform(grid_V)).abs().max() / change(grid_V).abs().max()
    except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError):
        return None
    return transform if difference < _TOLERANCE else None


def _check_text_alone(model: Any) -> None:
    """Raise `UserError` if a class computes no logits of text without other inputs, such as images."""
    try:
        logits_BLV = model(**text_inputs(model, torch.tensor([TEXT_IDS]))).logits
        if logits_BLV.shape[:2] == (1, len(TEXT_IDS)):
            return
        reason = "it gives no logits for each token"
    except (TypeError, ValueError) as error:  # an argument is missing, or an explicit check
        reason = " ".join(str(error).split())
    except (IndexError, RuntimeError):  # sizes that do not fit, in the clone alone
        return
    raise UserError(f"config.json: {type(model).__name__} does not compute text alone: {reason}")
