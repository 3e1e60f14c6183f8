"""Replay of rare successes: trajectories that were rewarded once, for prompts whose answers fail
now."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.rollout.trajectory import Group, Trajectory
from torchtitan.config.configurable import Section
from torchtitan.tools.errors import require
from torchtitan.tools.logging import logger

_KEPT = ("tokens", "logprobs", "loss_mask", "reward", "token_rewards", "document")
"""Fields of a trajectory that a checkpoint contains."""


@dataclass(kw_only=True, slots=True)
class ReplayConfig(Section):
    """Replay of rare successes (Lu et al., arXiv:2505.16282, section 3)."""

    size: int = 0
    """Successful trajectories to keep, at most one for each prompt, the newest. If all answers to
    such a prompt fail later, its trajectory replaces the last answer. 0: no replay."""

    success: float = 1.0
    """Least reward of a success."""

    rare: float = 0.5
    """Largest share of successes among a prompt's answers from which one success is kept."""

    def validate(self) -> None:
        """Raise `UserError` for impossible values."""
        require(self.size >= 0, "--replay.size", self.size, "at least 0")
        require(0 <= self.rare <= 1, "--replay.rare", self.rare, "from 0 to 1")


class Replay:
    """The successes that are kept, equal on all ranks, by prompt from the oldest to the newest."""

    def __init__(self, size: int, success: float = 1.0, rare: float = 0.5, *, data: str = ""):
        """`ReplayConfig` describes the other arguments.

        Args:
            data: fingerprint of the data, whose numbers tell the prompts apart.
        """
        self._size = size
        self._success = success
        self._rare = rare
        self._data = data
        self._kept: dict[int, Trajectory] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def mixed(self, groups: Sequence[Group], ranks: Ranks, is_leader: bool) -> list[Group]:
        """Return the groups of a step, with a kept success instead of the last trajectory of groups
        without a success, and then keep new successes of all ranks. All ranks call this together;
        `is_leader`: whether this rank is the first with its prompts."""
        if not self._size:
            return list(groups)
        mixed = [self._with_success(group) for group in groups]
        found = [kept for group in groups if (kept := self._rare_success(group)) is not None]
        self._keep(itertools.chain(*ranks.gather(found if is_leader else [])))
        return mixed

    def _is_success(self, trajectory: Trajectory) -> bool:
        return trajectory.total is not None and trajectory.total >= self._success

    def _with_success(self, group: Group) -> Group:
        kept = self._kept.get(group[0].document)
        if kept is None or any(map(self._is_success, group)):
            return group
        return [*group[:-1], replace(kept)]

    def _rare_success(self, group: Group) -> Trajectory | None:
        """Return the first success of a group in which successes are rare."""
        successes = list(filter(self._is_success, group))
        if successes and len(successes) <= self._rare * len(group):
            return replace(successes[0], named={}, versions=[])
        return None

    def _keep(self, found: Iterable[Trajectory]) -> None:
        for trajectory in found:
            self._kept.pop(trajectory.document, None)  # the newest is the last
            self._kept[trajectory.document] = trajectory
        while len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]

    def state_dict(self) -> dict[str, object]:
        """Return the kept trajectories as JSON text."""
        rows = [{name: getattr(t, name) for name in _KEPT} for t in self._kept.values()]
        return {"kept": json.dumps(rows), "data": self._data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Of other data, drop it with a warning."""
        self._kept = {}
        rows = json.loads(state["kept"])
        if state["data"] != self._data:
            logger.warning(
                "--replay.size: %d answers are dropped, since they are of other data", len(rows)
            )
            return
        for row in rows:
            rewards = {int(place): reward for place, reward in row["token_rewards"].items()}
            self._kept[row["document"]] = Trajectory(**{**row, "token_rewards": rewards})
