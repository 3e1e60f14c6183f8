"""Messages for a model's folder or file that cannot be used, and the rule for links in such a folder."""

import re
from pathlib import Path

from torchtitan.tools.errors import UserError

DOWNLOADS = Path("assets/hf")
"""Where `torchtitan download` puts models, each into a folder of its name."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_META = re.compile(r"(Meta-)?Llama-\d")
"""Begin of the names of the models that Meta has published on the hub."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""Begin of the text that Git leaves in place of a large file where Git LFS has not fetched it."""


def no_folder(path: str | Path) -> UserError:
    """What to raise where a folder with a model's files is asked for and `path` is none: it names the command that
    fetches the model, where `path` can be the id of one on the Hugging Face hub, or a place for one."""
    place = Path(path)
    missing = f"{place} is not a folder"
    if place.exists():
        return UserError(f"{missing} but a file; name the folder that it is in")
    if place.parent.parts[-2:] == DOWNLOADS.parts:
        owner = "meta-llama" if _META.match(place.name) else "OWNER"
        dest = "" if place.parent == DOWNLOADS else f" --dest {place}"
        return UserError(f"{missing}: fetch the model: torchtitan download {owner}/{place.name}{dest}")
    # A folder of that name here is the user's own, and the rest of the path is mistyped.
    if not _HUB_ID.fullmatch(str(place)) or place.parent.exists():
        return UserError(f"{missing}; name the folder that holds the model's files")
    downloaded = DOWNLOADS / place.name
    if downloaded.is_dir():
        return UserError(f"{missing} but the name of a model, which has been downloaded: give ./{downloaded}")
    return UserError(
        f"{missing}: if it is a model on the Hugging Face hub, fetch it: torchtitan download {place}, and give "
        f"./{downloaded}"
    )


def file_to_copy(folder: Path, name: str) -> Path:
    """Return the file or folder `name` of a model's folder, which is about to be copied.

    A folder may come from a stranger, and a link in it could lead to any file of this machine, which an export would
    then publish. The folder itself may be a link, and in the cache of the Hugging Face hub the files of a model are
    links to its `blobs`. Weights are not copied byte by byte: their reader follows links, to another disk for example.

    Raises:
        UserError: if it is a link that leaves the folder.
    """
    home, target = folder.resolve(), (folder / name).resolve()
    cached = (outer.parent for outer in (home, *home.parents) if outer.parent.name == "snapshots")
    of_model = next((each.parent for each in cached if each.parent.name.startswith("models--")), home)
    if not target.is_relative_to(of_model):
        raise UserError(f"{folder / name} is a link to {target}, outside the folder; replace it with a copy")
    return folder / name


def unreadable(file: str | Path, message: str) -> UserError:
    """Return what to raise for a file of a model that is not what it should be.

    Args:
        file: which one, on a disk or behind a URL.
        message: its fault, unless it is a Git LFS pointer.
    """
    path = Path(file)
    if path.is_file() and is_lfs_pointer(path):
        return UserError(
            f"{file} is a Git LFS pointer in place of the file itself: fetch the file with `git lfs pull`, or the "
            "model with `torchtitan download`"
        )
    return UserError(message)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether the file holds the few lines that Git leaves in place of a large one."""
    with open(path, "rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
