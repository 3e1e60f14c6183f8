"""Find modules (packages with a `config_registry.py`), configurations and flavors in the sources,
without imports."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from torchtitan.tools.errors import UserError, in_words, suggest
from torchtitan.tools.user_code import EXITS, is_ctrl_c

_REGISTRY = "config_registry"
REGISTRY_FILE = f"{_REGISTRY}.py"
ASSETS_PARAMETER = "hf_assets_path"
"""Parameter of a configuration function that computes the configuration from that folder."""

_RECIPES = ("small", "published")
"""Functions whose result, which a registry assigns to a name, is a configuration function."""

_FAMILY_PARAMETER = "family"
"""Parameter of a configuration function for models of any family: the package of the family."""

ENTRY_POINTS = "torchtitan.models"
"""Group of entry points through which installed packages add modules: name = import path of the
package."""

_FOR_ANY_FAMILY = (
    "torchtitan.models.auto.config_registry",
    "torchtitan.foresight.config_registry",
)
"""Modules of configurations for models of any family. Every family offers those that it does not
define itself."""

_BUILT_IN_FOLDERS = ("models", "experiments")
_OWN_CODE = tuple(f"torchtitan.{folder}" for folder in ("components", *_BUILT_IN_FOLDERS))
"""Packages of this library that checkpoints may refer to."""


class ModuleListing(NamedTuple):
    """Configurations and flavors of a module, by name."""

    name: str
    configs: list[str]
    flavors: list[str]
    for_folders: list[str]
    """Configurations that need the folder `hf_assets_path`."""


@cache
def built_in_modules() -> Mapping[str, Path]:
    """Return short name → folder of each package with a registry in `models` and `experiments`."""
    package = Path(__file__).resolve().parent.parent
    found = [
        path.parent
        for kind in _BUILT_IN_FOLDERS
        for path in sorted((package / kind).glob(f"*/{REGISTRY_FILE}"))
    ]
    return {folder.name: folder for folder in found}


def installed_modules() -> dict[str, str]:
    """Return short name → import path of each module that an installed package adds through
    `ENTRY_POINTS`."""
    return {
        point.name: point.module for point in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }


def modules_on_disk() -> dict[str, Path]:
    """Return short name → folder of the built-in modules and of the installed ones that are
    folders."""
    installed = {name: _folder_of(path) for name, path in installed_modules().items()}
    return {**{name: folder for name, folder in installed.items() if folder}, **built_in_modules()}


def list_module(name: str, folder: Path) -> ModuleListing:
    """Return the flavors (keys of `FLAVORS`) and the configurations in a module's source: see
    `_is_config`, or made by `_RECIPES`."""
    configs, for_folders = [], []
    for statement in ast.parse((folder / REGISTRY_FILE).read_text()).body:
        match statement:
            case ast.FunctionDef(name=config, args=arguments):
                listed = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                parameters = [argument.arg for argument in listed]
                defaults = (*arguments.defaults, *filter(None, arguments.kw_defaults))
                n_required = len(parameters) - len(defaults)
            case ast.Assign(targets=[ast.Name(config)], value=ast.Call(ast.Name(function))) if (
                function in _RECIPES
            ):
                parameters, n_required = [], 0
            case _:
                continue
        if _is_config(config, parameters, n_required):
            configs.append(config)
            if ASSETS_PARAMETER in parameters[:n_required]:
                for_folders.append(config)
    flavors: list[str] = []
    init = folder / "__init__.py"
    for node in ast.parse(init.read_text()).body if init.exists() else []:
        # of `FLAVORS = …`, or `FLAVORS: … = …`
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        named = any(isinstance(target, ast.Name) and target.id == "FLAVORS" for target in targets)
        if named and isinstance(value := getattr(node, "value", None), ast.Dict):
            flavors = [
                key.value
                for key in value.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ]
    return ModuleListing(name, configs, flavors, for_folders)


def load_config_function(module: str, config: str) -> Callable[..., object]:
    """Return the function that `--module module --config config` names; see `needs_assets` for its
    parameters.

    The module is a short name, an import path, or a folder with a `config_registry.py`; the
    configuration's name may begin with the module's (`llama3_debugmodel`). Raise `UserError` if
    either does not exist, or importing fails.
    """
    if module in built_in_modules():
        _check_is_written(module, config)
    registry = _import_registry(module)
    functions: dict[str, Callable[..., object]] = _configurations(registry)
    shared: dict[str, Callable[..., object]] = {}
    package = _package_of(registry)
    short = package.__name__.rpartition(".")[2]
    names = (config, f"{short}_{config}")
    if functions.keys().isdisjoint(names) and "hf" in getattr(package, "FORMATS", {}):
        shared = {
            name: wraps(function)(partial(function, family=package))
            for path in _FOR_ANY_FAMILY
            for name, function in _configurations(_import(path, module)).items()
        }
    for name in names:
        if function := functions.get(name) or shared.get(name):
            return function
    for_folders = [name for name, function in shared.items() if needs_assets(function)]
    others = shared.keys() - set(for_folders)
    raise _unknown(config, module, short, [*functions, *others], for_folders)


def _check_is_written(module: str, config: str) -> None:
    """Raise `UserError` if a configuration's name is nowhere in the source of a built-in module and
    of the configurations for folders: without importing torch, which takes seconds."""
    folders = built_in_modules()
    files = [folders[module] / REGISTRY_FILE, *_shared_files()]
    sources = [file.read_text() for file in files]
    names = map(re.escape, (config, f"{module}_{config}"))
    if re.search(rf"\b({'|'.join(names)})\b", "\n".join(sources)):
        return
    functions = list_module(module, folders[module]).configs
    others, for_folders = _shared_configs(folders[module])
    raise _unknown(config, module, module, [*functions, *others], for_folders)


def _shared_files() -> list[Path]:
    """Return the source files of `_FOR_ANY_FAMILY`."""
    package = Path(__file__).resolve().parents[2]
    return [package / f"{name.replace('.', '/')}.py" for name in _FOR_ANY_FAMILY]


def is_written_for_folder(module: str, config: str) -> bool:
    """Return whether a configuration of a built-in module needs the folder `hf_assets_path`: by its
    source, without importing it."""
    folders = built_in_modules()
    if module not in folders:
        return False
    own = list_module(module, folders[module])
    name = config if config in own.configs else f"{module}_{config}"
    if name in own.configs:
        return name in own.for_folders
    return config in _shared_configs(folders[module])[1]


def _shared_configs(folder: Path) -> tuple[list[str], list[str]]:
    """Return the configurations of any family that need no folder, and those that need one; none
    for a module that is not a family."""
    if "FORMATS" not in (folder / "__init__.py").read_text():
        return [], []
    listings = [list_module("", file.parent) for file in _shared_files()]
    for_folders = [name for one in listings for name in one.for_folders]
    others = {name for one in listings for name in one.configs} - set(for_folders)
    return sorted(others), for_folders


_OF_METHODS = {
    **dict.fromkeys(("full", "full_finetune", "finetune", "sft_full"), ("auto", "sft")),
    **dict.fromkeys(("sft_lora", "lora_sft", "peft"), ("auto", "lora")),
    **dict.fromkeys(("pt", "cpt"), ("auto", "pretrain")),
    **{name: ("preference", name) for name in ("dpo", "ipo", "simpo", "kto", "online_dpo")},
    "orpo": ("preference", "dpo --loss.kind orpo"),
    "grpo": ("rl", "grpo"),
    "ppo": ("ppo", "ppo"),
    **dict.fromkeys(("rm", "reward", "bradley_terry"), ("reward", "bradley_terry")),
    "gkd": ("distillation", "gkd"),
}
"""Name of a method, as other libraries have it → module and configuration, where a module has no
configuration of this name."""

_LIBRARIES = ("axolotl", "llamafactory", "litgpt", "torchtune", "trl")
"""Other libraries, whose files `torchtitan migrate` rewrites."""


def _unknown(
    config: str, module: str, short: str, functions: Iterable[str], for_folders: Iterable[str]
) -> UserError:
    """Return the error for a name that is neither one of the module's functions nor one of the
    configurations for folders."""
    if meant := _OF_METHODS.get(config):
        return UserError(
            f"unknown configuration '{config}' in module '{module}'; use --module {meant[0]} "
            f"--config {meant[1]}"
        )
    if config.endswith((".yml", ".yaml", ".toml")):
        return UserError(
            f"--config {config} is a file; use --config_file {config}, or for a file of another "
            f"library torchtitan migrate {config}"
        )
    known = [*functions, *for_folders, *(name.removeprefix(f"{short}_") for name in functions)]
    there_are = ", ".join(sorted(functions)) or "none"
    if for_folders:
        there_are += f"; with --{ASSETS_PARAMETER} DIR: {', '.join(sorted(for_folders))}"
    return UserError(
        f"unknown configuration '{config}' in module '{module}'{suggest(config, known)} (there "
        f"are: {there_are})"
    )


def _configurations(registry: ModuleType) -> dict[str, Callable[..., object]]:
    found: dict[str, Callable[..., object]] = {
        name: function
        for name, function in inspect.getmembers(registry, inspect.isfunction)
        if function.__module__ == registry.__name__ and _is_config(name, *_parameters_of(function))
    }
    for name, function in found.items():
        if function.__name__ not in found:  # of a recipe
            function.__name__ = name
    return found


def import_package(module: str) -> ModuleType:
    """Import the package that `--module module` names, and its registry. Raise like
    `load_config_function`."""
    return _package_of(_import_registry(module))


def trusted_module(name: str) -> ModuleType | None:
    """Return the module for an import path found in a checkpoint, or None if its code must not run.

    Only parts of this package and of packages with an entry point (`ENTRY_POINTS`) are imported,
    raising `UserError` if that fails; any other module must be imported already, as the `--module`
    package is.
    """
    # Looking up the installed ones reads the metadata of every installed package.
    if _is_of(name, _OWN_CODE) or _is_of(name, installed_modules().values()):
        return _import(name, name)
    return sys.modules.get(name)


def _is_of(name: str, packages: Iterable[str]) -> bool:
    is_path = all(part.isidentifier() for part in name.split("."))
    return is_path and any(f"{name}.".startswith(f"{package}.") for package in packages)


def is_trusted(module: str) -> bool:
    """Return whether a file may select `--module module`: a built-in, installed or already imported
    module."""
    if module in built_in_modules() or module in installed_modules():
        return True
    folder = Path(module).resolve()
    if folder.is_dir():  # a folder takes precedence over an import path, as in `_import_registry`
        loaded = sys.modules.get(f"{folder.name}.{_REGISTRY}")
        return loaded is not None and Path(inspect.getfile(loaded)).resolve().parent == folder
    return _is_of(module, _OWN_CODE) or f"{module}.{_REGISTRY}" in sys.modules


def needs_assets(function: Callable[..., object]) -> bool:
    """Return whether a configuration function needs the folder `hf_assets_path`."""
    parameter = inspect.signature(function).parameters.get(ASSETS_PARAMETER)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def optional_parameters(function: Callable[..., object]) -> dict[str, Any]:
    """Return the optional parameters of a configuration function that have the type str, int, float
    or bool, as name → type, without None. Options of the same names set these parameters; the
    configuration must also have these options."""
    names, n_required = _parameters_of(function)
    optional = [name for name in names[n_required:] if name != _FAMILY_PARAMETER]
    if not optional:  # so that other annotations need not resolve
        return {}
    types = get_type_hints(function)
    found = {}
    for name in optional:
        kind = types.get(name)
        kinds = {*(get_args(kind) or (kind,))} - {NoneType}
        if len(kinds) == 1 and kinds <= {str, int, float, bool}:
            [found[name]] = kinds
    return found


def _package_of(registry: ModuleType) -> ModuleType:
    return sys.modules[registry.__name__.rpartition(".")[0]]


def _parameters_of(function: Callable[..., object]) -> tuple[list[str], int]:
    """Return the parameters of a function, and the number of them that have no default."""
    parameters = inspect.signature(function).parameters
    empty = inspect.Parameter.empty
    return [*parameters], sum(one.default is empty for one in parameters.values())


def _is_config(name: str, parameters: list[str], n_required: int) -> bool:
    """Return whether a public function is a configuration function: without parameters, or with
    `ASSETS_PARAMETER`, then others with defaults."""
    takes_assets = parameters[:1] == [ASSETS_PARAMETER] and n_required <= 1
    return not name.startswith("_") and (not parameters or takes_assets)


def _of_hub(module: str) -> str:
    """Return how to train a model of the hub whose name is given as a module."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", module):
        return ""
    folder = f"assets/hf/{module.rpartition('/')[2]}"
    return (
        f"; for a model of the Hugging Face Hub: torchtitan download {module}, then --module auto "
        f"--hf_assets_path {folder}"
    )


def _import_registry(module: str) -> ModuleType:
    built_in = built_in_modules()
    if module in built_in:
        return _import(
            f"torchtitan.{built_in[module].parent.name}.{module}.config_registry", module
        )
    installed = installed_modules()
    if module in installed:
        return _import(f"{installed[module]}.config_registry", module)
    if Path(module).is_dir():
        return _import_folder(Path(module).resolve(), module)
    if Path(module).is_file() and module.endswith(".py"):
        folder = str(Path(module).parent)
        if "/" not in folder:
            folder = f"./{folder}"
        raise UserError(
            f"unknown module '{module}': a module is a folder with a config_registry.py; use "
            f"--module {folder}"
        )
    if "/" in module or "\\" in module:
        raise UserError(f"unknown module '{module}': the folder does not exist{_of_hub(module)}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    if "." in module or _is_importable(module):
        if not _is_importable(f"{module}.config_registry"):
            raise UserError(f"unknown module '{module}': '{module}.config_registry' does not exist")
        return _import(f"{module}.config_registry", module)
    if module.lower().replace("-", "") in _LIBRARIES:
        raise UserError(
            f"unknown module '{module}': torchtitan migrate FILE rewrites a file of this library "
            "for --config_file"
        )
    known = sorted({*built_in, *installed})
    raise UserError(
        f"unknown module '{module}'{suggest(module, known)} (there are: {', '.join(known)}; also "
        "accepted: an import path, or a folder with a config_registry.py)"
    )


def _folder_of(path: str) -> Path | None:
    """Find the folder of a package without importing it; None if it does not exist."""
    top, *inner = path.split(".")
    spec = importlib.util.find_spec(top)
    locations = spec.submodule_search_locations if spec else None
    folders = [Path(location).joinpath(*inner) for location in locations or ()]
    return next((folder for folder in folders if (folder / REGISTRY_FILE).is_file()), None)


def _import_folder(folder: Path, module: str) -> ModuleType:
    if not (folder / REGISTRY_FILE).is_file():
        raise UserError(f"module '{module}' is a folder without a {REGISTRY_FILE}")
    if not folder.name.isidentifier():
        raise UserError(
            f"module '{module}': the folder's name '{folder.name}' is not a valid Python package "
            "name"
        )
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    found = _folder_of(folder.name)
    if found is None or found.resolve() != folder:
        raise UserError(
            f"module '{module}': '{folder.name}' is the name of another package; rename the folder"
        )
    return _import(f"{folder.name}.config_registry", module)


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A missing parent means that the name does not exist; an import missing inside a parent is
        # the user's error.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return False
        raise import_failure(name, error) from error
    except (ImportError, SyntaxError, *EXITS) as error:
        raise import_failure(name, error) from error


def _import(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError, *EXITS) as error:
        raise import_failure(module, error) from error


def import_failure(module: str, error: BaseException) -> UserError:
    """Return the user's import error, or exit, with its location in the module. Raise Ctrl-C
    again."""
    if is_ctrl_c(error):
        raise error
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    where = (
        f" ({frames[-1].filename}, line {frames[-1].lineno})"
        if frames
        and frames[-1].filename != __file__
        and not isinstance(error, SyntaxError)  # which names its own
        else ""
    )
    return UserError(f"importing module '{module}' failed: {in_words(error)}{where}")
