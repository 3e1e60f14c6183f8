"""Divergences of a student's next-token distributions from a teacher's, by chunks of both models'
logits."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.components.losses.cross_entropy import IGNORE_INDEX, chunked_loss, cross_entropy_
from torchtitan.components.losses.token_result import TokenResult
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config import Configurable
from torchtitan.config.code import CacheFolder
from torchtitan.distributed.loss_parallel import VocabularyShard, local_shards
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.errors import UserError, require

Kind = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """Frozen model whose distributions the trained one learns."""

    path: str = ""
    """Checkpoint of the teacher, in any format and of any family, with the student's tokenizer."""

    offload: bool = False
    """Keep its weights in CPU memory between uses; needs FSDP."""

    cache: CacheFolder = ""
    """Folder for its likeliest tokens in all data, written before the first step. Empty: it runs
    with the student."""

    top_k: int = 64
    """Tokens per position to write; all others are one event."""


def check_same_tokens(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise `UserError` that names the first id with different text in two tokenizers."""
    if student.fingerprint == teacher.fingerprint:
        return
    # Twice, since decoding drops a space at the start of a text.
    our_texts = [student.decode([token_id] * 2) for token_id in range(student.vocab_size)]
    their_texts = [teacher.decode([token_id] * 2) for token_id in range(teacher.vocab_size)]
    for token_id, (ours, theirs) in enumerate(itertools.zip_longest(our_texts, their_texts)):
        if ours != theirs:
            raise UserError(
                "--teacher.path: the tokenizers of teacher and student differ first in token "
                f"{token_id}, which twice is {theirs!r} for the teacher and {ours!r} for the "
                "student; choose a teacher with the same tokenizer"
            )


def divergence(
    student_NV: Tensor,
    teacher_NV: Tensor,
    kind: Kind,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    beta: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token (N,), times `temperature`², and its gradients for the
    student's logits.

    With p and q the softmax of the teacher's and the student's logits divided by the temperature,
    it is KL(p‖q) (`forward_kl`, Hinton et al., arXiv:1503.02531, also for the factor), KL(q‖p)
    (`reverse_kl`, Gu et al., arXiv:2306.08543) or `beta` KL(p‖m) + (1 - `beta`) KL(q‖m) with m =
    `beta` p + (1 - `beta`) q (`jensen_shannon`, Agarwal et al., arXiv:2306.13649, equation 1), for
    `beta` between 0 and 1. A token of probability 0 adds 0 to the sum
    over the distribution that excludes it, so logits may be minus infinity; KL(p‖q) is infinite if
    only q excludes a token. Each rank of a `group` has a shard of the logits, in float32."""
    log_q, log_p = (
        _log_softmax(logits / temperature, group) for logits in (student_NV, teacher_NV)
    )
    q, p = log_q.exp(), log_p.exp()
    if kind == "forward_kl":
        values = _total(_times(p, log_p - log_q), group)
        gradients = q - p
    elif kind == "reverse_kl":
        ratios = log_q - log_p
        values = _total(_times(q, ratios), group)
        gradients = _times(q, ratios - values)
    else:
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
        ratios = log_q - log_m
        of_q = _total(_times(q, ratios), group)
        values = beta * _total(_times(p, log_p - log_m), group) + (1 - beta) * of_q
        gradients = (1 - beta) * _times(q, ratios - of_q)
    return values.squeeze(1) * temperature**2, gradients * temperature


def top_logits(
    student_NV: Tensor,
    ids_NK: Tensor,
    log_p_NE: Tensor,
    temperature: float,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the logits (N, V) of a teacher with K known tokens, to compare them with `student_NV`.
    The other tokens get the student's shares of the rest, and so count as one event: the divergence
    is at most the full one. K renormalized probabilities instead would teach overconfidence
    (arXiv:2503.16870). `log_p_NE` are log-probabilities at the temperature of the K tokens and, if
    there are others, of these together."""
    size = student_NV.shape[1]
    n_ids = ids_NK.shape[1]
    columns_NK = ids_NK - (shard.first if shard else 0)
    # a column for other ranks' tokens
    columns_NK = columns_NK.where((columns_NK >= 0) & (columns_NK < size), size)
    result = F.pad(student_NV / temperature, (0, 1), value=-math.inf).scatter(
        1, columns_NK, -math.inf
    )
    if log_p_NE.shape[1] > n_ids:
        result = _log_softmax(result, shard.group if shard else None) + log_p_NE[:, n_ids:]
    return result.scatter(1, columns_NK, log_p_NE[:, :n_ids])[:, :size] * temperature


def _times(probabilities: Tensor, values: Tensor) -> Tensor:
    """Return the product, and 0 for a probability of 0, also times a value that is infinite or
    unknown."""
    return (probabilities * values).masked_fill_(probabilities == 0, 0)


def _weighted(weight: float, values: Tensor) -> Tensor:
    return weight * values if weight else torch.zeros_like(values)


def _log_softmax(scores_NV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    peaks_N1 = scores_NV.amax(dim=1, keepdim=True)
    if group:
        dist.all_reduce(peaks_N1, dist.ReduceOp.MAX, group)
    shifted = scores_NV - peaks_N1
    return shifted - _total(shifted.exp(), group).log()


def _total(values_NV: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    sums_N1 = values_NV.sum(dim=1, keepdim=True)
    if group:
        dist.all_reduce(sums_N1, group=group)
    return sums_N1


@dataclass(frozen=True)
class Outputs:
    """Arguments of a model's head: normalized hidden states (B, L, D), output weights (V, D), and
    the change of logits. Without weights, `hidden` are the logits. Under tensor parallelism, both
    are DTensors."""

    hidden: Tensor
    weight: Tensor | None
    transform: LogitTransform = UNCHANGED

    def flat(self, vocabulary: int) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
        """Return plain tensors: hidden states (N, D) and this rank's weights, or logits, of the
        first tokens."""
        if self.weight is None:
            return self.hidden[..., :vocabulary].flatten(0, 1), None, None
        hidden, weight, shard = local_shards(self.hidden, self.weight)
        return hidden.flatten(0, 1), weight[:vocabulary], shard


@dataclass(frozen=True)
class TopTokens:
    """A teacher at each position: `ids` (B, L, K) of its likeliest tokens, and `log_probs` (B, L,
    E) as `log_p_NE`."""

    ids: Tensor
    log_probs: Tensor

    @staticmethod
    def cached(vocabulary: int, k: int) -> dict[str, TokenResult]:
        """Return what a `SequenceCache` has of `DistillationLoss.top_tokens`."""
        n_probabilities = k + 1 if k < vocabulary else k
        ids = TokenResult(torch.int32, (k,), below=vocabulary)
        return {"ids": ids, "log_probs": TokenResult(torch.float32, (n_probabilities,))}


class DistillationLoss(Configurable):
    """Sum over valid tokens of `w` times the cross entropy plus `1 - w` times the divergence from
    the teacher. If a vocabulary has more (unused) rows than the other, the distributions are over
    the common ones. The forward pass also computes the gradients, so that nothing is recomputed."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Distillation."""

        kind: Kind = "forward_kl"
        """Divergence: KL(teacher‖student), KL(student‖teacher), or Jensen-Shannon, between the
        two."""

        beta: float = 0.5
        """Weight of the teacher in the mean of both distributions with which jensen_shannon
        compares each, between 0 (near forward_kl) and 1 (near reverse_kl)."""

        temperature: float = 1.0
        """Divisor of both models' logits in the divergence, which is multiplied by its square."""

        cross_entropy_weight: float = 0.0
        """Weight of the cross entropy of the labels, from 0 to 1; the divergence has the rest."""

        chunk_tokens: int = 512
        """Number of tokens with logits in memory at a time."""

        def validate(self) -> None:
            require(
                0 < self.temperature < math.inf, "--loss.temperature", self.temperature, "above 0"
            )
            require(0 < self.beta < 1, "--loss.beta", self.beta, "between 0 and 1, without these")
            share = self.cross_entropy_weight
            require(0 <= share <= 1, "--loss.cross_entropy_weight", share, "from 0 to 1")
            require(self.chunk_tokens >= 1, "--loss.chunk_tokens", self.chunk_tokens, "at least 1")

    config: Config

    def __call__(
        self, student: Outputs, teacher: Outputs | TopTokens, labels_BL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over tokens with a label, float32 scalars: loss, with gradients, cross
        entropy, divergence."""
        outputs = [x for x in (student, teacher) if isinstance(x, Outputs)]
        vocabulary = min(x.hidden.shape[-1] if x.weight is None else len(x.weight) for x in outputs)
        hidden, weight, shard = student.flat(vocabulary)
        taught = teacher.flat(vocabulary) if isinstance(teacher, Outputs) else None
        config = self.config
        labels_N = labels_BL.flatten()
        needs_grad = torch.is_grad_enabled()
        share = config.cross_entropy_weight
        group = shard.group if shard else None

        def teach(scores: Tensor, part: slice) -> Tensor:
            if isinstance(teacher, TopTokens):
                ids, log_probs = (x.flatten(0, 1)[part] for x in (teacher.ids, teacher.log_probs))
                return top_logits(scores, ids.long(), log_probs, config.temperature, shard)
            assert taught
            return teacher.transform(_logits(taught[0][part], taught[1]).float())

        def of_chunk(logits: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
            labels = labels_N[part]
            is_valid_N = labels != IGNORE_INDEX
            with torch.set_grad_enabled(needs_grad):
                logits = logits.detach().requires_grad_(needs_grad)
                scores = student.transform(logits.float())
            of_labels = scores.detach().clone()  # becomes the gradients
            taught_NV = teach(of_labels, part)
            values, gradients = divergence(
                scores.detach(), taught_NV, config.kind, config.temperature, group, config.beta
            )
            values = values.where(is_valid_N, 0)
            losses = cross_entropy_(
                of_labels, labels, transform=UNCHANGED, shard=shard, needs_grad=True
            )
            columns = torch.stack(
                [_weighted(share, losses) + _weighted(1 - share, values), losses, values], dim=1
            )
            if not needs_grad:
                return columns, None
            gradients = (
                _weighted(1 - share, gradients)
                .where(is_valid_N[:, None], 0)
                .add_(of_labels, alpha=share)
            )
            return columns, torch.autograd.grad(scores, logits, gradients)[0]

        loss, values_N3 = chunked_loss(hidden, weight, of_chunk, config.chunk_tokens)
        _, cross_entropy, total = values_N3.sum(dim=0)
        return loss, cross_entropy, total

    def top_tokens(self, teacher: Outputs, vocabulary: int, k: int) -> TopTokens:
        """Return the teacher's `k` likeliest of the first `vocabulary` tokens, without
        gradients."""
        hidden_ND, weight, _ = teacher.flat(vocabulary)
        parts = []
        for hidden in hidden_ND.split(self.config.chunk_tokens):
            scores = teacher.transform(_logits(hidden, weight).float()) / self.config.temperature
            log_p = scores.log_softmax(dim=1)
            top, ids = log_p.topk(k)
            others = log_p.scatter(1, ids, -math.inf).logsumexp(dim=1, keepdim=True)
            parts.append((ids.int(), torch.cat([top, others], dim=1) if k < vocabulary else top))
        return TopTokens(
            *(torch.cat(x).unflatten(0, teacher.hidden.shape[:2]) for x in zip(*parts, strict=True))
        )


def _logits(hidden_ND: Tensor, weight_VD: Tensor | None) -> Tensor:
    return hidden_ND.detach() if weight_VD is None else hidden_ND.detach() @ weight_VD.detach().T
