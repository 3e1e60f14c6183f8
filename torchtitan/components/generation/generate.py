"""Text generation for prompts that are known in advance, as in `torchtitan generate`."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import torch.distributed as dist
from torch import nn

from torchtitan.components.generation.engine import Engine, Generation
from torchtitan.components.generation.sampling import Sampling
from torchtitan.tools.errors import UserError

OnToken = Callable[[int, int], bool]
"""Called with the row number and the next token, in row order; return True to end the row."""


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
    """Continue all `prompts` in one batch, with the model in evaluation mode; rows end independently. For models and
    further arguments, see `Engine`.

    Args:
        prompts: token ids, at least one per prompt.
        max_new_tokens: maximum per prompt, including the stop token.
        sampling: None: always the most probable token.

    Raises:
        UserError: there are no prompts; prompt and continuation exceed the model's context (`max_seq_len`); the model
            is a pipeline stage or uses context parallelism; logits are not finite.
    """
    if not prompts:
        raise UserError("there are no prompts; pass at least one")
    sampling = sampling or Sampling()
    engine = Engine(model, sampling=sampling, stop_ids=stop_ids, use_cache=use_cache, group=group)
    texts = [
        engine.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            key=f"{sampling.seed}/{row}",
            on_token=on_token and partial(on_token, row),
        )
        for row, prompt in enumerate(prompts)
    ]
    return engine.run(texts)
