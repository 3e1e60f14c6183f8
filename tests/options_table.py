"""The table torchtitan/assets/options.json: the options of the built-in configurations (`python -m
tests.options_table` writes it)."""

import json
from itertools import groupby
from typing import Any

from torchtitan.config.configurable import leaves
from torchtitan.config.option_names import TABLE
from torchtitan.config.registry import (
    built_in_modules,
    list_module,
    load_config_function,
    needs_assets,
)
from torchtitan.config.values import option_names, types_by_key


def options_by_configuration() -> dict[str, dict[str, list[str]]]:
    """Return module → configuration → options, of the configurations that need no folder."""
    options: dict[str, dict[str, list[str]]] = {}
    for module, folder in built_in_modules().items():
        options[module] = {}
        for name in list_module(module, folder).configs:
            function = load_config_function(module, name)
            if not needs_assets(function):
                config: Any = function()
                types = types_by_key(config, type(config))
                options[module][name] = option_names(leaves(config.to_dict()), types)
    return options


def table() -> dict[str, Any]:
    sections: dict[tuple[str, ...], int] = {}
    configurations: dict[str, dict[str, list[int]]] = {}
    for module, configs in options_by_configuration().items():
        for name, options in configs.items():
            numbers = [
                sections.setdefault(tuple(section), len(sections))
                for _, section in groupby(options, lambda option: option.split(".")[0])
            ]
            configurations.setdefault(module, {})[name] = numbers
    return {"sections": list(sections), "configurations": configurations}


if __name__ == "__main__":
    text = json.dumps(table()).replace("], [", "],\n[").replace("}, ", "},\n")
    TABLE.write_text(f"{text}\n")
