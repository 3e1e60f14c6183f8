"""Every option is documented and used: the fields of all configurations, compared with the source
of the package."""

import ast
import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.optim.optimizer import ParamGroup
from torchtitan.config import Configurable, TrainingConfig
from torchtitan.config.configurable import list_options
from torchtitan.config.registry import built_in_modules, list_module, needs_assets
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.protocols import ExternalFormat
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


class TestEveryOption:
    """Every field is read somewhere and has a description."""

    def test_is_documented_and_read(self):
        places = places_in_configurations()
        assert {ParamGroup, RoPEConfig, TrainingConfig} < places.keys()
        sources = {
            module_of(path): path.read_text() for path in (PROJECT / "torchtitan").rglob("*.py")
        }
        sources = {name: text for name, text in sources.items() if ".templates." not in name}
        assert sum(len(own_fields(cls)) for cls in places) > 80
        assert unread_fields(places, sources) == []
        assert [name for cls in places for name in undocumented_fields(cls)] == []

    def test_own_validation_and_other_classes_do_not_count(self):
        """`steps` has no effect: it is validated here, and read only from another section."""
        places = {Careless.Config: {"careless"}}
        assert unread_fields(places, {__name__: Path(__file__).read_text()}) == [
            "Careless.Config.steps"
        ]
        assert undocumented_fields(Careless.Config) == ["Careless.Config.rate"]


def test_a_single_value_for_a_list():
    """A text is a list of one; other single values are errors, instead of characters or a
    `TypeError` later."""
    options = [(cls, name) for cls in places_in_configurations() for name in list_options(cls)]
    assert (SFTDataLoader.Config, "dataset") in options and (TrainingConfig, "skip_data") in options
    for cls, name in options:
        config = object.__new__(cls)
        for value in ("text", Path("text"), 5, 0.5, True):
            try:
                setattr(config, name, value)
            except UserError as error:
                assert str(error).startswith(
                    f"{cls.__qualname__}.{name} is {value!r}, but must be a list"
                ), error
            else:
                assert getattr(config, name) == ["text"], (cls, name, value)
        for value in (["text"], ("text",), None):
            setattr(config, name, value)
            assert getattr(config, name) is value
    given = SFTDataLoader.Config(dataset="my.json")
    assert given.dataset == ["my.json"] == replace(given, format="chat").dataset
    assert SFTDataLoader.Config(dataset=[Path("my.json"), "b"]).dataset == ["my.json", "b"]
    with pytest.raises(
        UserError, match="SFTDataLoader.Config.weights is '0.5', but must be a list"
    ):
        SFTDataLoader.Config(weights="0.5")


MESSAGES = {
    "UserError",
    "RunFailure",
    "RunComplete",
    "require",
    "os_errors_as",
    "info",
    "warning",
    "error",
}
"""Functions and methods whose arguments are texts for users."""


def bare_options(source: str) -> list[str]:
    """Return the options in messages that are not written as on the command line,
    `--section.option`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in MESSAGES]
    words = [
        str(node.value)
        for call in named
        for node in ast.walk(call)
        if isinstance(node, ast.Constant)
    ]
    # also the name of files
    sections = "|".join({field.name for field in fields(Trainer.Config)} - {"tokenizer"})
    return re.findall(rf"(?<![-.'`\w])(?:{sections})\.\w+", "\n".join(words))


def test_messages_name_options_as_on_the_command_line():
    sources = [path.read_text() for path in (PROJECT / "torchtitan").rglob("*.py")]
    assert [option for source in sources for option in bare_options(source)] == []
    mistake = (
        'raise UserError(f"checkpoint.interval is {n}; set --checkpoint.interval 1 in '
        'torchtitan.checkpoint.x")'
    )
    assert bare_options(mistake) == ["checkpoint.interval"]


class Careless(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        steps: int = 1
        """Never read."""

        lr: float = 1.0
        """Read under another name."""

        rate: float = 1.0

        def validate(self):
            assert self.steps > 0

    def __init__(self, config, *, training):
        super().__init__(config)
        self.steps = training.steps
        settings = self.config
        self.lr = settings.lr * config.rate


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts)


def places_in_configurations() -> dict[type, set[str]]:
    """Every dataclass in the configurations of `torchtitan ls` → names of the fields that hold
    it."""
    places: dict[type, set[str]] = {}

    def visit(value, name):
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item, name)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item, name)
        # it contains functions, not options
        elif is_dataclass(value) and not isinstance(value, ExternalFormat):
            for cls in type(value).__mro__:
                if is_dataclass(cls):
                    places.setdefault(cls, set()).add(name)
            for item in fields(value):
                visit(getattr(value, item.name), item.name)

    for module, folder in built_in_modules().items():
        registry = importlib.import_module(
            f"torchtitan.{folder.parent.name}.{module}.config_registry"
        )
        for function in (getattr(registry, name) for name in list_module(module, folder).configs):
            if not needs_assets(function):  # configurations that do have the same classes
                visit(function(), "")
    return places


def own_fields(cls: type) -> list[str]:
    own = cls.__dict__.get("__annotations__", {})
    return [item.name for item in fields(cls) if item.name in own]


def unread_fields(places: dict[type, set[str]], sources: dict[str, str]) -> list[str]:
    """Return the fields that no code reads.

    A field is read by `self.<field>` in the class itself outside `validate`; for a component's
    `Config`, by `config.<field>` or `self.config.<field>` in a module that defines it or a
    subclass; and by `<place>.<field>` anywhere, if the place is a field that holds such an object
    (`training.steps`, `group.lr` of `param_groups`) or a parameter declared as one (`config:
    RoPEConfig`, `config: "CheckpointManager.Config"`). A decoder's is also read by
    `decoder.config.<field>`, in functions that make the parts of its layers.
    """
    reads = {module: reads_in(ast.parse(text)) for module, text in sources.items()}
    everywhere = set().union(*reads.values())
    unread = []
    for cls in places:
        family = [sub for sub in places if issubclass(sub, cls)]
        bases = [base for base in cls.__mro__ if issubclass(base, Configurable.Config)]
        receivers = {name for place in places[cls] for name in (place, singular(place))} | {
            cls.__qualname__
        }
        for name in own_fields(cls):
            if any(name in own_fields(base) for base in cls.__mro__[1:] if base in places):
                continue  # another default of a field that the parent class reads
            by_place = any((receiver, name) in everywhere for receiver in receivers)
            by_itself = any(
                (f"self of {sub.__qualname__}", name) in reads.get(sub.__module__, ())
                for sub in family
            )
            # A parent class may read a property that this field overrides, a mixin a field that
            # it declares.
            readers = {
                *family,
                *(base for base in bases if isinstance(vars(base).get(name), property)),
                *(
                    base
                    for base in cls.__mro__[1:]
                    if name in vars(base).get("__annotations__", ())
                ),
            }
            by_owner = any(
                ("config", name) in reads.get(reader.__module__, ()) for reader in readers
            )
            by_part = issubclass(cls, Decoder.Config) and ("decoder", name) in everywhere
            by_owner = issubclass(cls, Configurable.Config) and by_owner
            if not (by_place or by_itself or by_part or by_owner):
                unread.append(f"{cls.__qualname__}.{name}")
    return unread


def singular(place: str) -> str:
    """Name of one element of a field: `param_groups` → `group`."""
    return place.removesuffix("s").rpartition("_")[2]


def reads_in(tree: ast.AST) -> set[tuple[str, str]]:
    """(receiver, attribute) of every attribute read: the last name of the receiver, with local
    names resolved."""
    reads = set()

    def visit(node, scope, aliases):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            if node.name == "validate" and scope[-1:] and scope[-1].endswith("Config"):
                return
            scope = [*scope, node.name]
            aliases = aliases | local_names(node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ".".join(scope[:-1])
            reads.add((receiver_of(node.value, owner, aliases), node.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, scope, aliases)

    visit(tree, [], {})
    return reads


def receiver_of(value: ast.AST, owner: str, aliases: dict[str, str]) -> str:
    if isinstance(value, ast.Name):
        return f"self of {owner}" if value.id == "self" else aliases.get(value.id, value.id)
    if not isinstance(value, ast.Attribute):
        return ""
    # optimizer.config.lr
    if value.attr == "config" and isinstance(value.value, (ast.Name, ast.Attribute)):
        whose = receiver_of(value.value, "", {})
        return "config" if whose == "self of " else whose
    return value.attr


def local_names(function: ast.AST) -> dict[str, str]:
    """Local name → its value, in `a = self.config.training`, `a, b = x.c, x.d`, and a parameter `a:
    X`."""
    parameters = function.args.args if isinstance(function, ast.FunctionDef) else []
    declared = {p.arg: ast.unparse(p.annotation).strip("'") for p in parameters if p.annotation}
    names = {name: declaration for name, declaration in declared.items() if declaration != "Config"}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        targets, values = (
            (target.elts, value.elts)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else ([target], [value])
        )
        for name, origin in zip(targets, values, strict=True):
            if isinstance(name, ast.Name) and isinstance(origin, ast.Attribute):
                names[name.id] = receiver_of(origin, "", {})
    return names


def undocumented_fields(cls: type) -> list[str]:
    """Fields without a string literal below them."""
    if not own_fields(cls):
        return []  # derived classes have no source either
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body
    documented = {
        item.target.id
        for item, after in zip(body, body[1:], strict=False)
        if isinstance(item, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    return [f"{cls.__qualname__}.{name}" for name in own_fields(cls) if name not in documented]
