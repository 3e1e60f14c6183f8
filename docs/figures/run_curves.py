"""Draw the figures of docs/post_training.md, docs/agents.md and docs/recipe.md: `python
docs/figures/run_curves.py FOLDER [FIGURE]`.

FOLDER contains the dump folders of its runs, named as on the page. Without FIGURE, all figures are
drawn whose runs exist.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent

FIGURES: dict[str, list[tuple[str, list[tuple[str, str, str]]]]] = {
    "agents": [
        (
            "share of held-out sums that are right",
            [("calculated", "validation_reward", "")],
        ),
        ("calls of the tool per training answer", [("calculated", "rewards/calls", "")]),
    ],
    "assistant": [
        ("pre-training: loss of held-out stories", [("pretrain", "validation_loss", "")]),
        (
            "training loss",
            [("midtrain", "loss", "mid-training"), ("sft", "loss", "conversations")],
        ),
    ],
    "dpo": [
        ("reward margin of held-out pairs", [("dpo", "validation_rewards/margins", "")]),
        ("accuracy on held-out pairs", [("dpo", "validation_rewards/accuracies", "")]),
    ],
    "reward": [("accuracy on held-out pairs", [("reward", "validation_rewards/accuracies", "")])],
    "grpo": [
        ("reward of training answers", [("grpo", "reward", "")]),
        ("reward of held-out answers", [("grpo", "validation_reward", "")]),
    ],
    "ppo": [("reward of held-out answers", [("ppo", "validation_reward", "")])],
    "distillation": [
        (
            "cross entropy of held-out stories",
            [
                ("text", "validation_loss", "text alone"),
                ("distilled", "validation_cross_entropy", "distilled"),
            ],
        )
    ],
}
"""File → panels, each a title and lines: run, metric and label."""

WIDTH, HEIGHT, MARGIN = 360, 240, 44
COLORS = ("#1f77b4", "#d62728", "#2ca02c")


Line = tuple[str, list[tuple[float, float]]]
"""Label and points."""


class Axis(NamedTuple):
    """The horizontal axis of a figure."""

    name: str = "step"
    scale: Callable[[float], float] = float
    ticks: Sequence[float] = ()
    """Numbers to show; empty: round ones."""


STEPS = Axis()


def points(folder: Path, metric: str) -> list[tuple[float, float]]:
    """Return (step, value) of each line of a run's metrics.jsonl that has the metric."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    # Before the first step, all pairs are ties, which an accuracy counts as wrong.
    found = [
        (x["step"], x[metric])
        for x in lines
        if metric in x and (x["step"] or "accurac" not in metric)
    ]
    if not found:
        raise SystemExit(f"{folder}/metrics.jsonl has no {metric}")
    return found


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between two."""
    size = 10 ** math.floor(math.log10(high - low))
    step = next(size * factor for factor in (0.2, 0.5, 1, 2) if high - low <= 6 * size * factor)
    first = int(-(-low // step))
    return [round(number * step, 10) for number in range(first, int(high // step) + 1)]


def panel(title: str, lines: list[Line], left: int, axis: Axis) -> list[str]:
    """Return the SVG elements of axes, labels and lines."""
    xs, ys = ([point[number] for _, part in lines for point in part] for number in (0, 1))
    room = 0.08 * (max(ys) - min(ys) or 1)
    low, high = min(ys) - room, max(ys) + room

    def place(x: float, y: float) -> tuple[float, float]:
        at, first, last = (axis.scale(value) for value in (x, min(xs), max(xs)))
        across = (at - first) / (last - first)
        return left + MARGIN + across * (WIDTH - 1.5 * MARGIN), HEIGHT - MARGIN - (y - low) / (
            high - low
        ) * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<text x="{left + WIDTH / 2}" y="20" text-anchor="middle" '
        f'font-weight="bold">{escape(title)}</text>'
    ]
    for y in ticks(low, high):
        (x0, height), (x1, _) = place(min(xs), y), place(max(xs), y)
        parts.append(f'<path d="M{x0:.1f} {height:.1f}H{x1:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 5:.1f}" y="{height + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in axis.ticks or ticks(min(xs), max(xs)):
        if not min(xs) <= x <= max(xs):
            continue
        parts.append(
            f'<text x="{place(x, low)[0]:.1f}" y="{HEIGHT - MARGIN + 16}" '
            f'text-anchor="middle">{x:g}</text>'
        )
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{axis.name}</text>'
    )
    for number, (label, part) in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in part))
        color = COLORS[number]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        right, below = left + WIDTH - MARGIN / 2, MARGIN + 16 * (number + 1)
        parts.append(
            f'<text x="{right}" y="{below}" text-anchor="end" fill="{color}">{escape(label)}</text>'
        )
    return parts


def draw(panels: list[tuple[str, list[Line]]], axis: Axis = STEPS) -> str:
    """Return an SVG document with panels side by side, of a title and lines with labels and
    points."""
    width = WIDTH * len(panels)
    parts = [
        part
        for number, (title, lines) in enumerate(panels)
        for part in panel(title, lines, number * WIDTH, axis)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'width="{width}" '
        f'height="{HEIGHT}"'
    )
    return "\n".join(
        [
            f'{head} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def main(folder: Path, only: str = "") -> None:
    for name, panels in FIGURES.items():
        if only in ("", name) and all(
            (folder / run).is_dir() for _, lines in panels for run, _, _ in lines
        ):
            known = [
                (title, [(label, points(folder / run, key)) for run, key, label in lines])
                for title, lines in panels
            ]
            (HERE / f"{name}.svg").write_text(draw(known))
            print(HERE / f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
