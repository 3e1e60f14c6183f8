"""Pipeline stages of a class of transformers: which classes a trial of a tiny clone shows to be
divisible, and how a stage runs.

A stage calls the whole class, whose other modules are absent: those without weights compute as
always (masks, positions), absent blocks return their input, and the hidden states of the previous
stage replace those before the first own block."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.transformers.tiny import (
    TEXT_IDS,
    changed_result,
    gradients_of,
    randomize,
    trial,
)
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.model import AbsentModule
from torchtitan.tools.errors import UserError, in_words

_LENGTHS = [13, 3, 8, 21, 3]
"""Tokens of the documents of the trial, in two rows."""


class Absent(AbsentModule):
    """Takes the place of a module of another stage. Returns its first input; for tokens, the hidden
    states that the stage received."""

    states: "StageStates"

    def __init__(self, place: nn.Module, states: "StageStates"):
        super().__init__()
        # The class may read them, such as the kind of a block.
        own = {name: value for name, value in vars(place).items() if name not in self.__dict__}
        self.__dict__.update(own)
        self.states = states

    def forward(self, *args: object, **kwargs: object) -> Tensor | None:
        first = args[0] if args else kwargs.get("hidden_states")
        if isinstance(first, Tensor) and first.is_floating_point():
            return first
        return self.states.received


class Entry(Absent):
    """The absent block before the first own one: returns the hidden states of the last stage."""

    def forward(self, *args: object, **kwargs: object) -> Tensor | None:
        return self.states.received


class Exit(Absent):
    """The absent block after the last own one: keeps the hidden states for the next stage."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # type: ignore[override]
        sent = args[0] if args else kwargs["hidden_states"]
        self.states.sent = sent
        return sent


@dataclass(eq=False)
class StageStates:
    """Hidden states of a stage's forward pass, in the form that the class's blocks pass them."""

    received: Tensor | None = None
    sent: Tensor | None = None

    def take(self) -> Tensor:
        """Return the hidden states for the next stage, and forget all."""
        sent = self.sent
        self.received = self.sent = None
        assert sent is not None
        return sent


@dataclass(frozen=True)
class Division:
    """Modules of a class that a pipeline separates, by their names in our model."""

    embedding: str
    blocks: tuple[str, ...]
    """The blocks of the decoder."""
    last: frozenset[str] = field(default=frozenset())
    """Modules with weights that run after the blocks, besides the head."""

    @property
    def names(self) -> list[str]:
        """Modules that a pipeline separates, in order; other modules follow their neighbors."""
        return [self.embedding, *self.blocks, "head"]


def divide(model: Any, last: Collection[str] = ()) -> Division:
    """Return the division of a `TransformersModel`, given what runs after its blocks."""
    decoder = set(model.model.get_decoder().modules())
    embedding = model.model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    blocks = [name for name, block in model.blocks().items() if block in decoder]
    return Division(name, tuple(blocks), frozenset(last))


def keep_stage(model: Any, division: Division, names: Collection[str]) -> StageStates:
    """Make a `TransformersModel` a stage with the parts `names` of its division, in place. Raise
    `UserError` for a stage without blocks."""
    blocks = division.blocks
    kept = [index for index, name in enumerate(blocks) if name in names]
    if not kept:
        raise UserError(
            f"a pipeline stage has only {', '.join(names)}: with a class of transformers, each "
            "stage needs a block; set fewer stages or a lower --parallelism."
            "pipeline_parallel_first_stage_less_layers or …last_stage_less_layers"
        )
    states = StageStates()
    for index, name in enumerate(blocks):
        if index not in kept:
            kind = {kept[0] - 1: Entry, kept[-1] + 1: Exit}.get(index, Absent)
            model.set_submodule(name, kind(model.get_submodule(name), states))
    dropped: list[str] = []
    has_first, has_last = kept[0] == 0, kept[-1] == len(blocks) - 1
    output = f"model.{model.output_name}"
    for name in [*outer_owners(model, blocks), output]:
        is_kept = has_last if name in (*division.last, output) else has_first
        is_inside = any(name.startswith(f"{outer}.") for outer in dropped)
        if not (is_kept or name in names or is_inside):
            model.set_submodule(name, Absent(model.get_submodule(name), states))
            dropped.append(name)
    if not has_last:
        model.head = None
    return states


def outer_owners(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Return the names of the modules with own parameters or saved buffers outside of the blocks
    and the head."""
    inside = {*blocks, "head"}

    def is_outside(name: str) -> bool:
        parts = name.split(".")
        return inside.isdisjoint(".".join(parts[:n]) for n in range(1, len(parts) + 1))

    # a module's own state, without its submodules'
    owners = {name.rpartition(".")[0] for name in model.state_dict()}
    return [name for name, _ in model.named_modules() if name in owners and is_outside(name)]


@trial
def try_stages(config: Any) -> tuple[frozenset[str], str]:
    """Divide a tiny clone of a `TransformersModel`, given its `ClassConfig`, into one stage per
    block. Return which of its modules run after the blocks, and why it cannot be divided ("": it
    can)."""
    try:
        return _try(config.tiny().build), ""
    except _Indivisible as error:
        return frozenset(), str(error)
    except Exception as error:  # any class, called in a way that it was not written for
        return frozenset(), f"a trial of its stages failed: {in_words(error)}"


class _Indivisible(Exception):
    """The reason why a class cannot be divided."""


def _try(build: Callable[[], Any]) -> frozenset[str]:
    torch.manual_seed(0)
    model = randomize(build().eval())
    positions_BL = torch.cat([torch.arange(n) for n in _LENGTHS]).view(2, -1)
    tokens_BL = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, positions_BL.shape)
    attention = AttentionMetadata.from_positions(positions_BL)
    blocks = divide(model).blocks
    if len(blocks) < 2:
        raise _Indivisible("it has no list of blocks")
    last = frozenset(_after_blocks(model, blocks, tokens_BL))
    _check_blocks(model, blocks, tokens_BL, attention)
    division = divide(model, last)
    names = division.names
    stages = []
    for index, block in enumerate(blocks):
        parts = [
            *names[:1] * (index == 0),
            block,
            *([names[-1], *names[:1] * model.is_tied] if block is blocks[-1] else []),
        ]
        stage = build().eval()
        stage.load_state_dict(model.state_dict())
        stage.division = division
        stage.keep_modules(parts)
        stages.append(stage)
    owned = [set(stage.state_dict()) - {f"{names[0]}.weight"} for stage in stages]
    for one, other in pairwise(owned):
        if one & other:
            raise _Indivisible(f"its blocks share {min(one & other)}")
    with torch.enable_grad():
        hidden = tokens_BL
        for stage in stages:
            hidden = stage(hidden, attention)
        logits = model(tokens_BL, attention)
        weights = torch.randn_like(logits)
        (hidden * weights).sum().backward()
        (logits * weights).sum().backward()
    _compare(model, stages, hidden, logits)
    return last


def _after_blocks(model: Any, blocks: Collection[str], tokens_BL: Tensor) -> Iterator[str]:
    """Yield the owners of weights that run after the blocks. Raise `_Indivisible` for one that
    runs between, or both before and after."""
    calls: list[str] = []
    owners = outer_owners(model, blocks)
    if around := [name for name in owners if any(block.startswith(f"{name}.") for block in blocks)]:
        raise _Indivisible(f"{around[0].removeprefix('model.')} has blocks and weights of its own")
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: calls.append(name)
        )
        for name in (*owners, *blocks)
    ]
    model(tokens_BL)
    for handle in handles:
        handle.remove()
    if [name for name in calls if name in blocks] != list(blocks):
        raise _Indivisible("it does not run its blocks once, in order")
    start, end = calls.index(next(iter(blocks))), len(calls) - calls[::-1].index([*blocks][-1])
    before, after = calls[:start], calls[end:]
    inner = [name for name in calls[start:end] if name in owners]
    if inner or (inner := [name for name in before if name in after]):
        raise _Indivisible(f"{inner[0].removeprefix('model.')} does not run before or after blocks")
    yield from after


def _check_blocks(
    model: Any, blocks: Collection[str], tokens_BL: Tensor, attention: AttentionMetadata
) -> None:
    """Raise `_Indivisible` unless hidden states between blocks are one tensor of the model's width
    and type."""
    outputs = []
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *args: outputs.append(args[-1]))
        for name in blocks
    ]
    model(tokens_BL, attention)
    types = {type(output).__name__ for output in outputs if not isinstance(output, Tensor)}
    if types:
        raise _Indivisible(f"its blocks return {', '.join(sorted(types))}, not one tensor")
    shapes = {tuple(output.shape[2:]) for output in outputs}
    if shapes != {(model.config.dim,)}:
        raise _Indivisible("hidden states between its blocks are not (tokens, width)")
    outputs.clear()
    model.to(torch.bfloat16)(tokens_BL, attention)
    if {output.dtype for output in outputs} != {torch.bfloat16}:
        raise _Indivisible("hidden states between its blocks are wider than its weights")
    for handle in handles:
        handle.remove()
    randomize(model.float())


def _compare(model: Any, stages: list[Any], logits: Tensor, expected: Tensor) -> None:
    """Raise `_Indivisible` if logits or gradients of the stages differ from the model's."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = found[name] + gradient if name in found else gradient
    if changed := changed_result(logits.detach(), expected.detach(), found, gradients_of(model)):
        raise _Indivisible(f"in a trial, stages changed {changed}")
