"""The better of two values of a metric: the higher or the lower one."""

from typing import Literal

from torchtitan.tools.errors import UserError

Goal = Literal["auto", "min", "max"]

_LOWER = ("loss", "perplexity", "bits_per_byte")
_HIGHER = ("accuracy", "accuracies", "acc", "acc_norm", "exact_match", "f1", "reward", "margins")


def sign_of(metric: str, goal: Goal, *, option: str, goal_option: str) -> int:
    """Return -1 if lower values of a metric of validation or evaluation are better, otherwise 1.
    Raise `UserError`, which names both options, if `goal` is auto and the name does not tell."""
    if goal != "auto":
        return -1 if goal == "min" else 1
    # evaluation/TASK/METRIC or validation_METRIC/SET
    of_task = metric.startswith("evaluation/")
    parts = metric.split("/")[-1 if of_task else 0 :]
    for word in (part.removeprefix("validation_").partition(",")[0] for part in parts):
        if word.endswith(_LOWER):
            return -1
        if word in _HIGHER or word.endswith("accuracy") or word.startswith("pass_at_"):
            return 1
    raise UserError(
        f"{option} '{metric}' does not tell whether lower or higher is better; set {goal_option} "
        "to min or max"
    )
