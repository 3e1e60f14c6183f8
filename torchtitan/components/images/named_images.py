"""`WithNamedImages`: rows whose identity covers the image files that they name."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchtitan.components.data.sources.rows import Document, OnRead, Part, Row
from torchtitan.components.images.files import ImageOpener
from torchtitan.tools.digests import remembered


class WithNamedImages(Part):
    """The rows of another part. Their identity has the content of the files that the rows name, as
    well as their own, so that another image under an old name is noticed.

    Args:
        part: the rows.
        image_columns: columns with the image: the first of these that a row has.
        root: cache folder, which keeps the names until the rows change.
    """

    def __init__(self, part: Part, image_columns: Sequence[str], root: Path):
        super().__init__(part.name, part.text_column)
        self._part = part
        self._columns = list(image_columns)
        self._root = root
        self.kind = part.kind
        self.counts_bytes = part.counts_bytes
        self.folder = part.folder

    def size(self) -> int:
        return self._part.size()

    def rows(self, on_read: OnRead) -> Iterator[Row]:
        return self._part.rows(on_read)

    def documents(self, on_read: OnRead) -> Iterator[Document]:
        return self._part.documents(on_read)

    def contents(self, digest: Callable[[Path], str]) -> list[str]:
        files: list[Path] = []

        def listed_digest(path: Path) -> str:
            files.append(path)
            return digest(path)

        own = self._part.contents(listed_digest)
        if self.folder is None:  # paths in its rows are refused
            return own
        what = f"images in {self._columns} of rows in {self.folder}"
        names = remembered(self._root, what, files, self._names) if files else self._names()
        return [*own, *(self._described(name, digest) for name in json.loads(names))]

    def _names(self) -> str:
        """Return the paths in the rows, in order, as JSON."""
        found: dict[str, None] = {}  # in order
        opener = ImageOpener(self.folder)
        for row in self.rows(lambda _: None):
            cells = row.values or {}
            cell = next((cells[key] for key in self._columns if cells.get(key) is not None), None)
            for reference in cell if isinstance(cell, list) else [cell]:
                if name := opener.name_of(reference):
                    found[name] = None
        return json.dumps([*found])

    def _described(self, name: str, digest: Callable[[Path], str]) -> str:
        path = ImageOpener(self.folder).file_of(name)
        return f"{name} {digest(path)}" if path else f"{name} cannot be read"
