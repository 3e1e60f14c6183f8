"""Parsing by tyro, for the help and for values that files cannot express."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from torchtitan.config.configurable import Configurable, whole_number
from torchtitan.config.values import by_name, refusals_named
from torchtitan.tools.logging import presentable

_DESCRIPTION = """\
Train a model: --module M --config C [--config_file run.yaml] [--section.key value ...].
Later sources win: the configuration function, then the file, then the command line.
`torchtitan ls` lists modules and configurations; the values shown belong to the selected one."""


def parse_by_tyro(default: object, args: Sequence[str], prog: str) -> tuple[Any, list[str]]:
    """Return a configuration with the values on the command line, and the words that set no option;
    or print the help."""
    registry, printed = ConstructorRegistry(), io.StringIO()
    registry.struct_rule(_named_configs_rule)
    registry.primitive_rule(_whole_numbers_rule)
    try:
        with registry, contextlib.redirect_stderr(printed), refusals_named():
            return tyro.cli(
                type(default),
                default=default,
                args=args,
                prog=prog,
                description=_DESCRIPTION,
                use_underscores=True,
                config=(tyro.conf.SuppressFixed,),
                return_unknown_args=True,
            )
    except SystemExit:
        print(presentable(printed.getvalue()), end="", file=sys.stderr)
        raise


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
