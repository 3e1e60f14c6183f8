"""`ConfigManager`: resolve the command line to one configuration."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchtitan.config.code import NamesCode
from torchtitan.config.command_line import (
    check_words,
    described,
    key_of,
    spelled,
    switched,
    to_switches,
    unknown_words,
    values_in,
)
from torchtitan.config.configurable import (
    Configurable,
    fits,
    is_plain,
    leaves,
    whole_number,
)
from torchtitan.config.file_checks import (
    check_hidden,
    check_keys,
    check_trust,
    check_values,
    let_steps_decide,
    strange_in,
    untrusted_in_file,
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
from torchtitan.config.tyro_options import parse_by_tyro
from torchtitan.config.values import option_names, refusals_named, types_by_key, with_values
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError, suggest
from torchtitan.tools.parser import Parser
from torchtitan.tools.redact import redacted
from torchtitan.tools.user_code import exits_as_errors

DEFAULT_SELECTION = {"module": "llama3", "config": "debugmodel"}
"""Default module and configuration."""

_FILES = (".yaml", ".yml", ".toml", ".json")
"""Endings of configuration files."""

_WITHOUT_DASHES = re.compile(r"\+{0,2}([A-Za-z][\w.-]*)=(.*)", re.DOTALL)
"""An option as Hydra and torchtune write it, with its name and value."""


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
        check_values(in_file, dict.fromkeys(DEFAULT_SELECTION, str | None), selected.config_file)
        let_steps_decide(document, overrides)
        module, config_name = (
            str(getattr(selected, name) or in_file[name] or default)
            for name, default in DEFAULT_SELECTION.items()
        )
        if not selected.module and in_file["module"] and not is_trusted(module):
            raise untrusted_in_file(
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
            check_keys(document, list(known), selected.config_file)
            check_values(document, types, selected.config_file)
            check_hidden(document, own, types, selected.config_file)
        words = to_switches(
            overrides, {spelled(key) for key, value in known.items() if isinstance(value, bool)}
        )
        with refusals_named():
            with_file = with_values(default, type(default), leaves(document))
        options = option_names(known, types)
        config = self._parse(with_file, words, options)
        if document and strange_in(config, [default]):
            without_file = self._parse(default, words, options)
            check_trust(config, [default, without_file], selected.config_file)
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
            check_keys(document, list(types), path)
            check_values(document, types, path)
            words = to_switches(args, {key for key in options if types[key] is bool})
            of_options = {key: types[key] for key in options}
            check_words(words, of_options)
            if {"-h", "--help"} & set(words) and known.is_current:
                default = known.stand_in()
                with_file = with_values(default, type(default), leaves(document))
                self._parse(with_file, words, options)
            if unknown := unknown_words(words, of_options):
                raise self._unknown(unknown, options)
            given = {**leaves(document), **values_in(words, of_options)}
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
        others = [word for word in overrides if key_of(word.partition("=")[0]) in OTHER_NAMES]
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
        given |= switched(to_switches(overrides, booleans), types)
        arguments: dict[str, object] = {}
        for name, kind in types.items():
            value = given.get(name)
            value = document.get(name) if value is None else value
            if value is None:
                continue
            if not fits(value, kind):
                raise UserError(f"--{name} is {value!r}, but must be {described(kind)}")
            arguments[name] = whole_number(str(value)) if kind is int else kind(value)
        return arguments

    def _parse(self, default: object, args: Sequence[str], known: Collection[str]) -> Any:
        """Return a configuration with the values on the command line, or print the help."""
        types = types_by_key(default, type(default))
        keys = {spelled(key): key for key in known if key in types}
        options = {spelled: types[key] for spelled, key in keys.items()}
        check_words(args, options)
        given = values_in(args, options)
        is_help = bool({"-h", "--help"} & set(args))
        if is_help or not all(is_plain(options[spelled]) for spelled in given):
            config, unknown = parse_by_tyro(default, args, self.prog)
            if unknown:
                raise self._unknown(unknown, known)
            return config
        if unknown := unknown_words(args, options):
            raise self._unknown(unknown, known)
        values = {keys[spelled]: value for spelled, value in given.items()}
        with refusals_named():
            return with_values(default, type(default), values)

    def _unknown(self, words: Sequence[str], known: Collection[str]) -> UserError:
        """Return the error for words of the command line that set no option."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option and re.fullmatch(r"-[A-Za-z][\w.-]+", option):  # one dash too few
            return self._unknown([f"-{option}"], known)
        if option is None and (bare := _WITHOUT_DASHES.fullmatch(words[0])):
            key = key_of(f"--{bare[1]}")
            if key not in map(spelled, known):
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
        key = key_of(option)
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


def registered_name(function: Callable[..., object]) -> str:
    """Return the registered name, package.function: only the last part of the import path, since
    the rest varies."""
    package = function.__module__.removesuffix(".config_registry").rpartition(".")[2]
    return f"{package}.{function.__name__}"
