"""Runs of layouts, compared with a single process."""

import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.equivalence.layouts import Layout, Options
from tests.equivalence.runs import (
    Differences,
    InconsistentRanks,
    Outcome,
    compare,
    make_config,
    record_run,
)
from tests.equivalence.workers import WorkerFailure, Workers
from torchtitan.tools.errors import UserError


@dataclass(frozen=True)
class Row:
    """Result of one layout."""

    layout: Layout
    seconds: float
    differences: Differences | None = None
    """None if the run did not finish."""
    refusal: str = ""
    """Error message of a rejected configuration; empty if it is accepted."""
    failure: str = ""
    """Tracebacks, or the inconsistency between ranks."""

    @property
    def passed(self) -> bool:
        """True if the run matches the single process, or the configuration is rejected as
        expected."""
        if self.layout.refused:
            return bool(self.refusal)
        return self.differences is not None and self.differences.agree

    @property
    def verdict(self) -> str:
        """Result in words, without numbers."""
        if self.refusal:
            return (
                f"refused: {self.refusal}"
                if self.layout.refused
                else f"refused, unexpectedly: {self.refusal}"
            )
        if self.layout.refused:
            return "not refused, as it should be"
        if self.failure:
            return f"failed: {self.failure.strip().splitlines()[-1]}"
        return "equal" if self.passed else "different"


class Matrix:
    """Runs layouts in persistent processes, and each single-process reference only once. Use it in
    a `with` statement, or `close` it.

    Args:
        extra: additional options for every run, including references.
    """

    def __init__(self, extra: Options | None = None):
        self._folder = tempfile.TemporaryDirectory()
        self._extra = dict(extra or {})
        self._workers: Workers | None = None
        self._references: dict[str, Outcome] = {}
        self._runs = 0

    def run(self, layouts: Iterable[Layout]) -> Iterator[Row]:
        """Yield the row of each layout when it is finished."""
        for layout in layouts:
            yield self.run_one(layout)

    def run_one(self, layout: Layout) -> Row:
        """Run a layout; errors are recorded in the row."""
        start = time.monotonic()
        options = {**self._extra, **layout.options}
        result: dict[str, Any] = {}
        try:
            make_config(self._new_folder(), options).check_layout(layout.processes)
            if not layout.refused:
                result["differences"] = compare(self.outcome(layout), self.reference(layout))
        except UserError as error:
            result["refusal"] = str(error)
        except (WorkerFailure, InconsistentRanks) as error:
            result["failure"] = str(error)
        # an error of the reference or of this program must not stop the other rows
        except Exception:
            result["failure"] = traceback.format_exc()
        return Row(layout, time.monotonic() - start, **result)

    def outcome(self, layout: Layout, *substitutes: Any) -> Outcome:
        """Run a layout and return its outcome.

        Args:
            substitutes: another trainer class and another data loader class; see `record_run`.

        Raises:
            WorkerFailure: if a rank fails; the message has the tracebacks.
            InconsistentRanks: if the weights of the ranks do not match.
        """
        if self._workers is None or self._workers.count != layout.processes:
            self._close_workers()
            self._workers = Workers(layout.processes)
        folder = self._new_folder()
        self._workers.run(record_run, folder, {**self._extra, **layout.options}, *substitutes)
        return Outcome.read(folder, layout.processes, layout.pipeline_degree, layout.in_two_stages)

    def reference(self, layout: Layout) -> Outcome:
        """Return the outcome of the same computation in a single process."""
        options = {**self._extra, **layout.reference_options}
        key = repr(sorted(options.items()))
        if key not in self._references:
            folder = self._new_folder()
            record_run(folder, options)
            self._references[key] = Outcome.read(folder, processes=1, pipeline_degree=1)
        return self._references[key]

    def close(self) -> None:
        """End the processes and delete their files."""
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
