"""Text generation, for `torchtitan generate` and training methods."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.components.generation.sampling import Sampler, Sampling
from torchtitan.distributed import context_parallel
from torchtitan.distributed.parallelize import free_gathered_weights
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform, compute_logits
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import forward_pre_hooks

FinishReason = Literal["stop", "length"]

OnToken = Callable[[int, int], bool]
"""Called with the row number and the next token, in row order; return True to end the row."""

NOT_FINITE_HINT = (
    "the weights may be damaged, the training may have diverged, or the values are too large for the computation type "
    "(--dtype)"
)
"""Possible causes of NaN in a model's output."""

_PADDING = 0  # arbitrary: nothing attends to it

_ATTENTION = "*.attend"
"""Pattern of the modules `attend(queries, keys, values, attention)` in all families (`ShardingPlan.attention`)."""


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
    """Continue all `prompts` in one batch, with the model in evaluation mode; rows end independently.

    Supports plain models, FSDP, DDP, tensor parallelism, activation checkpointing, compilation (blocks run uncompiled
    during generation), but not pipeline or context parallelism.

    Args:
        prompts: token ids, at least one per prompt.
        max_new_tokens: maximum per prompt, including the stop token.
        sampling: None: always the most probable token.
        stop_ids: tokens that end a row; not passed to `on_token`.
        use_cache: use a key/value cache; otherwise every token needs a forward pass over all previous tokens.
        group: processes that run forward passes together (FSDP, tensor parallelism) until all rows are finished. Their
            prompts may differ, except under tensor parallelism.

    Raises:
        UserError: there are no prompts; prompt and continuation exceed the model's context (`max_seq_len`); the model
            is a pipeline stage or uses context parallelism; logits are not finite.
    """
    _check(model, prompts, max_new_tokens)
    rows = _Rows(len(prompts), max_new_tokens, stop_ids, on_token)
    sampler = Sampler(sampling or Sampling(), len(prompts))
    next_logits = _cached_logits if use_cache else _recomputed_logits
    with evaluating(model), next_logits(model, prompts, max_new_tokens) as step:
        tokens_B: Tensor | None = None
        while _any_process(bool(rows.unfinished), group):
            logits_BV = _check_finite(step(tokens_B).float(), rows.unfinished, group)
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
        raise UserError("prompts must be lists of token ids, such as [tokenizer.encode(text)]")
    if not prompts:
        raise UserError("there are no prompts; pass at least one")
    if not all(prompts):
        raise UserError("each prompt must have at least one token; use BOS for an empty text")
    vocabulary = cast(Any, model).config.vocab_size
    if unknown := {token for prompt in prompts for token in prompt if not 0 <= token < vocabulary}:
        raise UserError(f"a prompt contains token {min(unknown)}, but the model's vocabulary ends at {vocabulary - 1}")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens}, but must be 0 or more")
    _reject_partial_model(model)
    longest, context = max(map(len, prompts)), cast(Any, model).config.max_seq_len
    if longest + max_new_tokens > context:
        raise UserError(
            f"a prompt of {longest} tokens plus max_new_tokens {max_new_tokens} exceeds the model's context of "
            f"{context} tokens (max_seq_len); reduce either"
        )


def _reject_partial_model(model: nn.Module) -> None:
    # The last stage has the embedding too if it is tied, but not the first layer.
    lacks_layers = "0" not in getattr(model, "layers", "0")
    if lacks_layers or any(getattr(model, name, model) is None for name in ("tok_embeddings", "head")):
        raise UserError("a pipeline stage cannot generate text: it has only some of the model's layers")
    hooks = (hook for module in model.modules() for hook in forward_pre_hooks(module))
    if any(getattr(hook, "__module__", None) == context_parallel.__name__ for hook in hooks):
        raise UserError("a model under context parallelism cannot generate text: each rank has only some of the tokens")


def _check_finite(logits_BV: Tensor, unfinished: set[int], group: dist.ProcessGroup | None) -> Tensor:
    """Replace logits that are not finite with zeros in finished rows. Raise `UserError` if an unfinished row of any
    process has such logits, since the most probable token would silently be token 0."""
    unusable = (~logits_BV.logsumexp(dim=-1).isfinite()).nonzero()[:, 0].tolist()
    if _any_process(not unfinished.isdisjoint(unusable), group):
        raise UserError(f"the model's logits are not finite (NaN or infinite); {NOT_FINITE_HINT}")
    return logits_BV.index_fill(0, torch.tensor(unusable, device=logits_BV.device), 0.0) if unusable else logits_BV


def _any_process(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether `flag` is true in any process of the group."""
    if group is None:
        return flag
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    count = torch.tensor(int(flag), device=device)
    dist.all_reduce(count, group=group)
    return count.item() > 0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode within the block; then restore its mode and free weights gathered by FSDP."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        free_gathered_weights(model)
        model.train(was_training)


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedAttention(AttentionMetadata):
    """Attention of new tokens to the cached ones and to each other."""

    def document_lengths_BL(self, device: torch.device) -> Tensor:
        """Return the length of each row's text up to its last new token, (B, 1)."""
        assert self.positions_BL is not None
        return self.positions_BL[:, -1:].to(device) + 1

    def with_window(self, window: int | None) -> AttentionMetadata:
        """Describe the same tokens for layers with this window, which keep only the keys that new tokens see."""
        assert self.query_places_L is not None and self.key_places_S is not None
        n_keys = len(self.key_places_S) if window is None else window - 1 + len(self.query_places_L)
        return replace(self, window=window, key_places_S=self.key_places_S[-n_keys:])


class KVCache:
    """Key/value cache of a model, active within a `with` block.

    Each forward pass receives the new tokens that follow the cached ones, and `attention` of their positions. Call
    `advance` after it with the number of tokens to keep. Hooks on the model's attention store new keys and values, and
    pass all cached keys and values that the layer's window reaches. Padding before a row's first token has position 0,
    so that it sees only itself (a softmax over nothing would be NaN).

    `model` may be sharded by tensor parallelism or FSDP; `max_slots` is the capacity in tokens per row, including
    padding. Raises `ValueError` if the model has no such attention.
    """

    def __init__(self, model: nn.Module, max_slots: int):
        self.max_slots, self.n_slots = max_slots, 0
        self.states: dict[nn.Module, Any] = {}
        """States of recurrent modules after all tokens of the last forward pass."""
        self._modules = [module for name, module in model.named_modules() if fnmatchcase(name, _ATTENTION)]
        if not self._modules:
            raise ValueError(f"{type(model).__name__} has no modules named {_ATTENTION}, whose keys could be cached")
        self._stored: dict[nn.Module, tuple[int, Tensor, Tensor]] = {}
        """First slot of a layer's keys and values, and both from there: all in full layers."""
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        # Compiled blocks were traced without the hooks.
        self._cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        for module in self._modules:
            self._cleanup.callback(module.register_forward_pre_hook(self._attend_to_cached).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.n_slots = 0
        self._stored.clear()
        self.states.clear()

    def attention(self, positions_BL: Tensor) -> AttentionMetadata:
        """Return the attention of the next forward pass: new tokens see all cached tokens of their row's text."""
        end = self.n_slots + positions_BL.shape[1]
        assert end <= self.max_slots, f"{end} tokens in a cache for {self.max_slots}"
        slots_S = torch.arange(end, device=positions_BL.device)
        return replace(
            CachedAttention.of_rows(*positions_BL.shape),
            positions_BL=positions_BL,
            query_places_L=slots_S[self.n_slots :],
            key_places_S=slots_S,
            kernel="dense",  # a mask, since FlexAttention would compile for each number of keys
            states=self.states,
        )

    def advance(self, length: int) -> None:
        """Keep the first `length` tokens of the last forward pass; the other slots are reused."""
        self.n_slots += length

    def _attend_to_cached(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        q_BLHD, k_BLKD, v_BLKD, attention = args
        end, new = self.n_slots + k_BLKD.shape[1], (k_BLKD, v_BLKD)
        if attention.window is not None:
            first = end - len(attention.key_places_S)
            stored_first, *stored = self._stored.get(module, (0, k_BLKD[:, :0], v_BLKD[:, :0]))
            kept = slice(first - stored_first, self.n_slots - stored_first)
            keys, values = (torch.cat((old[:, kept], x), dim=1) for old, x in zip(stored, new, strict=True))
            self._stored[module] = first, keys, values
            return q_BLHD, keys, values, attention
        if module not in self._stored:
            shape = k_BLKD.shape[0], self.max_slots, k_BLKD.shape[2]
            keys, values = (x.new_empty(*shape, x.shape[-1]) for x in new)
            self._stored[module] = 0, keys, values
        _, *stored = self._stored[module]
        for memory, x in zip(stored, new, strict=True):
            memory[:, self.n_slots : end] = x
        return q_BLHD, *(memory[:, :end] for memory in stored), attention


# Logits with and without a cache. Both functions yield `step(tokens_B)`, which appends a token to each row (None in the
# first call) and returns the logits of the next token (B, V).

_Step = Callable[[Tensor | None], Tensor]


@contextmanager
def _cached_logits(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[_Step]:
    degree, device = _tensor_parallel_degree(model), _device_of(model)
    sequences = [list(prompt) for prompt in prompts]
    boundaries = cast(Any, model).cache_boundaries()
    # Padding before the first token and, under tensor parallelism, after the last.
    max_slots = max(map(len, prompts)) + max_new_tokens + 2 * degree

    make = partial(KVCache, model, max_slots)
    cache = model.generation_cache(make) if isinstance(model, BaseModel) else make()
    if cache is None:
        with _recomputed_logits(model, prompts, max_new_tokens) as recompute:
            yield recompute
        return
    with cache:

        def step(new_B: Tensor | None) -> Tensor:
            if new_B is not None:
                _append(sequences, new_B)
            if new_B is None or any(len(sequence) - 1 in boundaries for sequence in sequences):
                cache.clear()
                tokens_BL, positions_BL = _left_padded(sequences, degree)
                n_kept = tokens_BL.shape[1]
            else:
                # Tensor parallelism needs equally many tokens per rank: all after the first are padding, and not kept.
                tokens_BL = new_B[:, None].expand(-1, degree)
                positions_BL = torch.tensor([[len(sequence) - 1] * degree for sequence in sequences])
                n_kept = 1
            attention = cache.attention(positions_BL.to(device))
            logits_BV = _logits_at(model, n_kept - 1, tokens_BL.to(device), attention)
            if degree > 1 and cache.states:
                raise UserError(
                    f"a key/value cache under tensor parallelism (degree {degree}) supports no recurrent layers: "
                    "padding tokens would change their states; generate without cache (use_cache=False)"
                )
            cache.advance(n_kept)
            return logits_BV

        yield step


@contextmanager
def _recomputed_logits(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[_Step]:
    degree, device = _tensor_parallel_degree(model), _device_of(model)
    sequences = [list(prompt) for prompt in prompts]

    def step(new_B: Tensor | None) -> Tensor:
        if new_B is not None:
            _append(sequences, new_B)
        tokens_BL, positions_BL = _left_padded(sequences, degree)
        attention = AttentionMetadata.from_positions(positions_BL).to(device)
        return _logits_at(model, tokens_BL.shape[1] - 1, tokens_BL.to(device), attention)

    yield step


def _append(sequences: Sequence[list[int]], new_B: Tensor) -> None:
    for sequence, token in zip(sequences, new_B.tolist(), strict=True):
        sequence.append(token)


def _left_padded(sequences: Sequence[Sequence[int]], multiple: int) -> tuple[Tensor, Tensor]:
    """Return tokens and positions (B, L) on the host, with L divisible by `multiple`. Each padding token has position
    0, so it is a separate document."""
    longest = -(-max(map(len, sequences)) // multiple) * multiple
    paddings = [longest - len(sequence) for sequence in sequences]
    tokens = [[_PADDING] * padding + list(sequence) for padding, sequence in zip(paddings, sequences, strict=True)]
    return torch.tensor(tokens), (torch.arange(longest) - torch.tensor(paddings)[:, None]).clamp(min=0)


def _logits_at(model: nn.Module, index: int, tokens_BL: Tensor, attention: AttentionMetadata) -> Tensor:
    """Return the logits (B, V) of the token in column `index`."""

    def head(hidden_BLD: Tensor, weight_VD: Tensor, transform: LogitTransform = UNCHANGED) -> Tensor:
        if isinstance(hidden_BLD, DTensor):
            hidden_BLD = hidden_BLD.full_tensor()
        hidden_BD = hidden_BLD[:, index]
        if not isinstance(weight_VD, DTensor):
            return compute_logits(hidden_BD, weight_VD, transform)
        # Weights are sharded by vocabulary; gathering logits is cheaper than gathering weights.
        shared_BD = DTensor.from_local(hidden_BD, weight_VD.device_mesh, [Replicate()])
        return cast(DTensor, compute_logits(shared_BD, weight_VD, transform)).full_tensor()

    logits: Tensor = model(tokens_BL, attention, head=head)
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
