"""Rules of the package: layers of imports, private names of PyTorch, and the cost of imports."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.parsed import nodes_of, tree_of
from tests.training import TINY, flags

LAYERS = [
    "tools",
    "assets",
    "assets",
    "config",
    "protocols",
    "distributed",
    "components",
    "trainer",
    "models",
    "experiments",
    "dry_run",
    "foresight",
    "train",
    "cli",
    "__main__",
]
"""Lowest first: a module imports from its own layer and from those before it."""

COMPONENTS = [
    "tokenizer",
    "chat_template",
    "optim",
    "losses",
    "observe",
    "checkpoint",
    "weights",
    "quantization",
    "peft",
    "data",
    "images",
    "diffusion",
    "generation",
    "rollout",
    "evaluation",
    "serving",
]
"""Packages inside `components`, lowest first."""

PACKAGE = PROJECT / "torchtitan"


def name_of(path: Path) -> str:
    """Import path of a file of the package, with `__init__`."""
    return path.relative_to(PROJECT).with_suffix("").as_posix().replace("/", ".")


@functools.cache
def sources() -> Mapping[str, ast.Module]:
    """Modules of the library by name, without files that users copy."""
    paths = [
        path for path in PACKAGE.rglob("*.py") if not {"assets", "templates"} & set(path.parts)
    ]
    return {name_of(path): tree_of(path) for path in paths}


def imports_of(tree: ast.AST, package: str) -> list[str]:
    """Modules of this project, or names in them, that a module inside `package` imports: anywhere
    in it, also inside functions and for type checking alone, since whoever reads the one needs the
    other."""
    names = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [f"{source}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("torchtitan.")]


def module_of(imported: str, modules: Iterable[str]) -> str:
    """The module that an imported name refers to or is in."""
    packages = {name.removesuffix(".__init__"): name for name in modules}
    while imported not in packages:
        imported = imported.rpartition(".")[0]
    return packages[imported]


def node_of(module: str) -> str:
    """Layer of a module, or its package or module inside `components`."""
    _, *parts = module.removesuffix(".__init__").split(".")
    return ".".join(parts[:2] if parts[0] == "components" else parts[:1])


def import_graph(sources: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Module → the modules that it imports. The `__init__` of a package above a module does not
    count unless it is named: it may re-export names of the module."""
    graph = {}
    for name, tree in sources.items():
        imported = {module_of(one, sources) for one in imports_of(tree, name.rpartition(".")[0])}
        graph[name] = imported - {name, "torchtitan.__init__"}
    return graph


def package_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Imports between layers, and between packages inside `components`."""
    packages: dict[str, set[str]] = {}
    for name, imported in graph.items():
        if name != "torchtitan.__init__":
            packages.setdefault(node_of(name), set()).update(
                map(node_of, imported - {"torchtitan.__init__"})
            )
    return {name: imported - {name} for name, imported in packages.items()}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return a cycle, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch, torchtitan.tools.device", ["torchtitan.tools.device"]),
        ("from torchtitan import trainer", ["torchtitan.trainer"]),
        ("from torchtitan.cli.main import main", ["torchtitan.cli.main.main"]),
        ("from . import sections", ["torchtitan.config.sections"]),
        ("from .registry import suggest", ["torchtitan.config.registry.suggest"]),
        ("from .. import trainer", ["torchtitan.trainer"]),
        ("def f():\n    from ..cli.main import main", ["torchtitan.cli.main.main"]),
        (
            "if TYPE_CHECKING:\n    from torchtitan.trainer import Trainer",
            ["torchtitan.trainer.Trainer"],
        ),
    ],
)
def test_every_kind_of_import_is_detected(line, found):
    assert imports_of(ast.parse(line), "torchtitan.config") == found


def test_dependencies_point_downwards():
    packages = [f"components.{name}" for name in COMPONENTS]
    graph = import_graph(sources())
    imports = [(name, one) for name, imported in package_graph(graph).items() for one in imported]
    upwards = [
        f"{name} imports {one}"
        for name, one in imports
        if LAYERS.index(name.partition(".")[0]) < LAYERS.index(one.partition(".")[0])
        or {name, one} <= set(packages)
        and packages.index(name) < packages.index(one)
    ]
    assert upwards == []
    assert sum(map(len, graph.values())) > 500


def test_every_package_is_in_a_layer():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    found |= {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert found == set(LAYERS)
    assert {path.parent.name for path in PACKAGE.glob("components/*/__init__.py")} == set(
        COMPONENTS
    )


def test_imports_have_no_cycles():
    graph = import_graph(sources())
    assert cycles(graph) == []
    assert cycles(package_graph(graph)) == []


def test_cycles_are_detected():
    modules = {
        "torchtitan.tools.a": "def f():\n    from torchtitan.tools import b",
        "torchtitan.tools.b": "if TYPE_CHECKING:\n    from torchtitan.tools.a import f",
        "torchtitan.tools.__init__": "from torchtitan.tools.a import f",
        "torchtitan.tools.c": "from torchtitan.tools.a import f",
    }
    graph = import_graph({name: ast.parse(text) for name, text in modules.items()})
    [cycle] = cycles(graph)
    assert set(cycle) == {"torchtitan.tools.a", "torchtitan.tools.b"}
    x, y = "torchtitan.components.x", "torchtitan.components.y"
    between: dict[str, set[str]] = {
        f"{x}.a": {f"{y}.a"},
        f"{y}.b": {f"{x}.b"},
        f"{x}.b": set(),
        f"{y}.a": set(),
    }
    assert cycles(between) == [] and cycles(package_graph(between)) != []


OTHERS = {
    "os": {"_exit"},
    "sys": {"_current_frames"},
    "pickle": {"_Unpickler"},
    "named tuples": {"_replace", "_asdict", "_fields"},
    "torchao": {
        "_tensor",
        "_new_buffer",
        "_to_mxfp8_then_scaled_mm",
        "_to_mxfp8_then_scaled_grouped_mm",
        "_to_fp8_rowwise_then_scaled_grouped_mm",
    },
    "transformers": {
        "_adjust_missing_and_unexpected_keys",
        "_decode_special_floats",
        "_from_config",
        "_init_weights",
        "_no_split_modules",
        "_prepare_position_ids_for_generation",
    },
}
"""Modules whose private names are not PyTorch's."""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """Private names defined in this library: functions, classes, variables, attributes of
    `self`."""
    names = set()
    for tree in trees:
        for node in nodes_of(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
    return names


def private_names_of_torch(tree: ast.AST, allowed: set[str]) -> Iterator[str]:
    """Yield what a module takes from PyTorch that has a private name: by an import, as an attribute
    of anything (unless the attribute is one of `allowed`), by `getattr` and its kin, and by a
    module's name in a string."""
    bound = {"torch"}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            yield from (alias.name for alias in aliases if is_private(alias.name))
            bound |= {alias.asname for alias in aliases if alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if is_private(name))
            bound |= {alias.asname or alias.name for alias in node.names}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in allowed or ast.unparse(node).split(".")[0] in bound:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            texts = [
                one.value
                for one in node.args
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            for text in filter(is_private, texts):
                called = ast.unparse(node.func)
                if called in ("getattr", "setattr", "hasattr", "delattr") and text not in allowed:
                    yield f"{called} {text}"
                elif re.fullmatch(r"torch(\.\w+)+", text):
                    yield f"{called} {text}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._inductor.config", "torch._inductor.config"),
        ("import torch._inductor.config as settings", "torch._inductor.config"),
        ("from torch import _C", "torch._C"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.distributed.tensor import _utils", "torch.distributed.tensor._utils"),
        ("def f():\n    from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("import torch\ntorch._C.f()", "torch._C"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world",
            "dist.distributed_c10d._world",
        ),
        ("from torch import cuda\ncuda._own()", "cuda._own"),
        ("def f(mesh):\n    return mesh['tp']._flatten()", "mesh['tp']._flatten"),
        ("f(x)[0]._spec = 1", "f(x)[0]._spec"),
        ("class A(B):\n    def f(self):\n        super()._inherited()", "super()._inherited"),
        ("class A(B):\n    def f(self):\n        self._inherited()", "self._inherited"),
        ("getattr(x, '_cdata')", "getattr _cdata"),
        ("setattr(x, '_cdata', 1)", "setattr _cdata"),
        ("sys.modules.get('torch._dynamo.utils')", "sys.modules.get torch._dynamo.utils"),
        ("importlib.import_module('torch._ops')", "importlib.import_module torch._ops"),
        ("import torch\nself._own = x._own + torch.tensor(1).__len__()", None),
    ],
)
def test_every_private_name_is_detected(code, found):
    assert list(private_names_of_torch(ast.parse(code), {"_own"})) == ([found] if found else [])


def test_only_one_module_uses_private_names_of_torch():
    allowed = own_names(sources().values()).union(*OTHERS.values())
    found = {name: list(private_names_of_torch(tree, allowed)) for name, tree in sources().items()}
    assert len(found.pop("torchtitan.tools.torch_private")) > 10
    assert {name: names for name, names in found.items() if names} == {}


def test_private_names_of_torch_exist_and_are_used():
    from torchtitan.tools import torch_private

    own = "torchtitan.tools.torch_private"
    imported = {
        one
        for name, tree in sources().items()
        if name != own
        for one in imports_of(tree, "torchtitan")
    }
    functions = [
        node.name
        for node in sources()[own].body
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_"
    ]
    offered = {f"{own}.{name}" for name in (*torch_private._SOURCES, *functions)}
    assert {one for one in imported if one.startswith(f"{own}.")} == offered
    for name in torch_private._SOURCES:
        assert getattr(torch_private, name) is not None
    with pytest.raises(AttributeError, match="has no attribute other"):
        _ = torch_private.other


def test_arrays_are_written_by_one_function():
    """`durable.new_file` checks that they arrive; NumPy's `tofile` and `save` raise nothing on some
    full disks."""
    assert "tofile" in {
        node.attr for node in ast.walk(ast.parse("x.tofile(y)")) if isinstance(node, ast.Attribute)
    }
    for name, tree in sources().items():
        used = {node.attr for node in nodes_of(tree) if isinstance(node, ast.Attribute)}
        assert used.isdisjoint({"tofile", "savez"}), name
        assert not [
            node
            for node in nodes_of(tree)
            if isinstance(node, ast.Attribute) and _is_numpy_save(node)
        ], name


def _is_numpy_save(node: ast.Attribute) -> bool:
    return (
        node.attr == "save"
        and isinstance(node.value, ast.Name)
        and node.value.id in ("np", "numpy")
    )


MAKERS_OF_GROUPS = {
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "shrink_group",
    "init_device_mesh",
    "DeviceMesh",
    "from_group",
    "_flatten",
    "_unflatten",
}


def groups_made(tree: ast.Module) -> list[str]:
    """Return the calls that make process groups, also of functions imported under another name."""
    names = {
        alias.asname or alias.name: alias.name
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    called = [node.func for node in nodes_of(tree) if isinstance(node, ast.Call)]
    own = {
        alias.asname or alias.name
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.")
        for alias in node.names
    }
    plain = [
        names.get(one.id, one.id)
        for one in called
        if isinstance(one, ast.Name) and one.id not in own
    ]
    attributes = [one.attr for one in called if isinstance(one, ast.Attribute)]
    return [one for one in (*plain, *attributes) if one in MAKERS_OF_GROUPS]


@pytest.mark.parametrize(
    "code",
    [
        "dist.new_group()",
        "torch.distributed.init_process_group('gloo')",
        "from torch.distributed import new_subgroups as f\nf()",
        "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (1,))",
        "dist.DeviceMesh('cpu', [0])",
        "DeviceMesh.from_group(g, 'cpu')",
    ],
)
def test_every_call_that_makes_a_group_is_detected(code):
    assert len(groups_made(ast.parse(code))) == 1


def test_only_one_module_makes_process_groups():
    """It gives all of them the timeouts of docs/multinode.md."""
    from torchtitan.tools import torch_private

    own = "torchtitan.distributed.process_group"
    found = {name: made for name, tree in sources().items() if (made := groups_made(tree))}
    assert len(found.pop(own)) >= 4 and found == {}
    # Private makers, by the names under which they are offered.
    private = {
        name
        for name, source in torch_private._SOURCES.items()
        if source.rpartition(".")[2] in MAKERS_OF_GROUPS
    }
    users = {
        name
        for name, tree in sources().items()
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torchtitan.tools.torch_private"
        if private & {alias.name for alias in node.names}
    }
    assert private == {"flatten_mesh", "split_mesh"} and users == {own}


@pytest.mark.slow
def test_first_step_imports_no_heavy_library(tmp_path: Path):
    """Heavy libraries are imported on first use of the feature that needs them: neither with a
    module's configurations nor with the first step in one process."""
    never = [
        "datasets",
        "huggingface_hub",
        "jinja2",
        "pandas",
        "pyarrow",
        "rich",
        "sympy",
        "tensorboard",
        "tiktoken",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor",
        "torchao",
        "transformers",
        "wandb",
    ]
    options = flags({**TINY, "training.steps": 1, "dump_folder": tmp_path})
    code = (
        "import sys\n"
        "from torchtitan.cli.main import main\n"
        "from torchtitan.config.manager import ConfigManager\n"
        "ConfigManager().parse_args('--module llama3 --config debugmodel'.split())\n"
        "assert 'torchtitan.trainer.trainer' in sys.modules\n"
        "print('tokenizers' in sys.modules)\n"
        "from torchtitan.tools import device\n"
        "device._CPU_SECONDS, device._CPU_SIZES = 0.001, (128,)\n"  # as in tests/conftest.py
        f"words = ['train', '--module', 'llama3', '--config', 'debugmodel', *{options}]\n"
        "assert main(words) == 0\n"
        f"print([name for name in {never} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-2:] == ["False", "[]"]
    assert (tmp_path / "metrics.jsonl").stat().st_size  # of the step


@pytest.mark.parametrize("files", [["__init__.py"], ["__init__.py", "cli/__init__.py"]])
def test_other_distribution_with_our_name_is_ignored(tmp_path: Path, files: list[str]):
    """It has our package's name but not our command."""

    def suffices() -> bool:
        code = f"source {PROJECT}/scripts/environment.sh; active_environment_suffices ''"
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(["bash", "-c", code], env=environment, cwd=tmp_path).returncode == 0

    def install(names: list[str]) -> None:
        for name in names:
            (tmp_path / "site/torchtitan" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "site/torchtitan" / name).touch()

    (tmp_path / "bin").mkdir()
    # only installed packages
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    assert not suffices()
    (tmp_path / "site/torchtitan-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site/torchtitan-1.0.dist-info/METADATA").write_text(
        "Name: torchtitan\nVersion: 1.0\n"
    )
    install(files)
    assert not suffices()
    install(["__init__.py", "cli/__init__.py", "cli/main.py"])
    assert suffices()


WALKS = {
    "An option to the line that uses it": 5,
    "A token in a file to the loss": 10,
    "A token in a file to the loss, in a conversation": 18,
    "A save": 8,
    "A new family": 3,
}
"""Maximum number of files in each walkthrough of docs/architecture.md."""


def walks() -> dict[str, list[tuple[Path, list[str]]]]:
    """Walkthroughs in docs/architecture.md: heading → files, and names in them. A second list below
    a heading is for conversations."""
    found: dict[str, list[tuple[Path, list[str]]]] = {}
    heading = ""
    for line in (PROJECT / "docs/architecture.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif match := re.match(r"(\d+)\. `(torchtitan/[\w/]+\.py)`: (.*)", line):
            if match[1] == "1" and heading in found:
                heading += ", in a conversation"
            names = [
                name
                for name in re.findall(r"`([\w.]+)`", match[3])
                if not name.islower() or "_" in name
            ]
            found.setdefault(heading, []).append((PROJECT / match[2], names))
    return found


def test_walkthroughs_name_existing_files_and_names():
    found = walks()
    assert {heading: len(files) for heading, files in found.items()} == WALKS
    for path, names in [pair for files in found.values() for pair in files]:
        tree = tree_of(path)
        for name in names:
            scope: list[ast.stmt] = tree.body
            for part in name.split("."):
                defined = {
                    node.name: node
                    for node in scope
                    if isinstance(node, ast.ClassDef | ast.FunctionDef)
                }
                targets = [
                    target
                    for node in scope
                    if isinstance(node, ast.Assign)
                    for target in node.targets
                ]
                assert part in defined or part in map(ast.unparse, targets), f"{path}: {name}"
                scope = defined[part].body if part in defined else []


GENERATION = (
    "models/flux/",
    "models/dit/",
    "models/common/diffusion.py",
    "components/diffusion/",
    "components/images/",
    "experiments/flow_matching/",
)
"""Parts of the library for image generation."""

OF_OTHER_MODALITIES = re.compile(
    r"[Dd]iffus(ion|ers)|[Ff]low.?[Mm]atching|\b(DiT|FLUX|dit|flux)\b|\bNoTokens|no_tokens"
    r"|\bOwnTokens|\bdivides_samples|\bmodels? without tokens"
)
"""Words of code that only serves models without tokens."""


def seams() -> dict[str, list[str]]:
    """Return the table of docs/extending.md: file → names of its seams."""
    text = (PROJECT / "docs" / "extending.md").read_text()
    section = text.partition("\n## Train a model without tokens\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| `([\w/.]+\.py)` \|", section, flags=re.MULTILINE)
    return {file: re.findall(r"`(?:\w+\.)*(\w+)`", names) for names, file in rows}


def test_few_files_know_models_without_tokens():
    table = seams()
    assert 5 < len(table) < 10
    for file, names in table.items():
        text = (PACKAGE / file).read_text()
        for name in names:
            defined = rf"^ *(class |def |self\.)?{name}(\(|:|\b.* =)"
            assert re.search(defined, text, re.MULTILINE), f"{file}: {name}"
    knowing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if OF_OTHER_MODALITIES.search(path.read_text())
    }
    others = {file for file in knowing if not file.startswith(GENERATION)} - set(table)
    assert others == set()
