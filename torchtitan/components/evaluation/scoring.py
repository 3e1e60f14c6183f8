"""Probability of a continuation given a context, the basis of all evaluations."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.components.generation.forward import NOT_FINITE_HINT, evaluating
from torchtitan.distributed.process_group import gather_objects
from torchtitan.distributed.whole_tensors import sequence_splits, whole, whole_logits
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.eager import uncompiled
from torchtitan.tools.errors import UserError, require
from torchtitan.tools.progress import progress

ResultT = TypeVar("ResultT")

_LOGITS_AT_ONCE = 2**26  # elements: a quarter of a GiB in float32


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids of a context, at least one, and of its continuation."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a request."""

    logprob: float
    """Natural logarithm of the continuation's probability, summed over its tokens."""

    is_greedy: bool
    """True if greedy decoding would generate the continuation."""

    truncated: bool
    """True if the beginning of the context was truncated to fit into the model's context."""


@dataclass(frozen=True, slots=True)
class Share:
    """This process's share of work that several processes divide; all of them get the results.
    Processes with the same index, such as a tensor-parallel group, do the same work."""

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    """All processes that share the work; None: all processes of the run."""

    def rounds(self, n_items: int) -> Iterator[int]:
        """Yield the numbers of this process's items, one in each round. A process without an item
        in the last round repeats the last item, since forward passes need all processes (FSDP,
        expert parallelism)."""
        for first in range(0, n_items, self.count):
            yield min(first + self.index, n_items - 1)

    def gather(self, results: dict[int, ResultT]) -> list[ResultT]:
        """Return the results of all items, by their numbers from 0, on every process."""
        parts = gather_objects(results, self.group) if self.count > 1 else [results]
        found = {number: result for part in parts for number, result in part.items()}
        return [found[number] for number in range(len(found))]


class Scorer:
    """Scores requests in batches of similar length, `batch_size` per forward pass. `max_seq_len`
    and `device` default to the model's. Models may be under FSDP, DDP, tensor and expert
    parallelism; all ranks make the same calls, and get the scores of all requests.

    Args:
        share: this rank's share of the batches, by default all.
    """

    title = ""
    """Title of the progress that is shown during a task; empty: none."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int = 8,
        max_seq_len: int | None = None,
        device: torch.device | None = None,
        share: Share = Share(),
    ):
        require(batch_size >= 1, "batch_size", batch_size, "at least 1")
        self.model = model
        self.max_seq_len: int = max_seq_len or model.config.max_seq_len  # type: ignore[union-attr,assignment]
        self.batch_size = batch_size
        self.share = share
        self._multiple = sequence_splits(model)
        self._device = device or next(model.parameters()).device

    @torch.no_grad()
    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each request, in order. Requests of more than `max_seq_len` + 1
        tokens (the last token is only predicted) are truncated at the beginning. Raise `UserError`
        for a continuation longer than the model's context, or a log-probability that is not
        finite."""
        for request in requests:
            assert request.context, "a context has at least one token"
            if len(request.continuation) > self.max_seq_len:
                raise UserError(
                    f"a continuation of {len(request.continuation)} tokens is longer than the "
                    f"model's context of {self.max_seq_len} tokens"
                )
        # Longest first, to run out of memory early if at all.
        order = sorted(
            range(len(requests)),
            key=lambda i: -len(requests[i].context) - len(requests[i].continuation),
        )
        batches = [
            order[begin : begin + self.batch_size]
            for begin in range(0, len(order), self.batch_size)
        ]
        found: dict[int, Score] = {}
        is_compiled = getattr(self.model, "is_compiled", False)  # for the lengths of training
        with (
            evaluating(self.model),
            uncompiled() if is_compiled else nullcontext(),
            self.progress(len(requests)) as advance,
        ):
            for number in self.share.rounds(len(batches)):
                batch = batches[number]
                found |= zip(
                    batch, self._score_batch([requests[index] for index in batch]), strict=True
                )
                advance(len(batch) * self.share.count)
        scores = self.share.gather(found)
        if not all(math.isfinite(score.logprob) for score in scores):
            raise UserError(
                f"the model's log-probabilities are not finite (NaN or infinite); {NOT_FINITE_HINT}"
            )
        return scores

    def progress(self, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show progress during a block, see `torchtitan.tools.progress`; only if there is a
        title."""
        return progress(self.title, total) if self.title else nullcontext(lambda amount: None)

    def _score_batch(self, requests: Sequence[Request]) -> list[Score]:
        sequences = [
            (request.context + request.continuation)[-self.max_seq_len - 1 :]
            for request in requests
        ]
        longest = -(-(max(map(len, sequences)) - 1) // self._multiple) * self._multiple
        # Padding after the tokens has no effect under causal attention.
        tokens = [sequence[:-1] + [0] * (longest + 1 - len(sequence)) for sequence in sequences]
        # Column j predicts token j + 1, so the n columns before a continuation's last token predict
        # its n tokens.
        indices = [
            (row, len(sequence) - 1 - len(request.continuation) + i)
            for row, (sequence, request) in enumerate(zip(sequences, requests, strict=True))
            for i in range(len(request.continuation))
        ]
        rows_N, columns_N = (
            torch.tensor(indices, dtype=torch.long, device=self._device).view(-1, 2).T
        )
        targets = [token for request in requests for token in request.continuation]
        logprobs_N, greedy_N = self._logprobs(
            tokens, rows_N, columns_N, torch.tensor(targets, device=self._device)
        )
        lengths = [len(request.continuation) for request in requests]
        return [
            Score(
                logprob=logprobs.sum(dtype=torch.float64).item(),
                is_greedy=bool(greedy.all()),
                truncated=len(request.context) + len(request.continuation) > self.max_seq_len + 1,
            )
            for request, logprobs, greedy in zip(
                requests, logprobs_N.split(lengths), greedy_N.split(lengths), strict=True
            )
        ]

    def _logprobs(
        self, tokens: list[list[int]], rows_N: Tensor, columns_N: Tensor, targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability (float32) of each target, and whether it is the most probable
        token."""

        def head(
            hidden_BLD: Tensor, weight_VD: Tensor | None, transform: LogitTransform = UNCHANGED
        ) -> Tensor:
            width = hidden_BLD.shape[-1] if weight_VD is None else weight_VD.shape[0]
            chunk = max(1, _LOGITS_AT_ONCE // width)
            parts = []
            for hidden_ND, targets in zip(
                whole(hidden_BLD)[rows_N, columns_N].split(chunk),
                targets_N.split(chunk),
                strict=True,
            ):
                logits_NV = transform(whole_logits(hidden_ND, weight_VD, UNCHANGED).float())
                chosen_N = logits_NV.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
                parts.append(torch.stack((chosen_N, (logits_NV.argmax(dim=-1) == targets).float())))
            return torch.cat(parts, dim=1).cpu()

        logprobs_N, greedy_N = self.model(torch.tensor(tokens, device=self._device), head=head)
        return logprobs_N, greedy_N.bool()
