"""Tables of Delta Lake, Iceberg, Hudi and Lance.

The folder of such a table also holds files that the table no longer has: rows that were replaced or
deleted stay there until the table is cleaned. Only its metadata tell which files count.
"""

import posixpath
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_METADATA = {
    "_delta_log/*.json": ("Delta Lake", "deltalake"),
    "metadata/v[0-9]*.metadata.json": ("Iceberg", "pyiceberg"),
    "metadata/[0-9][0-9][0-9][0-9][0-9]-*.metadata.json": ("Iceberg", "pyiceberg"),
    ".hoodie/hoodie.properties": ("Hudi", "hudi"),
    "_versions/*.manifest": ("Lance", "pylance"),
}
"""Files in the folder of a table: its format, and the package that reads it."""

_ADVICE = "write the rows that {package} reads as parquet files in another folder, and use that"


def reject_tables(dataset: str, files: Iterable[str]) -> None:
    """Raise `UserError` if files contain the metadata of a table.

    Args:
        dataset: folder of all these files, as the user wrote it.
        files: paths, hidden ones included, with slashes.
    """
    for file in files:
        for metadata, (name, package) in _METADATA.items():
            if fnmatchcase(f"/{file}", f"*/{metadata}"):
                raise UserError(
                    f"{dataset!r} is or contains a table of {name} ({file}), whose files may hold "
                    f"rows that the table no longer has; {_ADVICE.format(package=package)}"
                )


def warn_of_tables(files: Iterable[str], find: Callable[[str], Collection[object]]) -> None:
    """Warn once of each table in whose folder files are.

    Args:
        files: paths of the files, with slashes.
        find: returns the files that match a path in which the name after the last slash is a
            pattern.
    """
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    for folder in sorted(folders - _warned):
        for metadata, (name, package) in _METADATA.items():
            if find(posixpath.join(folder, metadata)):
                _warned.add(folder)
                logger.warning(
                    f"{folder} is a table of {name}, whose files may hold rows that the table no "
                    f"longer has; these are read too unless you {_ADVICE.format(package=package)}"
                )


_warned = set[str]()
"""Folders of tables, so that many files of one cause one warning."""
