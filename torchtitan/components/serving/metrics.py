"""Counters of a server in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from torchtitan.components.serving.scheduler import Scheduler

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PREFIX = "torchtitan_serve"


class Histogram:
    """Numbers of observations up to each bound, in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count an observation."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Return the lines of the format."""
        n_so_far = 0
        lines = []
        for bound, count in zip((*_BOUNDS, "+Inf"), self._counts, strict=True):
            n_so_far += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {n_so_far}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {n_so_far}"]


class Metrics:
    """Counters of requests; the schedulers count tokens."""

    def __init__(self, schedulers: Sequence[Scheduler]):
        self._schedulers = schedulers
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first = Histogram()
        self._whole = Histogram()

    def count(self, path: str | None, status: int) -> None:
        """Count a request by the path of its route, which is a constant, so that clients cannot
        make more labels; None: it has no route."""
        self._requests[path or "other", status] += 1

    def first_text(self, seconds: float) -> None:
        """Count the time to the first text of a stream."""
        self._first.add(seconds)

    def finish(self, seconds: float) -> None:
        """Count the time of a whole answer."""
        self._whole.add(seconds)

    def text(self) -> str:
        """Return all metrics."""
        schedulers = self._schedulers
        totals = [scheduler.totals for scheduler in schedulers]
        n_prompt = sum(one.prompt_tokens for one in totals)
        n_generated = sum(one.generated_tokens for one in totals)
        n_cancelled = sum(one.cancelled for one in totals)
        n_failed = sum(one.failed for one in totals)
        n_running = sum(scheduler.n_running for scheduler in schedulers)
        n_waiting = sum(scheduler.n_waiting for scheduler in schedulers)
        requests = [
            f'{_PREFIX}_requests_total{{path="{_escaped(path)}",status="{status}"}} {number}'
            for (path, status), number in sorted(self._requests.items())
        ]
        lines = [
            *_head("requests_total", "counter", "Requests by path and HTTP status."),
            *requests,
        ]
        numbers = [
            ("prompt_tokens_total", "counter", "Tokens of prompts.", n_prompt),
            ("generated_tokens_total", "counter", "Generated tokens.", n_generated),
            ("cancelled_total", "counter", "Texts whose client left.", n_cancelled),
            ("failed_total", "counter", "Texts ended by an error.", n_failed),
            ("running", "gauge", "Texts in the batch.", n_running),
            ("waiting", "gauge", "Texts that wait for a row.", n_waiting),
        ]
        for name, kind, words, number in numbers:
            lines += [*_head(name, kind, words), f"{_PREFIX}_{name} {number}"]
        histograms = [
            ("first_text_seconds", "Time to the first text of a stream.", self._first),
            ("answer_seconds", "Time of a whole answer.", self._whole),
        ]
        for name, words, histogram in histograms:
            lines += [*_head(name, "histogram", words), *histogram.lines(f"{_PREFIX}_{name}")]
        return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _head(name: str, kind: str, words: str) -> list[str]:
    return [f"# HELP {_PREFIX}_{name} {words}", f"# TYPE {_PREFIX}_{name} {kind}"]
