"""`ConfigManager`: resolve the command line to one configuration."""

import argparse
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any, get_args, get_origin

import tyro
import yaml
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from torchtitan.config.code import NamesCode, untrusted_in
from torchtitan.config.configurable import (
    Configurable,
    describe,
    fits,
    holds_list,
    is_plain,
    leaves,
    suggest_choice,
    whole_number,
)
from torchtitan.config.option_table import (
    KnownConfiguration,
    check_sections,
    known_configuration,
)
from torchtitan.config.other_names import OTHER_NAMES
from torchtitan.config.registry import (
    ASSETS_PARAMETER,
    import_failure,
    is_trusted,
    is_written_for_folder,
    load_config_function,
    needs_assets,
    optional_parameters,
)
from torchtitan.config.values import (
    by_name,
    is_hidden,
    option_names,
    types_by_key,
    with_values,
)
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser
from torchtitan.tools.redact import redacted
from torchtitan.tools.user_code import exits_as_errors

DEFAULT_SELECTION = {"module": "llama3", "config": "debugmodel"}
"""Default module and configuration."""

_FILES = (".yaml", ".yml", ".toml", ".json")
"""Endings of configuration files."""

_WITHOUT_DASHES = re.compile(r"\+{0,2}([A-Za-z][\w.-]*)=(.*)", re.DOTALL)
"""An option as Hydra and torchtune write it, with its name and value."""

_BOOLEANS = {"true": True, "false": False}


EarlyCheck = Callable[[KnownConfiguration, Mapping[str, object]], None]
"""Raises `UserError` for options whose values are wrong on this host, without importing torch. The
second argument has the values that are set by key."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and the names that selected it."""

    module: str
    config_name: str
    config: Any  # a Trainer.Config, unknown to this layer

    def save(self, path: Path) -> None:
        """Write the configuration as YAML for `--config_file`. Raise `OSError` if it cannot be
        written."""
        document = {"module": self.module, "config": self.config_name, **self.config.to_dict()}
        durable.write(path, yaml.safe_dump(redacted(document), sort_keys=False))


class ConfigManager:
    """Resolve a configuration: the configuration function, then `--config_file`, then the command
    line."""

    def __init__(
        self,
        prog: str = "torchtitan train",
        others: Sequence[str] = (),
        early_checks: Sequence[EarlyCheck] = (),
    ):
        self.prog = prog
        self._early_checks = early_checks
        self._others = others
        """Names of options that the command parses itself, to suggest one for an unknown option."""

    def parse_args(self, args: Sequence[str]) -> ResolvedConfig:
        """Resolve `args`, the words after the command's name.

        Raises:
            UserError: for an unknown module, configuration or option, a value of the wrong type, or
                an unusable configuration file.
            SystemExit: after `--help`.
        """
        selected, overrides = self._selected(args)
        if overrides and overrides[0].endswith(_FILES) and not overrides[0].startswith("-"):
            raise self._unknown(overrides[:1], ())  # before torch is imported
        file = selected.config_file
        document = read_config_file(Path(file), f"--config_file {file}") if file else {}
        in_file = {name: document.pop(name, None) for name in DEFAULT_SELECTION}
        _check_values(in_file, dict.fromkeys(DEFAULT_SELECTION, str | None), selected.config_file)
        _let_steps_decide(document, overrides)
        module, config_name = (
            str(getattr(selected, name) or in_file[name] or default)
            for name, default in DEFAULT_SELECTION.items()
        )
        if not selected.module and in_file["module"] and not is_trusted(module):
            raise _untrusted_in_file(
                {"module": {module: NamesCode.problem}}, ["--module", module], selected.config_file
            )
        if known_config := known_configuration(module, config_name):
            self._check_early(known_config, overrides, document, selected.config_file)
        elif is_written_for_folder(module, config_name):
            self._assets_path(config_name, overrides, document)
        function = load_config_function(module, config_name)
        arguments = self._optional_arguments(function, overrides, document)
        if needs_assets(function):
            arguments[ASSETS_PARAMETER] = self._assets_path(config_name, overrides, document)
        try:
            with exits_as_errors(f"the configuration {config_name} of module {module}"):
                default: object = function(**arguments)
        except ImportError as error:
            raise import_failure(module, error) from error
        if not isinstance(default, Configurable.Config):
            raise UserError(
                f"configuration '{config_name}' of module '{module}' returned {default!r}, not a "
                "Trainer.Config"
            )
        default = (
            default.registered(registered_name(function))
            if hasattr(default, "registered")
            else default
        )
        own = default.to_dict()
        known = leaves(own)
        types = types_by_key(default, type(default))
        if document:
            _check_keys(document, list(known), selected.config_file)
            _check_values(document, types, selected.config_file)
            _check_hidden(document, own, types, selected.config_file)
        words = _to_switches(
            overrides, {_spelled(key) for key, value in known.items() if isinstance(value, bool)}
        )
        with _refusals_named():
            with_file = with_values(default, type(default), leaves(document))
        options = option_names(known, types)
        config = self._parse(with_file, words, options)
        if document and _strange_in(config, [default]):
            without_file = self._parse(default, words, options)
            _check_trust(config, [default, without_file], selected.config_file)
        return ResolvedConfig(module, config_name, config)

    def parse_components(self, args: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        """Resolve components or options at the top of a configuration, by name, as `parse_args`
        does. Components of built-in configurations are built from the table of options, which
        imports only their modules, unless a file is given, whose values may need trust."""
        selected, overrides = self._selected(args)
        module, config_name = (
            getattr(selected, name) or default for name, default in DEFAULT_SELECTION.items()
        )
        known = None if selected.config_file else known_configuration(module, config_name)
        if known is None or not known.is_current or not known.has(names):
            config = self.parse_args(args).config
            return {name: getattr(config, name) for name in names}
        given = self._check_early(known, overrides, {}, "")
        return {name: known.component(name, given) for name in names}

    def _selected(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options that select a configuration, and the other words."""
        selectors = Parser(prog=self.prog, add_help=False, allow_abbrev=False)
        for name in (*DEFAULT_SELECTION, "config_file"):
            selectors.add_argument(f"--{name}")
        return selectors.parse_known_args(args)

    def _check_early(
        self, known: KnownConfiguration, args: list[str], document: Mapping[str, object], path: str
    ) -> dict[str, object]:
        """Report a mistake, or print the help, without importing torch, if the table of options is
        up to date. Return the values that are set by key."""
        types, options = known.types, known.options
        given: dict[str, object] = {}
        try:
            _check_keys(document, list(types), path)
            _check_values(document, types, path)
            words = _to_switches(args, {key for key in options if types[key] is bool})
            of_options = {key: types[key] for key in options}
            _check_words(words, of_options)
            if {"-h", "--help"} & set(words) and known.is_current:
                default = known.stand_in()
                with_file = with_values(default, type(default), leaves(document))
                self._parse(with_file, words, options)
            if unknown := _unknown_words(words, of_options):
                raise self._unknown(unknown, options)
            given = {**leaves(document), **_values_in(words, of_options)}
            for check in (check_sections, *self._early_checks):
                check(known, given)
        except UserError:
            if known.is_current:
                raise
        return given

    def _assets_path(
        self, config_name: str, overrides: list[str], document: Mapping[str, object]
    ) -> str:
        option = Parser(prog=self.prog, add_help=False, allow_abbrev=False)
        option.add_argument(
            f"--{ASSETS_PARAMETER}", f"--{ASSETS_PARAMETER.replace('_', '-')}", dest="path"
        )
        path = option.parse_known_args(overrides)[0].path
        path = document.get(ASSETS_PARAMETER) if path is None else path
        if path:
            return str(path)
        if {"-h", "--help"} & set(overrides):
            print(
                f"the options of '{config_name}' depend on a folder; use --{ASSETS_PARAMETER} DIR "
                "--help"
            )
            raise SystemExit(0)
        # An option of another library may be meant to name the folder.
        others = [word for word in overrides if _key_of(word.partition("=")[0]) in OTHER_NAMES]
        if others := [word for word in others if word.startswith("--")]:
            raise self._unknown(others, ())
        raise UserError(f"configuration '{config_name}' needs --{ASSETS_PARAMETER}")

    def _optional_arguments(
        self, function: Callable[..., object], overrides: list[str], document: Mapping[str, object]
    ) -> dict[str, Any]:
        """Return the arguments that the options of a configuration function's parameters give.
        Raise `UserError` for a value of another type."""
        options = Parser(prog=self.prog, add_help=False, allow_abbrev=False)
        types = optional_parameters(function)
        booleans = {name for name, kind in types.items() if kind is bool}
        for name in types.keys() - booleans:
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            options.add_argument(*spellings, dest=name)
        given: dict[str, object] = vars(options.parse_known_args(overrides)[0])
        given |= _switched(_to_switches(overrides, booleans), types)
        arguments: dict[str, object] = {}
        for name, kind in types.items():
            value = given.get(name)
            value = document.get(name) if value is None else value
            if value is None:
                continue
            if not fits(value, kind):
                raise UserError(f"--{name} is {value!r}, but must be {_described(kind)}")
            arguments[name] = whole_number(str(value)) if kind is int else kind(value)
        return arguments

    def _parse(self, default: object, args: Sequence[str], known: Collection[str]) -> Any:
        """Return a configuration with the values on the command line, or print the help."""
        types = types_by_key(default, type(default))
        keys = {_spelled(key): key for key in known if key in types}
        options = {spelled: types[key] for spelled, key in keys.items()}
        _check_words(args, options)
        given = _values_in(args, options)
        is_help = bool({"-h", "--help"} & set(args))
        if is_help or not all(is_plain(options[spelled]) for spelled in given):
            return self._parse_by_tyro(default, args, known)
        if unknown := _unknown_words(args, options):
            raise self._unknown(unknown, known)
        values = {keys[spelled]: value for spelled, value in given.items()}
        with _refusals_named():
            return with_values(default, type(default), values)

    def _parse_by_tyro(self, default: object, args: Sequence[str], known: Collection[str]) -> Any:
        """As `_parse`, slower, also for values that files cannot express."""
        registry, printed = ConstructorRegistry(), io.StringIO()
        registry.struct_rule(_named_configs_rule)
        registry.primitive_rule(_whole_numbers_rule)
        try:
            with registry, contextlib.redirect_stderr(printed), _refusals_named():
                config, unknown = tyro.cli(
                    type(default),
                    default=default,
                    args=args,
                    prog=self.prog,
                    description=_DESCRIPTION,
                    use_underscores=True,
                    config=(tyro.conf.SuppressFixed,),
                    return_unknown_args=True,
                )
        except SystemExit:
            print(presentable(printed.getvalue()), end="", file=sys.stderr)
            raise
        if unknown:
            raise self._unknown(unknown, known)
        return config

    def _unknown(self, words: Sequence[str], known: Collection[str]) -> UserError:
        """Return the error for words of the command line that set no option."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option and re.fullmatch(r"-[A-Za-z][\w.-]+", option):  # one dash too few
            return self._unknown([f"-{option}"], known)
        if option is None and (bare := _WITHOUT_DASHES.fullmatch(words[0])):
            key = _key_of(f"--{bare[1]}")
            if key not in map(_spelled, known):
                return self._unknown([f"--{bare[0].lstrip('+')}"], known)
            return UserError(f"'{words[0]}' belongs to no option; write --{key}={bare[2]}")
        if option is None and words[0].endswith(_FILES):
            # A configuration file of this library, or of another one.
            return UserError(
                f"'{words[0]}' belongs to no option; use --config_file {words[0]}, or for a file "
                f"of another library torchtitan migrate {words[0]}"
            )
        if option is None:
            return UserError(f"'{words[0]}' belongs to no option; see {self.prog} --help")
        key = _key_of(option)
        options = [f"--{name}" for name in (*known, *self._others)]
        if key in known:
            return UserError(f"an option begins with two dashes: write --{key}")
        if key in OTHER_NAMES:
            return UserError(f"unknown option {option}; use {OTHER_NAMES[key]}")
        section, _, last = key.rpartition(".")
        # An option of a section that is here would do something else in another section.
        is_section = any(name.startswith(f"--{section}.") for name in options)
        for ending in (key,) if is_section else dict.fromkeys((key, last)):
            if in_sections := [name for name in options if name.endswith(f".{ending}")][:3]:
                found = " or ".join(in_sections)
                return UserError(f"unknown option {option}; did you mean {found}?")
        if last in OTHER_NAMES:
            return UserError(f"unknown option {option}; use {OTHER_NAMES[last]}")
        selectors = ("--module", "--config", "--config_file", f"--{ASSETS_PARAMETER}")
        hint = suggest(option, [*options, *selectors], cutoff=0.7) or f"; see {self.prog} --help"
        return UserError(f"unknown option {option}{hint}")


_DESCRIPTION = """\
Train a model: --module M --config C [--config_file run.yaml] [--section.key value ...].
Later sources win: the configuration function, then the file, then the command line.
`torchtitan ls` lists modules and configurations; the values shown belong to the selected one."""


def _named_configs_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Let components' names set a list of their configurations: `--model_converters.lora.rank
    16`."""
    arguments = get_args(info.type)
    is_config_list = get_origin(info.type) is list and arguments and isinstance(arguments[0], type)
    if not (is_config_list and issubclass(arguments[0], Configurable.Config)):
        return None
    configs = by_name(info.default) if isinstance(info.default, (list, tuple)) else {}

    return StructConstructorSpec(
        instantiate=lambda **values: [values[name] for name in configs],
        fields=tuple(
            StructFieldSpec(name=name, type=type(config), default=config)
            for name, config in configs.items()
        ),
    )


def _whole_numbers_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Let whole numbers also be written like 1e3."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        1,
        "INT",
        lambda words: whole_number(words[0]),
        lambda value: isinstance(value, int),
        lambda n: [str(n)],
    )


@contextlib.contextmanager
def _refusals_named() -> Iterator[None]:
    """Raise `UserError` if a configuration refuses its values with a `ValueError`. tyro ends the
    process instead, so the error is in the context of a `SystemExit`."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, SystemExit) as raised:
        error: BaseException | None = raised
        while error and not isinstance(error, ValueError):
            error = error.__context__
        if error is None:
            raise
        raise UserError(
            f"a configuration refuses its values: {error} ({type(error).__name__})"
        ) from error


def _given_in(words: Sequence[str], types: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the words that are values of options other than switches; of an option that is
    repeated, the last ones."""
    values: dict[str, list[str]] = {}
    for place, word in enumerate(words):
        key = _key_of(word)
        assigned = "=" in word
        value = word.partition("=")[2]
        if key in types and types[key] is not bool:
            rest = takewhile(lambda other: not _is_option(other), words[place + 1 :])
            values[key] = [value] if assigned else list(rest)
    return values


def _values_in(words: Sequence[str], types: Mapping[str, object]) -> dict[str, object]:
    """Return the values of options on the command line, with booleans as switches; they fit their
    types."""
    values: dict[str, object] = {}
    for key, given in _given_in(words, types).items():
        if given == ["None"] and fits(None, types[key]):
            values[key] = None
        else:
            values[key] = given if holds_list(types[key]) else given[0]
    return values | _switched(words, types)


def _switched(words: Sequence[str], types: Mapping[str, object]) -> dict[str, bool]:
    """Return the booleans that the switches on the command line set, by key."""
    switches = _switches(types)
    return dict(switches[key] for key in map(_key_of, words) if key in switches)


def _check_words(words: Sequence[str], types: Mapping[str, object]) -> None:
    """Check the values on the command line, with the messages of a file, before tyro parses them.
    Raise `UserError` for the first wrong one."""
    for key, given in _given_in(words, types).items():
        declared = types[key]
        is_list = holds_list(declared)
        if not given and not is_list:
            raise UserError(f"--{key} has no value; it must be {_described(declared)}")
        tried: object = given if is_list and given != ["None"] else given[0]
        if not fits(tried, declared):
            meant = suggest_choice(tried, declared)
            raise UserError(
                f"--{key} is {' '.join(given)!r}, but must be {_described(declared)}{meant}"
            )


def _unknown_words(words: Sequence[str], types: Mapping[str, object]) -> list[str]:
    """Return the words of the command line, with booleans as switches, that set no option."""
    switches = _switches(types)
    unknown = []
    n_values = 0.0  # further values that the last option takes
    for word in words:
        key = _key_of(word)
        if not _is_option(word):
            n_values -= 1
        elif key not in types and key not in switches:
            n_values = -inf
        elif key in switches or "=" in word:
            n_values = 0
        else:
            n_values = inf if holds_list(types[key]) else 1
        if n_values < 0:
            unknown.append(word)
    return unknown


def _switches(types: Mapping[str, object]) -> dict[str, tuple[str, bool]]:
    """Return the option and the value that each switch sets, by the switch's key."""
    return {
        _key_of(_switch(key, value)): (key, value)
        for key, declared in types.items()
        if declared is bool
        for value in (True, False)
    }


def _is_option(word: str) -> bool:
    """Return whether a word cannot be a value: it begins an option, or seems to."""
    is_short = re.fullmatch(r"-[A-Za-z]\S*|--", word) and not fits(word, float)
    return bool(_key_of(word) or is_short)


def _spelled(key: str) -> str:
    """Return a key as `_key_of` does, whatever the names of a mapping in it contain."""
    return key.replace("-", "_")


def _described(declared: object) -> str:
    return describe(declared).replace("null", "None")


def _key_of(word: str) -> str:
    """Return the key that a word of the command line sets if there is such an option; "" for other
    words, such as a row of dashes."""
    if not re.match("--[A-Za-z]", word):
        return ""
    return _spelled(word.partition("=")[0][2:])


def registered_name(function: Callable[..., object]) -> str:
    """Return the registered name, package.function: only the last part of the import path, since
    the rest varies."""
    package = function.__module__.removesuffix(".config_registry").rpartition(".")[2]
    return f"{package}.{function.__name__}"


def _check_keys(document: Mapping[str, object], known: Sequence[str], path: str) -> None:
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


def _let_steps_decide(document: dict[str, Any], words: Sequence[str]) -> None:
    """Remove the epochs of a file, which would set the length of the run, if the command line has
    steps and no epochs."""
    keys = {_key_of(word) for word in words}
    if "training.steps" in keys and "training.epochs" not in keys:
        document.pop("training.epochs", None)
        if isinstance(training := document.get("training"), dict):
            training.pop("epochs", None)


def _migrated(path: str) -> str:
    return f"torchtitan migrate {path} --out config.yaml"


def _check_values(document: Mapping[str, object], types: Mapping[str, object], path: str) -> None:
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


def _check_hidden(
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


def _untrusted_of(config: Configurable.Config) -> dict[str, dict[str, str]]:
    """Return the texts in the options of a configuration that need trust, with the reason, by
    key."""
    values = leaves(config.to_dict())
    types = types_by_key(config, type(config))
    found = {key: untrusted_in(values.get(key), declared) for key, declared in types.items()}
    return {key: texts for key, texts in found.items() if texts}


def _strange_in(
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


def _check_trust(
    config: Configurable.Config, trusted: Sequence[Configurable.Config], path: str
) -> None:
    """Require that a trusted configuration has the same value for each option that needs trust:
    the configuration function, or the command line without the file."""
    if strange := _strange_in(config, trusted):
        values = leaves(config.to_dict())
        words = [word for key in strange for word in (f"--{key}", *_words_of(values[key]))]
        raise _untrusted_in_file(strange, words, path)


def _words_of(value: object) -> list[str]:
    """Return the words of the command line for the value of an option."""
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _untrusted_in_file(
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


def _to_switches(args: Sequence[str], switches: Collection[str]) -> list[str]:
    """Rewrite booleans in tyro's form: `--checkpoint.enable=true` (or ` true`) becomes
    `--checkpoint.enable`, and `=false` becomes `--checkpoint.no_enable`. Raise `UserError` for
    another value after `=`."""
    words: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        option, assigned, value = word.partition("=")
        if (key := _key_of(word)) not in switches:
            if "." in key and (positive := key.removeprefix("no_")) in switches:
                raise UserError(
                    f"unknown option {option}; did you mean '{_switch(positive, False)}'?"
                )
            words.append(word)
            continue
        if not assigned:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
        if value.lower() not in _BOOLEANS:
            raise UserError(f"{option} is '{value}', but must be true or false")
        words.append(_switch(key, _BOOLEANS[value.lower()]))
    return words


def _switch(key: str, value: bool) -> str:
    section, dot, name = key.rpartition(".")
    return f"--{key}" if value else f"--{section}{dot}no_{name}"
