"""Further views on the page of `torchtitan serve`: curves of runs, and rows of data."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan.cli.data_samples import token_texts
from torchtitan.cli.report import is_metrics, points_of, shown_metrics, thinned, unit_of
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.data.finetuning.encoded import EncodedRow
from torchtitan.components.data.finetuning.filters import Dropped
from torchtitan.components.data.finetuning.row_batches import BatchEncoder
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.observe.run_events import read_events
from torchtitan.components.observe.run_files import METRICS
from torchtitan.components.serving.errors import RequestError
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import json_lines
from torchtitan.tools.logging import visible

_MOST_RUNS = 200
_MOST_ROWS = 50
_LAST_FIRST_ROW = 1_000_000


class RunsView:
    """Curves of the run in a folder, or of the runs in its subfolders, the newest first. Runs may
    be in progress.

    Raises:
        UserError: if there is no such folder.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise UserError(f"--runs {folder} is not a folder")
        self._folder = folder.resolve()

    def names(self) -> list[str]:
        return list(self._files())

    def read(self, name: str, query: Mapping[str, str]) -> dict[str, object]:
        """Return the `curves`, metric → its points, [step, value], thinned out; and the `units` of
        metrics."""
        file = self._files().get(name)
        if file is None:
            raise RequestError(f"the run {name} was removed", status=404, param="name")
        try:
            lines = [*json_lines(file, is_metrics, [])]
            starts = [one for one in read_events(file.parent) if one["event"] == "start"]
        except UserError as error:
            raise RequestError(str(error), status=500) from None
        curves = {key: thinned(points_of(lines, key)) for key in shown_metrics(lines)}
        return {"curves": curves, "units": {key: unit_of(key, starts[-1:]) for key in curves}}

    def _files(self) -> dict[str, Path]:
        """Return the file with the metrics of each run."""
        own = self._folder / METRICS
        found = [own] if own.is_file() else [*self._folder.glob(f"*/{METRICS}")]
        newest = sorted(found, key=_changed, reverse=True)[:_MOST_RUNS]
        return {file.parent.name: file for file in newest}


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


class DataView:
    """Rows of fine-tuning data, as `--config sft` would train a model on them.

    Raises:
        UserError: if a dataset is unknown or has an unknown format.
    """

    def __init__(
        self, datasets: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None
    ):
        config = SFTDataLoader.Config(dataset=list(datasets), broken="drop")
        config.validate()
        encoder = config.encoder(tokenizer, template)
        encoder.check()
        filters = config.filters()
        self._tokenizer = tokenizer
        self._rows = {
            name: (source, BatchEncoder(row_format, encoder, filters))
            for name, (source, row_format) in zip(datasets, config.local_rows(), strict=True)
        }

    def names(self) -> list[str]:
        return list(self._rows)

    def read(self, name: str, query: Mapping[str, str]) -> dict[str, object]:
        """Return the rows from number `first` on, at most `number`: `where` they are, and their
        `samples`, each a list of tokens [text, is trained], or why the row is `dropped`."""
        first = _whole_number(query, "first", 0, _LAST_FIRST_ROW)
        number = _whole_number(query, "number", 10, _MOST_ROWS)
        source, encoder = self._rows[name]
        try:
            found = itertools.islice(source.rows(lambda _: None), first, first + number)
            return {"rows": [self._shown(row, encoder) for row in found]}
        except UserError as error:
            raise RequestError(str(error), status=500) from None

    def _shown(self, row: Row, encoder: BatchEncoder) -> dict[str, object]:
        samples, dropped = [], ""
        for result in encoder.results(row):
            if isinstance(result, Dropped):
                dropped = f"{result.reason}: {result.why}"
            else:
                samples.append(self._tokens(result))
        return {"where": row.where, "samples": samples, "dropped": visible(dropped)}

    def _tokens(self, sample: EncodedRow) -> list[tuple[str, bool]]:
        texts = map(visible, token_texts(sample.ids.tolist(), self._tokenizer))
        return list(zip(texts, sample.trained.tolist(), strict=True))


def _whole_number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    word = query.get(name, str(default))
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word) <= most):
        raise RequestError(f"{name} must be a whole number from 0 to {most:,}", param=name)
    return int(word)
