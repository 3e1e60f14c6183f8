"""Log-probabilities of prompts, for requests with `echo` and `logprobs`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.components.generation.forward import NOT_FINITE_HINT
from torchtitan.components.serving.jobs import Entry
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.errors import UserError

_LOGITS_AT_ONCE = 2**26  # elements: a quarter of a GiB in float32


class PromptScores(NamedTuple):
    """Scores of a prompt."""

    entries: list[Entry]
    """Its tokens; the first one has no log-probability."""
    next_logits_V: Tensor
    """Logits of the token after the prompt, (V,)."""


def score_prompts(
    model: nn.Module, prompts: Sequence[Sequence[int]], n_top: int, device: torch.device
) -> list[PromptScores]:
    """Return the scores of prompts, token ids, in one forward pass, with the `n_top` most probable
    tokens at each place. The model must be in evaluation mode. Raise `UserError` if a
    log-probability is not finite."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # Padding after the tokens has no effect under causal attention.
    tokens = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    rows_N = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(lengths))
    columns_N = torch.cat([torch.arange(length) for length in lengths])
    # The token after each one. After the last one, it is not known: any.
    next_N = torch.tensor([token for prompt in prompts for token in [*prompt[1:], 0]])
    rows_N, columns_N, next_N = (x.to(device) for x in (rows_N, columns_N, next_N))
    last_B = torch.tensor(lengths, device=device) - 1
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    last: list[Tensor] = []

    def head(
        hidden_BLD: Tensor, weight_VD: Tensor | None, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        def logits_of(hidden_ND: Tensor) -> Tensor:
            output_NV = hidden_ND if weight_VD is None else F.linear(hidden_ND, weight_VD)
            return transform(output_NV).float()

        width = hidden_BLD.shape[-1] if weight_VD is None else weight_VD.shape[0]
        chunk = max(1, _LOGITS_AT_ONCE // width)
        hidden_ND = hidden_BLD[rows_N, columns_N]
        for part_ND, targets_N in zip(hidden_ND.split(chunk), next_N.split(chunk), strict=True):
            logprobs_NV = logits_of(part_ND).log_softmax(dim=-1)
            chosen_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
            top = logprobs_NV.topk(n_top)
            found.append((chosen_N, top.values, top.indices))
        last.append(logits_of(hidden_BLD[torch.arange(len(prompts), device=device), last_B]))
        return last[0]

    model(torch.tensor(tokens, device=device), head=head)
    chosen, values, indices = (torch.cat(parts).tolist() for parts in zip(*found, strict=True))
    if not all(map(math.isfinite, chosen)):
        raise UserError(
            f"the model's log-probabilities are not finite (NaN or infinite); {NOT_FINITE_HINT}"
        )
    scores = []
    end = 0
    for prompt, length, logits_V in zip(prompts, lengths, last[0], strict=True):
        start, end = end, end + length
        entries = [Entry(prompt[0], None, [])]
        for token, place in zip(prompt[1:], range(start, end - 1), strict=True):
            top = list(zip(indices[place], values[place], strict=True))
            entries.append(Entry(token, chosen[place], top))
        scores.append(PromptScores(entries, logits_V))
    return scores
