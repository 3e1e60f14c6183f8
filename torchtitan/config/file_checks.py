"""Checks of a configuration file: its keys, its values, and what needs trust."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.config.code import untrusted_in
from torchtitan.config.command_line import key_of
from torchtitan.config.configurable import Configurable, describe, fits, leaves, suggest_choice
from torchtitan.config.other_names import OTHER_NAMES
from torchtitan.config.values import is_hidden, types_by_key
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.redact import redacted


def check_keys(document: Mapping[str, object], known: Sequence[str], path: str) -> None:
    sections = {
        ".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)
    }
    for key in leaves(document):
        if key in sections:
            raise UserError(f"'{key}' in {path} is a section; set keys in it")
        if key not in known:
            last = key.rpartition(".")[2]
            if last == "_component_":  # torchtune's and NeMo Automodel's mark of a class
                raise UserError(f"{path} is a recipe of another library; {_migrated(path)}")
            if key in OTHER_NAMES:
                raise UserError(
                    f"unknown key '{key}' in {path}; use {OTHER_NAMES[key]}. For a whole file of "
                    f"another library: {_migrated(path)}"
                )
            raise UserError(f"unknown key '{key}' in {path}{suggest(key, known)}")


def check_values(document: Mapping[str, object], types: Mapping[str, object], path: str) -> None:
    for key, value in leaves(document).items():
        if not fits(value, types[key]):
            meant = suggest_choice(value, types[key])
            raise UserError(
                f"'{key}' in {path} is {value!r}, but must be {describe(types[key])}{meant}"
            )
        # A file may only say what the command line can, which would take this item for an option.
        for item in value if isinstance(value, list) else []:
            if isinstance(item, str) and item.startswith("-") and not fits(item, float):
                raise UserError(
                    f"'{key}' in {path} has the item {item!r}; items must not begin with '-'"
                )


def check_hidden(
    document: Mapping[str, object],
    own: Mapping[str, object],
    types: Mapping[str, object],
    path: str,
) -> None:
    """Require that a file repeats the `own` values of fields that are not options, as a saved
    configuration does."""
    own_values = leaves(redacted(own))
    for key, value in leaves(redacted(document)).items():
        if is_hidden(types[key]) and value != own_values[key]:
            raise UserError(
                f"'{key}' in {path} is {value!r}, but no option, and the configuration has "
                f"{own_values[key]!r}; remove it from the file"
            )


def let_steps_decide(document: dict[str, Any], words: Sequence[str]) -> None:
    """Remove the epochs of a file, which would set the length of the run, if the command line has
    steps and no epochs."""
    keys = {key_of(word) for word in words}
    if "training.steps" in keys and "training.epochs" not in keys:
        document.pop("training.epochs", None)
        if isinstance(training := document.get("training"), dict):
            training.pop("epochs", None)


def check_trust(
    config: Configurable.Config, trusted: Sequence[Configurable.Config], path: str
) -> None:
    """Require that a trusted configuration has the same value for each option that needs trust:
    the configuration function, or the command line without the file."""
    if strange := strange_in(config, trusted):
        values = leaves(config.to_dict())
        words = [word for key in strange for word in (f"--{key}", *_words_of(values[key]))]
        raise untrusted_in_file(strange, words, path)


def strange_in(
    config: Configurable.Config, trusted: Sequence[Configurable.Config]
) -> dict[str, dict[str, str]]:
    """Return the values of a configuration that need trust and are in none of the trusted ones,
    with the reason, by key."""
    known = [_untrusted_of(each) for each in trusted]
    strange = {
        key: {
            text: reason
            for text, reason in texts.items()
            if not any(text in of.get(key, ()) for of in known)
        }
        for key, texts in _untrusted_of(config).items()
    }
    return {key: texts for key, texts in strange.items() if texts}


def untrusted_in_file(
    found: Mapping[str, Mapping[str, str]], words: Sequence[str], path: str
) -> UserError:
    """Return the error for a configuration file with values that need trust; `words` set the same
    on the command line."""
    parts = [
        f"'{key}' in {path} is '{text}', {reason}"
        for key, texts in found.items()
        for text, reason in texts.items()
    ]
    return UserError(
        f"{'; '.join(parts)}; if you trust it, set it on the command line too: {shlex.join(words)}"
    )


def _migrated(path: str) -> str:
    return f"torchtitan migrate {path} --out config.yaml"


def _untrusted_of(config: Configurable.Config) -> dict[str, dict[str, str]]:
    """Return the texts in the options of a configuration that need trust, with the reason, by
    key."""
    values = leaves(config.to_dict())
    types = types_by_key(config, type(config))
    found = {key: untrusted_in(values.get(key), declared) for key, declared in types.items()}
    return {key: texts for key, texts in found.items() if texts}


def _words_of(value: object) -> list[str]:
    """Return the words of the command line for the value of an option."""
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
