"""Continuation of token sequences with a model, for `torchtitan generate` and training methods."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.components.generation.sampling import Sampler, Sampling
from torchtitan.distributed import context_parallel
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import forward_pre_hooks

FinishReason = Literal["stop", "length"]

OnToken = Callable[[int, int], bool]
"""Called with a row's number and its next token, in row order; True ends the row."""

NOT_FINITE_HINT = (
    "its weights may be damaged or its training may have diverged, or the numbers are too large for the type it "
    "computes in (--dtype)"
)
"""Possible causes of NaN from a model."""

_PADDING = 0  # any token will do: nothing attends to it

_ATTENTION = "*.attend"
"""The modules `attend(queries, keys, values, mask)` of every family (`ShardingPlan.attention`)."""


@dataclass(slots=True)
class Generation:
    """Continuation of one prompt."""

    ids: list[int] = field(default_factory=list)
    """New tokens, ending with the stop token, if any."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of each new token's probability at temperature 1, before top_k and top_p."""
    finish_reason: FinishReason = "length"
    """`stop`: ended by a stop token or `on_token`. `length`: reached max_new_tokens."""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: AbstractSet[int] = frozenset(),
    on_token: OnToken | None = None,
    use_cache: bool = True,
    group: dist.ProcessGroup | None = None,
) -> list[Generation]:
    """Continue each of `prompts`, all in one batch, with the model in evaluation mode; each ends by itself.

    Works for plain models and under FSDP, DDP, tensor parallelism, activation checkpointing, compilation (the blocks
    run uncompiled meanwhile) and autocast, not under pipeline or context parallelism.

    Args:
        prompts: token ids, at least one each, of any lengths.
        max_new_tokens: per prompt, including the stop token.
        sampling: None: always the most probable token.
        stop_ids: tokens that end a row; `on_token` does not see them.
        use_cache: keep keys and values; without, every token costs a forward pass over all tokens before it.
        group: processes that must run forward passes together (FSDP, tensor parallelism) until all their rows are done.
            Each may have its own prompts; under tensor parallelism all have the same.

    Raises:
        UserError: for no prompt; for a prompt and continuation longer than the model's context (its `max_seq_len`); for
            a pipeline stage or under context parallelism; for logits that are no distribution (NaN).
    """
    _check(model, prompts, max_new_tokens)
    rows = _Rows(len(prompts), max_new_tokens, stop_ids, on_token)
    sampler = Sampler(sampling or Sampling(), len(prompts))
    next_logits = _cached_logits if use_cache else _recomputed_logits
    with evaluating(model), next_logits(model, prompts, max_new_tokens) as step:
        tokens_B: Tensor | None = None
        while _anywhere(bool(rows.unfinished), group):
            logits_BV = _usable(step(tokens_B).float(), rows.unfinished, group)
            tokens_B = sampler.draw(logits_BV)
            logprobs_B = logits_BV.log_softmax(dim=-1).gather(1, tokens_B.to(logits_BV.device)[:, None])[:, 0]
            rows.extend(tokens_B.tolist(), logprobs_B.tolist())
    return rows.generations


class _Rows:
    def __init__(self, n_rows: int, max_new_tokens: int, stop_ids: AbstractSet[int], on_token: OnToken | None):
        self.generations = [Generation() for _ in range(n_rows)]
        self.unfinished = set(range(n_rows)) if max_new_tokens > 0 else set()
        self._max_new_tokens, self._stop_ids, self._on_token = max_new_tokens, stop_ids, on_token

    def extend(self, tokens: list[int], logprobs: list[float]) -> None:
        for row in sorted(self.unfinished):
            generation = self.generations[row]
            generation.ids.append(tokens[row])
            generation.logprobs.append(logprobs[row])
            stopped = tokens[row] in self._stop_ids
            if not stopped and self._on_token is not None:
                stopped = self._on_token(row, tokens[row])
            if stopped:
                generation.finish_reason = "stop"
            if stopped or len(generation.ids) == self._max_new_tokens:
                self.unfinished.discard(row)


def _check(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if isinstance(prompts, str) or not all(isinstance(prompt, Sequence) for prompt in prompts):
        raise UserError("prompts are lists of token ids, one list for each text (`tokenizer.encode(text)` gives one)")
    if not prompts:
        raise UserError("there is no prompt: give at least one")
    if not all(prompts):
        raise UserError("each prompt must have at least one token (an empty text begins with BOS)")
    vocabulary = cast(Any, model).config.vocab_size
    if unknown := {token for prompt in prompts for token in prompt if not 0 <= token < vocabulary}:
        raise UserError(f"a prompt has token {min(unknown)}, and the model's vocabulary ends at {vocabulary - 1}")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens}, and must be 0 or more")
    _reject_partial_model(model)
    longest, context = max(map(len, prompts)), cast(Any, model).config.max_seq_len
    if longest + max_new_tokens > context:
        raise UserError(
            f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} are more than the model's context of "
            f"{context} tokens (its max_seq_len); shorten one of them"
        )


def _reject_partial_model(model: nn.Module) -> None:
    if any(getattr(model, name, model) is None for name in ("tok_embeddings", "norm")):
        raise UserError("a pipeline stage cannot generate text: it has only a part of the model's layers")
    hooks = (hook for module in model.modules() for hook in forward_pre_hooks(module))
    if any(getattr(hook, "__module__", None) == context_parallel.__name__ for hook in hooks):
        raise UserError("a model under context parallelism cannot generate text: each rank has a part of the tokens")


def _usable(logits_BV: Tensor, unfinished: set[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the logits, with zeros in finished rows whose logits are no distribution. Raise `UserError` if an
    unfinished row of any process has such logits: the most probable token of all NaN would be token 0."""
    unusable = (~logits_BV.logsumexp(dim=-1).isfinite()).nonzero()[:, 0].tolist()
    if _anywhere(not unfinished.isdisjoint(unusable), group):
        raise UserError(f"the model's logits are not finite (NaN or infinite); {NOT_FINITE_HINT}")
    return logits_BV.index_fill(0, torch.tensor(unusable, device=logits_BV.device), 0.0) if unusable else logits_BV


def _anywhere(here: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether `here` is true in any process of the group."""
    if group is None:
        return here
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    found = torch.tensor(int(here), device=device)
    dist.all_reduce(found, group=group)
    return found.item() > 0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards restore its mode and free weights gathered by FSDP."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        free_gathered_weights(model)
        model.train(was_training)


class KVCache:
    """While entered, the model's attention reaches back to all tokens of the previous forward passes.

    Each pass gets the new tokens and their positions, as `model(tokens_BL, positions_BL, packed=False)`. Before it,
    `expect` marks text and padding; after it, `advance` says how many tokens to keep. Hooks on the model's attention
    store keys and values, and pass on all of them with their mask. Padding may be in any slot; only it attends to
    itself (a softmax over nothing would be NaN).

    `model` is whole, or a rank's part under tensor parallelism or FSDP; `max_slots` is the capacity in tokens per row,
    including padding. Raises `ValueError` if the model has no such attention.
    """

    def __init__(self, model: nn.Module, max_slots: int):
        self.max_slots, self.n_slots = max_slots, 0
        self._modules = [module for name, module in model.named_modules() if fnmatchcase(name, _ATTENTION)]
        if not self._modules:
            raise ValueError(f"{type(model).__name__} has no modules named {_ATTENTION}, whose keys could be cached")
        self._real_BS = torch.empty(0)
        self._mask = torch.empty(0)
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> "KVCache":
        # A compiled block was traced without the hooks, and would run without them.
        self._cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        for module in self._modules:
            self._cleanup.callback(module.register_forward_pre_hook(self._attend_to_all).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()
        self._stored.clear()

    def expect(self, real_BL: Tensor) -> None:
        """Mark which tokens of the next forward pass are text, not padding: boolean, shape (B, L)."""
        batch, length = real_BL.shape
        end = self.n_slots + length
        assert end <= self.max_slots, f"{end} tokens in a cache for {self.max_slots}"
        if self.n_slots == 0:
            self._real_BS = real_BL.new_zeros(batch, self.max_slots)
        self._real_BS[:, self.n_slots : end] = real_BL
        slots_S = torch.arange(end, device=real_BL.device)
        queries_L1 = slots_S[self.n_slots :, None]
        seen_BLS = self._real_BS[:, None, :end] & (slots_S <= queries_L1)
        self._mask = (seen_BLS | (slots_S == queries_L1))[:, None]

    def advance(self, length: int) -> None:
        """Keep the first `length` tokens of the last forward pass; the other slots are reused."""
        self.n_slots += length

    def _attend_to_all(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, k_BLKD, v_BLKD, _ = args
        if module not in self._stored:
            batch, _, heads, _ = k_BLKD.shape
            new = [x.new_empty(batch, self.max_slots, heads, x.shape[-1]) for x in (k_BLKD, v_BLKD)]
            self._stored[module] = (new[0], new[1])
        end = self.n_slots + k_BLKD.shape[1]
        for stored, x in zip(self._stored[module], (k_BLKD, v_BLKD), strict=True):
            stored[:, self.n_slots : end] = x
        keys, values = self._stored[module]
        return q_BLHD, keys[:, :end], values[:, :end], self._mask


# Two ways to compute the next token's logits: both yield `step(tokens_B)`, which appends a token to each row (None, at
# first: the prompts themselves) and returns (B, V).

_Step = Callable[[Tensor | None], Tensor]


@contextmanager
def _cached_logits(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[_Step]:
    degree = _tensor_parallel_degree(model)
    tokens_BL, positions_BL = _left_padded(prompts, degree, _device_of(model))
    next_positions_B = positions_BL[:, -1]
    length = tokens_BL.shape[1]

    with KVCache(model, length + max_new_tokens + degree - 1) as cache:

        def step(new_B: Tensor | None) -> Tensor:
            nonlocal next_positions_B
            if new_B is None:
                cache.expect(positions_BL >= 0)
                logits_BV = _logits_at(model, length - 1, tokens_BL, positions_BL.clamp(min=0), packed=False)
                cache.advance(length)
                return logits_BV
            next_positions_B = next_positions_B + 1
            # Tensor parallelism divides a sample's tokens evenly: all after the first are padding.
            one_BL = new_B.to(tokens_BL.device)[:, None].expand(-1, degree)
            cache.expect(torch.arange(degree, device=one_BL.device).expand_as(one_BL) == 0)
            logits_BV = _logits_at(model, 0, one_BL, next_positions_B[:, None].expand_as(one_BL), packed=False)
            cache.advance(1)
            return logits_BV

        yield step


@contextmanager
def _recomputed_logits(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[_Step]:
    degree, device = _tensor_parallel_degree(model), _device_of(model)
    sequences = [list(prompt) for prompt in prompts]

    def step(new_B: Tensor | None) -> Tensor:
        if new_B is not None:
            for sequence, token in zip(sequences, new_B.tolist(), strict=True):
                sequence.append(token)
        tokens_BL, positions_BL = _left_padded(sequences, degree, device)
        # Each padding token, at position 0, is a separate document to the model.
        return _logits_at(model, tokens_BL.shape[1] - 1, tokens_BL, positions_BL.clamp(min=0))

    yield step


def _left_padded(sequences: Sequence[Sequence[int]], multiple: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and positions, (B, L) with L a multiple of `multiple`; padding has negative positions."""
    longest = -(-max(map(len, sequences)) // multiple) * multiple
    paddings = [longest - len(sequence) for sequence in sequences]
    tokens = [[_PADDING] * padding + list(sequence) for padding, sequence in zip(paddings, sequences, strict=True)]
    positions_BL = torch.arange(longest, device=device) - torch.tensor(paddings, device=device)[:, None]
    return torch.tensor(tokens, device=device), positions_BL


def _logits_at(model: nn.Module, index: int, tokens_BL: Tensor, positions_BL: Tensor, **inputs: bool) -> Tensor:
    """Return the logits (B, V) of the token in column `index`."""

    def head(hidden_BLD: Tensor, weight_VD: Tensor) -> Tensor:
        if isinstance(hidden_BLD, DTensor):
            hidden_BLD = hidden_BLD.full_tensor()
        hidden_BD = hidden_BLD[:, index]
        if not isinstance(weight_VD, DTensor):
            return F.linear(hidden_BD, weight_VD)
        # Each tensor-parallel rank has its part of the vocabulary; gathering logits is cheaper than gathering weights.
        shared_BD = DTensor.from_local(hidden_BD, weight_VD.device_mesh, [Replicate()])
        return cast(DTensor, F.linear(shared_BD, weight_VD)).full_tensor()

    logits: Tensor = model(tokens_BL, positions_BL, head=head, **inputs)
    return logits


def _tensor_parallel_degree(model: nn.Module) -> int:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh["tp"].size()
    return 1


def _device_of(model: nn.Module) -> torch.device:
    """Return the compute device of the model, even if FSDP offloads the parameters."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
