"""Names of datasets on the Hugging Face Hub: `org/name[:config][@revision][split]`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchtitan.components.data.sources.files import file_format
from torchtitan.tools.errors import UserError

if TYPE_CHECKING:
    import datasets

_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
    r"(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?(?:\[(?P<split>[\w.-]+)\])?"
)


class HubName(NamedTuple):
    """A dataset string that names a repository on the hub."""

    repository: str
    config: str | None
    """Configuration of the repository, if it has more than one."""
    revision: str | None
    """Branch, tag or commit; None: the newest."""
    split: str


def hub_name(dataset: str) -> HubName | None:
    """Return the parts of a dataset string that names a repository; None for one with the form of a
    local path: in a folder that exists, or with the ending of a data file."""
    match = _NAME.fullmatch(dataset)
    if match is None:
        return None
    path = Path(match["repository"])
    if path.parent.exists() or file_format(path) is not None:
        return None
    return HubName(
        match["repository"], match["config"], match["revision"], match["split"] or "train"
    )


_PAGE = re.compile(
    r"https?://huggingface\.co/datasets/(\w[\w.-]*/\w[\w.-]*)(?!.*/(?:resolve|raw)/)"
)
"""Address of a page about a dataset; the addresses of its files contain /resolve/ or /raw/."""


def reject_page(dataset: str) -> None:
    """Raise `UserError` for the address of a dataset's page, which has no data."""
    if page := _PAGE.match(dataset):
        raise UserError(
            f"{dataset} is a page of the Hugging Face Hub; name the dataset {page[1]}, or "
            f"{page[1]}:CONFIG[SPLIT]"
        )


_COMMIT = re.compile("[0-9a-f]{40}")


def check_revision(repository: str, revision: str | None, table: "datasets.Dataset") -> None:
    """Raise `UserError` if a table that `datasets` loaded may be of another revision (None: the
    newest): without the network, it returns the copy that was made last, whatever the revision."""
    folder = Path(table.cache_files[0]["filename"]).parent
    loaded = folder.name
    if _COMMIT.fullmatch(loaded) is None or revision == loaded:
        return
    copies = [one.name for one in folder.parent.iterdir() if _COMMIT.fullmatch(one.name)]
    if revision is None and len(copies) == 1:
        return
    wanted = commit_of(repository, revision)
    if wanted == loaded:
        return
    problem = f"is commit {wanted}" if wanted else "cannot be asked for without the network"
    raise UserError(
        f"{repository}: its revision {revision or 'main'} {problem}, and the newest of "
        f"{len(copies)} copies is commit {loaded}; connect to the hub, or name that copy, "
        f"{repository}@{loaded}"
    )


def commit_of(repository: str, revision: str | None) -> str:
    """Return the commit of a revision (None: the newest), "" if the hub does not answer."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(repository, revision=revision, timeout=10).sha)
    except Exception:  # of the Hub client or the network
        return ""
