"""`Migration`: what becomes of each value of another library's file."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchtitan.config.other_names import OTHER_NAMES
from torchtitan.config.values import nested
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import DOWNLOADS

Outcome = Literal["taken over", "changed", "without a counterpart", "not needed"]

OUTCOMES: tuple[Outcome, ...] = ("taken over", "changed", "without a counterpart", "not needed")
"""Outcomes in the order of the table."""


class Row(NamedTuple):
    """A value of the file, and what became of it."""

    key: str
    value: str
    outcome: Outcome
    note: str
    """Our options with their values, and the reason of a change."""


IMAGES = "_images"
"""End of the names of configurations for models that read images."""

_SAME = object()
_HUB_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
_SPLIT = re.compile(r"[\w.-]+")
_MOST_DIGITS = 100
_PATH_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".md", ".gz", ".zst", ".arrow")


class Migration:
    """The values of a file and the configuration that they become. Each value is read once.

    Args:
        given: dotted key → value, as the file has it; values of None count as absent.
        defaults: values that the other library uses for absent keys.
        devices: number of processes that the other library ran with.
        command: words before the arguments of a command line, in lower case.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, object] | None = None,
        devices: int = 1,
        command: str = "",
    ):
        self.given = {key: value for key, value in given.items() if value is not None}
        self._values = {**(defaults or {}), **self.given}
        self.devices = devices
        self.command = command
        self.module, self.config = "auto", "sft"
        self.reads_images = False
        self.options: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.commands: list[str] = []
        """Commands to run before the configuration can be used."""

    @property
    def has_adapters(self) -> bool:
        """True if the chosen configuration trains adapters."""
        return "lora" in self.config_name

    @property
    def config_name(self) -> str:
        """Name of the chosen configuration, for images if the model reads them."""
        return f"{self.config}{IMAGES}" if self.reads_images else self.config

    def get(self, key: str, default: object = None) -> Any:
        """Return a value, and leave it to be read."""
        return self._values.get(key, default)

    def rename(self, key: str, name: str) -> None:
        """Read a key by another of its names, which its row has too."""
        self._values[name] = self._values.pop(key)
        if key in self.given:
            self.given[name] = self.given.pop(key)

    def gather(self, key: str) -> None:
        """Make the keys below `key`, if there are some, one mapping, with one row."""
        prefix = f"{key}."
        if parts := [name for name in self._values if name.startswith(prefix)]:
            values = {name.removeprefix(prefix): self._values.pop(name) for name in parts}
            self.given = {name: value for name, value in self.given.items() if name not in parts}
            self._values[key] = self.given[key] = nested(values)

    def default(self, key: str, value: object) -> None:
        """Fill in the value that the other library uses for an absent key."""
        self._values.setdefault(key, value)

    def keys(self) -> list[str]:
        """Return the keys that have not been read."""
        return list(self._values)

    def set(self, **options: object) -> None:
        """Set our options, named with `__` for dots."""
        self.options |= {name.replace("__", "."): value for name, value in options.items()}

    def take(self, key: str, option: str, value: object = _SAME, why: str = "") -> None:
        """Set an option to the value of a key, or to another one, for a reason."""
        theirs = self._values.get(key)
        ours = theirs if value is _SAME else value
        self.options[option] = ours
        self._note(key, "changed" if why else "taken over", f"{option}: {_shown(ours)}", why)

    def change(self, key: str, why: str, **options: object) -> None:
        """Note what a key became, which `options` say."""
        self.set(**options)
        named = ", ".join(
            f"{name.replace('__', '.')}: {_shown(value)}" for name, value in options.items()
        )
        self._note(key, "changed", named, why)

    def drop(self, key: str, why: str) -> None:
        """Note a key that needs nothing here."""
        self._note(key, "not needed", "", why)

    def miss(self, key: str, why: str) -> None:
        """Note a key that nothing here does."""
        self._note(key, "without a counterpart", "", why)

    def apply(self, rules: "Mapping[str, Rule]") -> None:
        """Read the keys that have a rule."""
        for key in self.keys():
            if key in rules:
                rules[key](self, key)

    def finish(self) -> None:
        """Read the keys that are left: by the table of other names, or as unknown."""
        for key in self.keys():
            value = self._values[key]
            if value in ("", [], {}) and key not in OTHER_NAMES:
                self.drop(key, "it is empty")
            elif option := option_of(key, self.module):
                self.take(key, option)
            elif key in self.given:
                answer = OTHER_NAMES.get(key) or OTHER_NAMES.get(key.removeprefix("trl."))
                self.miss(key, _remedy(answer) if answer else "no option does this")
        self.rows.sort(key=lambda row: OUTCOMES.index(row.outcome))

    def use_model(self, key: str, revision: str = "") -> None:
        """Train the model of a folder, or the one with this name on the hub, which is downloaded
        first."""
        if self._values.get(key) is None:
            raise UserError(f"no model is named; add {key}, a folder or a name on the hub")
        path = str(self._values[key])
        if _HUB_NAME.fullmatch(path) and not Path(path).exists():
            folder = str(DOWNLOADS / path.rpartition("/")[2])
            suffix = f" --revision {revision}" if revision else ""
            self.commands.append(f"torchtitan download {path}{suffix}")
            self.take(key, "hf_assets_path", folder, f"`torchtitan download {path}` fills it")
        else:
            self.take(key, "hf_assets_path", path)

    def dataset(
        self, path: str, config: object = None, revision: object = None, split: object = None
    ) -> str:
        """Return the dataset string of a repository on the hub, `org/name:config@revision[split]`,
        or of a local path. List a split that such a string cannot name."""
        if is_local(path):
            if split not in (None, "", "train"):
                self._miss_split(path, split, "a file has no splits; write these rows to a file")
            return path
        if split and not _SPLIT.fullmatch(str(split)):
            self._miss_split(path, split, "the split is read in full; write these rows to a file")
            split = re.split(r"[^\w.-]", str(split))[0]
        if "/" not in path:
            why = f"write its owner, as in owner/{path}"
            self.list_row(Row(f"name of {path}", path, "without a counterpart", why))
        parts = [path, f":{config}" if config else "", f"@{revision}" if revision else ""]
        return "".join(parts) + (f"[{split}]" if split and split != "train" else "")

    def document(self) -> dict[str, Any]:
        """Return the configuration file."""
        selection = {"module": self.module, "config": self.config_name}
        return {**selection, **nested(self.options)}

    def _miss_split(self, path: str, split: object, why: str) -> None:
        self.list_row(Row(f"split {split} of {path}", _shown(split), "without a counterpart", why))

    def list_row(self, row: Row) -> None:
        """List a row, once, of more than a key."""
        if row not in self.rows:
            self.rows.append(row)

    def _note(self, key: str, outcome: Outcome, named: str, why: str) -> None:
        label = key if key in self.given else f"{key} (default)"
        value = _shown(self._values.pop(key, None))
        self.rows.append(Row(label, value, outcome, "; ".join(filter(None, (named, why)))))


Rule = Callable[[Migration, str], None]
"""Reads one key."""


def to(option: str, convert: Callable[[Any], Any] | None = None) -> Rule:
    """Return the rule that sets an option to the value, converted to our form."""

    def rule(migration: Migration, key: str) -> None:
        value = migration.get(key)
        migration.take(key, option, convert(value) if convert else value)

    return rule


def unneeded(why: str) -> Rule:
    """Return the rule for a key that needs nothing."""
    return lambda migration, key: migration.drop(key, why)


def missing(why: str) -> Rule:
    """Return the rule for a key that nothing here does, unless it is off."""

    def rule(migration: Migration, key: str) -> None:
        if migration.get(key) in (False, 0, "", "none", "no", "None", [], {}):
            migration.drop(key, "it is off")
        else:
            migration.miss(key, why)

    return rule


def option_of(key: str, module: str) -> str:
    """Return our option for a key whose value stays the same, "" for others and for options of
    other modules."""
    match = re.fullmatch(
        r"--([\w.]+)(?: of (?:--module (\w+)|(?!--module).*))?", OTHER_NAMES.get(key, "")
    )
    return match[1] if match and match[2] in (None, module) else ""


def is_local(path: str) -> bool:
    """Return whether a dataset is a file or folder: it exists, or has such a name."""
    is_path = path.startswith(("/", "./", "../", "~")) or path.endswith(_PATH_ENDINGS)
    return is_path or Path(path).exists()


def as_list(value: object) -> list[Any]:
    """Return a list of the items of a list, of a text with commas, or of one value."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def flat(document: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return dotted key → value; texts that spell numbers or booleans become them, as in the other
    libraries. Raise `UserError` for a number of more than 100 digits."""
    found: dict[str, object] = {}
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        else:
            _check_size(key, value)
            found[key] = plain(value)
    return found


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_size(key, item)
    spelled = isinstance(value, str) and len(value) > _MOST_DIGITS
    spelled = spelled and re.fullmatch(r"\s*[+-]?[\d_]+\s*", value) is not None
    if spelled or (isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS):
        raise UserError(f"{key} has a number of more than {_MOST_DIGITS} digits")


_WORDS = {"true": True, "false": False, "null": None, "none": None, "": None}


def plain(value: object) -> Any:
    """Return the number or boolean that a text spells; other values stay the same."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"[+-]?\d[\d_]*", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return value


def _remedy(answer: str) -> str:
    """Return the answer to an unknown option as a row's note."""
    nothing = "nothing: "
    return answer.removeprefix(nothing) if answer.startswith(nothing) else f"use {answer}"


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
