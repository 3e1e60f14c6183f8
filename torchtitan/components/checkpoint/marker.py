"""The marker of a checkpoint, `complete.json`: the file that makes it complete, and says what it is."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from torchtitan.components.checkpoint.store import Folder

Kind = Literal["full", "model_only", "huggingface"]
"""What a checkpoint holds: all that a run goes on from, the models' weights alone, or a model in Hugging Face files."""

MARKER = "complete.json"
_FORMAT_VERSION = 2
_OPTIONAL = ("frozen_from", "frozen_digest", "identity", "length")
"""Fields that are left out where they are empty."""

_KINDS_IN_WORDS = {"full": "everything", "model_only": "the model only", "huggingface": "a Hugging Face model only"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marker:
    """The content of the file that makes a checkpoint complete."""

    step: int
    """The training step after which it was saved."""

    kind: Kind
    """What it holds."""

    world_size: int
    """How many processes saved it."""

    validation_loss: float | None = None
    """The validation loss at that step, where it was measured."""

    frozen_from: str = ""
    """It lacks the weights that are not trained, and this is what those began as; empty: it has all weights."""

    frozen_digest: str = ""
    """What tells the weights that it lacks from others (`Origin.digest`)."""

    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The properties of the run that saved it (`RunIdentity`); empty if that has none."""

    length: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The `steps` or `epochs` that run was to make."""

    manifest: str = ""
    """The digest of manifest.json; `commit` fills it in."""

    torch_version: str = torch.__version__
    """The version of torch that wrote it."""

    format_version: int = _FORMAT_VERSION
    """The version of the layout of folder and entries."""


_MARKER_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "kind": (str,),
    "world_size": (int,),
    "validation_loss": (float, type(None)),
    "frozen_from": (str,),
    "frozen_digest": (str,),
    "identity": (dict,),
    "length": (dict,),
    "manifest": (str,),
    "torch_version": (str,),
    "format_version": (int,),
}


class MarkerError(Exception):
    """The marker of a checkpoint cannot be used; the message says which and why."""


class UnreadMarkerError(MarkerError):
    """It could not be read, and may be whole."""


def in_words(kind: Kind) -> str:
    """What a checkpoint of this kind holds."""
    return _KINDS_IN_WORDS[kind]


def read_marker(folder: Folder) -> Marker | None:
    """The marker in `folder`, None where there is none.

    Raises:
        MarkerError: for one that cannot be used.
    """
    file = f"{folder}/{MARKER}"
    try:
        if not folder.has_file(MARKER):
            return None
        text = folder.read(MARKER)
    except OSError as error:
        raise UnreadMarkerError(f"{file} could not be read ({error})") from error
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MarkerError(f"{file} is damaged ({error})") from error
    version = content.get("format_version", _FORMAT_VERSION) if isinstance(content, dict) else _FORMAT_VERSION
    if version != _FORMAT_VERSION:
        raise MarkerError(
            f"{folder} is in layout {version}, and this version of torchtitan reads layout {_FORMAT_VERSION}; "
            "it can be loaded by the version that wrote it"
        )
    marker = _marker_from(content)
    if marker is None or marker_content(marker) != text:
        raise MarkerError(f"{file} is damaged (its content is not that of a marker)")
    return marker


def marker_content(marker: Marker) -> bytes:
    """The marker's file: its fields, and a digest of them, since no manifest says what they were."""
    fields = {name: value for name, value in dataclasses.asdict(marker).items() if value or name not in _OPTIONAL}
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps({**fields, "digest": digest}).encode()


def _marker_from(content: Any) -> Marker | None:
    fields = {name: value for name, value in content.items() if name != "digest"} if isinstance(content, dict) else {}
    types_fit = fields.keys() | set(_OPTIONAL) == _MARKER_TYPES.keys() and all(
        type(value) in _MARKER_TYPES[name] for name, value in fields.items()
    )
    return Marker(**fields) if types_fit and fields["kind"] in get_args(Kind) else None
