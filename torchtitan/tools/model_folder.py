"""What to say of a model's folder that is not there."""

import re
from pathlib import Path

from torchtitan.tools.errors import UserError

DOWNLOADS = Path("assets/hf")
"""Where `torchtitan download` puts models, each into a folder of its name."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_META = re.compile(r"(Meta-)?Llama-\d")
"""Begin of the names of the models that Meta has published on the hub."""


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
