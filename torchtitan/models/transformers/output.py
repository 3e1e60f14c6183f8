"""Detects how a class transforms its logits by a trial of a tiny clone, since every class codes
this differently."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan.models.transformers.captions import language_side
from torchtitan.models.transformers.description import build_class, transformers_config
from torchtitan.models.transformers.tiny import text_inputs, tiny_config, trial
from torchtitan.protocols.output_head import LogitTransform

_LARGE, _SMALL = 1e8, 1e-3
_TOLERANCE = 1e-5
"""Largest relative difference of float32 logits: a soft cap and its product are rounded in another
order."""


@trial
def logit_transform(document: Mapping[str, object]) -> LogitTransform | None:
    """Return the transform that the class of a config.json applies to the logits of its output
    layer; None if it is not a `LogitTransform`, or the class calls its output layer differently."""
    try:
        model = language_side(build_class(tiny_config(transformers_config(document)))).eval()
    except Exception:  # such sizes do not fit this class
        return None

    def change(logits_V: Tensor) -> Tensor:
        with output.register_forward_hook(
            lambda *arguments: logits_V.expand_as(arguments[-1]).clone()
        ):
            logits: Tensor = model(
                **text_inputs(model, torch.zeros(1, 2, dtype=torch.long))
            ).logits[0, -1]
        return logits

    output = model.get_output_embeddings()
    try:
        grid_V = torch.linspace(-60, 60, output.weight.shape[0])
        multiplier = (change(torch.full_like(grid_V, _SMALL))[0] / _SMALL).item()
        most = change(torch.full_like(grid_V, _LARGE))[0].item()
        is_capped = abs(most) < abs(multiplier) * _LARGE / 2
        transform = LogitTransform(multiplier, most if is_capped else None)
        difference = (change(grid_V) - transform(grid_V)).abs().max() / change(grid_V).abs().max()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return transform if difference < _TOLERANCE else None
