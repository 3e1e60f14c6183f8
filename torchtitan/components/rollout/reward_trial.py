"""A trial call of reward functions before a run."""

import asyncio
from collections.abc import Mapping, Sequence

from torchtitan.components.checkpoint.state import kept_random_state
from torchtitan.components.generation.session import is_in_loop
from torchtitan.components.images.files import ImageFile
from torchtitan.components.rollout.rewards import (
    REWARD_MODEL,
    Rewards,
    Text,
    reference_answer,
)
from torchtitan.tools.errors import UserError, errors_of
from torchtitan.tools.logging import logger

PLACEHOLDERS = ("An answer.", "Another answer.")
"""Completions: for a row without a reference answer, and besides the first one of a batch."""

SECONDS = 60
"""Longest wait for functions that are awaited."""


def try_rewards(
    names: Sequence[str],
    where: str,
    prompt: str,
    row: Mapping[str, object],
    images: Sequence[ImageFile] = (),
    *,
    group_size: int = 1,
) -> None:
    """Call each of `--rewards` once, except reward models, whose weights would have to be loaded.
    The completion is the row's reference answer or, without one, a placeholder; a function that
    rates a batch gets `group_size` completions, every second one a placeholder. The results are
    only checked; random numbers stay the same, and a file is imported anew for the run. Raise
    `UserError` that names the row (`where`) and the function that fails, or if an asyncio loop runs
    in this thread."""
    tried = [name for name in names if not name.startswith(REWARD_MODEL)]
    if not tried:
        return
    if is_in_loop():
        raise UserError(
            "reward functions run in an asyncio loop, and one runs in this thread already, as in a "
            "notebook; start the run from a script"
        )
    try:
        completion = reference_answer(row)
    except UserError:
        completion = PLACEHOLDERS[0]
    logger.info("calling %s once, with %s", ", ".join(tried), where)
    rewards = Rewards(tried, [])
    subject = f"{where}, tried with the completion {completion!r:.60}"
    given = [completion, PLACEHOLDERS[1]]
    batch = [Text(prompt, given[n % 2], row, images) for n in range(group_size)]
    with errors_of(subject), kept_random_state():
        asyncio.run(_call(rewards, batch))


async def _call(rewards: Rewards, batch: Sequence[Text]) -> None:
    try:
        async with asyncio.timeout(SECONDS):
            ratings = [await rewards.rate(*batch[0]), *await rewards.rate_batch(batch)]
    except TimeoutError:  # as of a function that waits for the calls of other rollouts
        logger.warning("--rewards: no verdict after %d seconds; the run begins anyway", SECONDS)
        return
    if all(rating.value is None for rating in ratings):
        logger.warning(
            "--rewards %s: None for each completion; answers without a reward are not trained. Is "
            "a `return` missing?",
            " ".join(rewards.names),
        )
