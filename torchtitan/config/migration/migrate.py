"""Rewrite a configuration of another library as ours."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torchtitan.config.migration import axolotl, litgpt, llama_factory, torchtune, trl
from torchtitan.config.migration.outcome import Migration
from torchtitan.config.migration.reading import ForeignConfig
from torchtitan.config.migration.torchtitan_files import migrate_torchtitan
from torchtitan.tools.errors import UserError

Values = Mapping[str, object]


class _Library(NamedTuple):
    read: Callable[[Migration], None]
    defaults: Values | Callable[[Values, str], Values]
    """Values of absent keys, which may depend on the given ones and on the command."""


_LIBRARIES = {
    "torchtune": _Library(torchtune.migrate_torchtune, torchtune.DEFAULTS),
    "torchtitan": _Library(migrate_torchtitan, {}),
    "axolotl": _Library(axolotl.migrate_axolotl, axolotl.DEFAULTS),
    "llama_factory": _Library(llama_factory.migrate_llama_factory, llama_factory.DEFAULTS),
    "litgpt": _Library(litgpt.migrate_litgpt, litgpt.defaults),
    "transformers": _Library(trl.migrate_transformers, trl.TRANSFORMERS_DEFAULTS),
}


def migrated(foreign: ForeignConfig, *, devices: int = 0, method: str = "") -> Migration:
    """Return the configuration, and what became of each value.

    Args:
        foreign: the configuration of another library.
        devices: number of processes that it ran with; 0: those that its command starts, or 1.
        method: method of TRL's trainer, one of `trl.METHODS`; "" to find it by the names.

    Raises:
        UserError: for a method, model or value that has no counterpart, and without which nothing
            can be trained.
    """
    values = dict(foreign.values)
    devices = devices or foreign.devices
    try:
        if foreign.kind == "torchtune":
            values = torchtune.resolved(values)
        if foreign.kind == "trl" or method:
            method = method or trl.method_of(values, foreign.command)
            migration = Migration(values, trl.defaults(method), devices, foreign.command)
            trl.migrate_trl(migration, method)
        else:
            library = _LIBRARIES[foreign.kind]
            defaults = library.defaults
            if callable(defaults):
                defaults = defaults(values, foreign.command)
            migration = Migration(values, defaults, devices, foreign.command)
            library.read(migration)
        migration.finish()
    except (TypeError, AttributeError, LookupError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"a value is not as {foreign.kind} has it: {error}") from error
    return migration
