"""Runs layouts and tells how each of them compares with the single process."""

import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.equivalence.layouts import Layout, Options
from tests.equivalence.runs import Differences, InconsistentRanks, Outcome, compare, make_config, record_run
from tests.equivalence.workers import WorkerFailure, Workers
from torchtitan.tools.errors import UserError


@dataclass(frozen=True)
class Row:
    """What became of one layout."""

    layout: Layout
    seconds: float
    differences: Differences | None = None
    """None where it did not run to its end."""
    refusal: str = ""
    """The reason that a user is given; empty where it is not refused."""
    failure: str = ""
    """Tracebacks, or what the ranks do not agree on."""

    @property
    def passed(self) -> bool:
        """Whether it agrees with the single process, or is refused as it is to be."""
        if self.layout.refused:
            return bool(self.refusal)
        return self.differences is not None and self.differences.agree

    @property
    def verdict(self) -> str:
        """In words, without the numbers."""
        if self.refusal:
            return f"refused: {self.refusal}" if self.layout.refused else f"refused, unexpectedly: {self.refusal}"
        if self.layout.refused:
            return "not refused, as it should be"
        if self.failure:
            return f"failed: {self.failure.strip().splitlines()[-1]}"
        return "equal" if self.passed else "different"


class Matrix:
    """Runs layouts in processes that it keeps; what a single process makes of the same
    problem is run once. Use it in a `with` statement, or `close` it.

    Args:
        extra: options that every run gets besides, the single process's too.
    """

    def __init__(self, extra: Options | None = None):
        self._folder = tempfile.TemporaryDirectory()
        self._extra = dict(extra or {})
        self._workers: Workers | None = None
        self._references: dict[str, Outcome] = {}
        self._runs = 0

    def run(self, layouts: Iterable[Layout]) -> Iterator[Row]:
        """One row after the other, as they are done."""
        for layout in layouts:
            yield self.run_one(layout)

    def run_one(self, layout: Layout) -> Row:
        """What becomes of a layout; a failure of its own is told in the row."""
        begun = time.monotonic()
        options = {**self._extra, **layout.options}
        told: dict[str, Any] = {}
        try:
            make_config(self._new_folder(), options).check_layout(layout.processes)
            if not layout.refused:
                told["differences"] = compare(self.outcome(layout), self.reference(layout))
        except UserError as error:
            told["refusal"] = str(error)
        except (WorkerFailure, InconsistentRanks) as error:
            told["failure"] = str(error)
        except Exception:  # of the single process, or of this program: the other rows are to be seen nevertheless
            told["failure"] = traceback.format_exc()
        return Row(layout, time.monotonic() - begun, **told)

    def outcome(self, layout: Layout, *substitutes: Any) -> Outcome:
        """What the layout's processes compute.

        Args:
            substitutes: a trainer's class and a data loader's, to take instead; see `record_run`.

        Raises:
            WorkerFailure: with the tracebacks of the ranks.
            InconsistentRanks: if they do not hold the weights that they should.
        """
        if self._workers is None or self._workers.count != layout.processes:
            self._close_workers()
            self._workers = Workers(layout.processes)
        folder = self._new_folder()
        self._workers.run(record_run, folder, {**self._extra, **layout.options}, *substitutes)
        return Outcome.read(folder, layout.processes, layout.pipeline_degree)

    def reference(self, layout: Layout) -> Outcome:
        """What a single process computes of the same problem."""
        options = {**self._extra, **layout.reference_options}
        key = repr(sorted(options.items()))
        if key not in self._references:
            folder = self._new_folder()
            record_run(folder, options)
            self._references[key] = Outcome.read(folder, processes=1, pipeline_degree=1)
        return self._references[key]

    def close(self) -> None:
        """End the processes, and delete what they wrote."""
        self._close_workers()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = Path(self._folder.name) / f"{self._runs:03d}"
        folder.mkdir()
        return folder
