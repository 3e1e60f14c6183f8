"""The factor of the entropy that a policy's loss rewards."""

from collections.abc import Mapping
from typing import Any


class EntropyControl:
    """Without a target, the factor is `weight`. With one, a coefficient c, first `weight`, rises by
    `step` after each step whose mean entropy is below the target, and falls by it, to 0 at least,
    after one above; the factor is c while the last entropy is not above the target, and 0 while it
    is (Skywork-OR1, arXiv:2505.22312, "adaptive entropy control")."""

    def __init__(self, weight: float, target: float | None, step: float):
        self._coefficient = weight
        self._target = target
        self._step = step
        self._is_above = False

    @property
    def is_on(self) -> bool:
        """True if the factor may differ from 0, so that entropies are needed."""
        return self._target is not None or self._coefficient > 0

    @property
    def is_adaptive(self) -> bool:
        """True if the factor changes."""
        return self._target is not None

    @property
    def factor(self) -> float:
        """Factor of the next step."""
        return 0.0 if self._is_above else self._coefficient

    def observe(self, entropy: float) -> None:
        """Follow the mean entropy of a token's distribution, in nats, in a step."""
        if self._target is None:
            return
        self._is_above = entropy > self._target
        change = -self._step if self._is_above else self._step
        self._coefficient = max(0.0, self._coefficient + change)

    def state_dict(self) -> dict[str, object]:
        """Return the state that a run needs to resume."""
        return {"coefficient": self._coefficient, "is_above": self._is_above}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._coefficient = state["coefficient"]
        self._is_above = state["is_above"]
