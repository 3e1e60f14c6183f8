"""Values of options that are written as text."""

from torchtitan.tools.errors import UserError


def parse_token_range(text: str) -> tuple[int, int] | None:
    """`LOW-HIGH` as numbers; None for an empty text.

    Raises:
        UserError: for anything else.
    """
    if not text:
        return None
    low, dash, high = text.partition("-")
    if not (dash and low.strip().isdecimal() and high.strip().isdecimal() and int(low) <= int(high)):
        raise UserError(f"--dataloader.token_range is LOW-HIGH, two token ids such as 0-31999, not {text!r}")
    return int(low), int(high)


def parse_schedule(entries: list[str]) -> list[tuple[int, list[float]]]:
    """`["500: 0.2 0.8", …]`, steps and the weights from then on, as numbers.

    Raises:
        UserError: an entry of another form.
    """
    schedule = []
    for entry in entries:
        step, colon, weights = entry.partition(":")
        try:
            schedule.append((int(step), [float(weight) for weight in weights.split()]))
        except ValueError:
            colon = ""
        if not colon:
            raise UserError(f"--dataloader.weight_schedule is entries such as '500: 0.2 0.8', not {entry!r}")
    return schedule
