"""Learning rates as a list of points, `STEP:FACTOR`."""

import bisect
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torchtitan.tools.errors import UserError

Between = Literal["constant", "linear"]
"""Factor between two points: the earlier one's, or on a line."""


class RatePoint(NamedTuple):
    """Factor of a learning rate after a number of steps."""

    steps_taken: int
    factor: float


def parse_points(option: str, words: Sequence[str]) -> list[RatePoint]:
    """Return the points of `["1000:0.5", "2e4:0.1"]`, after the point `0:1`, unless another is
    given. Raise `UserError` for a malformed word, a factor that is negative or not finite, or steps
    that do not ascend."""
    points: list[RatePoint] = []
    for word in words:
        step, _, factor = word.partition(":")
        is_number = re.fullmatch(r"\d+(?:\.\d+)?(?:e\d{1,2})?", step, re.ASCII)
        try:
            point = RatePoint(int(float(step)) if is_number else -1, float(factor))
        except ValueError:
            point = RatePoint(-1, 0.0)
        is_valid = point.steps_taken >= 0 and point.factor >= 0 and math.isfinite(point.factor)
        if not is_valid or float(step) != point.steps_taken:
            raise UserError(
                f"{option} '{word}' is not like 1000:0.5 (half of the rate after 1000 steps)"
            )
        if points and point.steps_taken <= points[-1].steps_taken:
            raise UserError(f"{option}: the steps of {' '.join(words)} do not ascend")
        points.append(point)
    if points and points[0].steps_taken > 0:
        points.insert(0, RatePoint(0, 1.0))
    return points


def factor_at(points: Sequence[RatePoint], steps_taken: int, between: Between) -> float:
    """Return the factor for the step after `steps_taken` steps; after the last point, it is the
    last one's."""
    index = bisect.bisect_right(points, steps_taken, key=lambda point: point.steps_taken)
    before = points[index - 1]
    if between == "constant" or index == len(points):
        return before.factor
    after = points[index]
    progress = (steps_taken - before.steps_taken) / (after.steps_taken - before.steps_taken)
    return before.factor + progress * (after.factor - before.factor)
