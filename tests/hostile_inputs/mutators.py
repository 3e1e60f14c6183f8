"""Mutators, which damage a file or make it hostile: functions from content and a generator to new
content."""

import io
import json
import os
import pickle
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

Mutator = Callable[[bytes, random.Random], bytes]

CANARY = "canary"
"""Name of the file, in the current folder, that hostile code would write, and of a module that
writes it."""

LFS_POINTER = (
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456789\n".encode()
)
DEEP = 100_000


class Payload:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object):
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


# Damage
# --------------------------------------------------------------------------------------------------


def emptied(content: bytes, generator: random.Random) -> bytes:
    """Nothing."""
    return b""


def truncated(content: bytes, generator: random.Random) -> bytes:
    """The first part, which ends in the middle of something."""
    end = generator.randrange(len(content) // 4, len(content) * 3 // 4)
    while content[end - 1 : end] in (b"\n", b"}"):
        end -= 1
    return content[:end]


def zeroed(content: bytes, generator: random.Random) -> bytes:
    """Zeros of the same length, which some file systems leave after a power failure."""
    return bytes(len(content))


def garbage(content: bytes, generator: random.Random) -> bytes:
    """Random bytes of the same length."""
    return generator.randbytes(len(content))


def web_page(content: bytes, generator: random.Random) -> bytes:
    """The page that a proxy sends instead of a file."""
    return b"<!DOCTYPE html><html><body>403 Forbidden</body></html>\n"


def lfs_pointer(content: bytes, generator: random.Random) -> bytes:
    """The text that replaces a file in a clone without Git LFS."""
    return LFS_POINTER


def flipped(content: bytes, generator: random.Random) -> bytes:
    """A few bits changed."""
    changed = bytearray(content)
    for _ in range(generator.choice((1, 2, 8))):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def spliced(content: bytes, generator: random.Random) -> bytes:
    """A piece removed, doubled, zeroed, or replaced by random bytes."""
    start = generator.randrange(len(content))
    piece = content[start : start + generator.choice((1, 16, 512))]
    put = generator.choice((b"", piece + piece, bytes(len(piece)), generator.randbytes(len(piece))))
    return content[:start] + put + content[start + len(piece) :]


DESTROYING: tuple[Mutator, ...] = (emptied, truncated, zeroed, garbage, web_page, lfs_pointer)
"""Mutators after which nothing can be a file of the same kind."""

DAMAGING: tuple[Mutator, ...] = (*DESTROYING, flipped, spliced)


# JSON and YAML
# --------------------------------------------------------------------------------------------------


def _nested(opening: str, closing: str) -> Any:
    return _Raw(opening * DEEP + closing * DEEP)


class _Raw(str):
    """Text that goes into a document as it is."""


def _hostile_values(generator: random.Random) -> Any:
    numbers = (
        0,
        -1,
        1,
        0.5,
        2**31,
        2**40,
        2**63,
        10**18,
        -(2**63),
        1e300,
        1e308,
        10**400,
        _Raw("NaN"),
        _Raw("-Infinity"),
    )
    texts = (
        "",
        "\x1b[2J\x1b]0;owned\x07",
        "\x00",
        "\ud800",
        "../../secret.txt",
        "a" * 300,
        ".",
        "/etc/passwd",
        "--dump_folder",
        CANARY,
    )
    classes = (
        f"{CANARY}.Config",
        f"{CANARY}:run",
        "os.system",
        "torchtitan.cli.main.main",
        "a" * 100_000,
        "\u202egnp",
    )
    shapes: tuple[Any, ...] = (None, True, [], {}, [None], {"": None}, [[[]]], {"a": {"b": []}})
    raw = (_Raw("9" * 5000), _nested("[", "]"), _nested('{"a":', "1}").replace("1}1}", "}}"))
    kind = generator.choice((numbers, numbers, texts, classes, shapes, shapes, raw))
    return generator.choice(kind)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container in a document with each of its keys or indices."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        places += [(container, key) for key in keys]
        waiting += [container[key] for key in keys if isinstance(container[key], dict | list)]
    return places


def _change(document: Any, generator: random.Random) -> Any:
    """Replace, remove, or rename one value of a document, which is changed; or replace the
    document."""
    places = _places(document)
    if not places or generator.random() < 0.03:
        return _hostile_values(generator)
    # Long lists, such as a vocabulary, should not draw all of the changes.
    by_container: dict[int, list[tuple[Any, Any]]] = {}
    for container, key in places:
        by_container.setdefault(id(container), []).append((container, key))
    container, key = generator.choice(by_container[generator.choice(list(by_container))])
    action = generator.choice(("replace", "replace", "replace", "remove", "rename", "exchange"))
    if action == "remove":
        del container[key]
    elif action == "rename" and isinstance(container, dict):
        container[generator.choice(("", "\x1b[31m", "__class__", "../x", str(key) * 3))] = (
            container.pop(key)
        )
    elif action == "exchange":
        other, other_key = generator.choice(places)
        container[key] = other[other_key] if not isinstance(other[other_key], dict | list) else None
    else:
        container[key] = _hostile_values(generator)
    return document


def _dumped(document: Any) -> bytes:
    """JSON with `_Raw` texts put in as they are."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            raw.append(str(value))
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(document))
    for number, value in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', value)
    return text.encode()


def changed_json(content: bytes, generator: random.Random) -> bytes:
    """One to three values of a document changed."""
    document = json.loads(content)
    for _ in range(generator.choice((1, 1, 2, 3))):
        if isinstance(document, dict | list):
            document = _change(document, generator)
    return _dumped(document)


def changed_line(content: bytes, generator: random.Random) -> bytes:
    """One line of a JSON Lines file changed."""
    lines = content.splitlines()
    number = generator.randrange(len(lines))
    lines[number] = changed_json(lines[number], generator)
    return b"\n".join([*lines, b""])


def changed_yaml(content: bytes, generator: random.Random) -> bytes:
    """One value of a YAML document changed."""
    return _dumped(_change(yaml.safe_load(content), generator))


def _line(key: str, value: str) -> str:
    return f"{key}: {value}\n"


_BOMB = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]\n" for n in range(12)
)
_YAML = (
    "training: &t\n  steps: *t\n",
    "&a [*a]\n",
    "training: &t {<<: *t}\n",
    _BOMB,
    "[" * 10_000,
    _line("training", "{steps: " + "9" * 5000 + "}"),
    f'!!python/object/apply:os.system ["touch {CANARY}"]\n',
    _line("training", f'{{steps: !!python/object/apply:os.system ["touch {CANARY}"]}}'),
    "training: {steps: 1}\ntraining: {steps: 2}\n",
    'checkpoint: {exclude_from_loading: ["--dump_folder", "elsewhere"]}\n',
    'dump_folder: "--checkpoint.enable"\n',
    "? [a, b]\n: 1\n",
    "null: 1\n",
    "1: {2: 3}\n",
    "--dump_folder: elsewhere\n",
    "training: {steps: 2026-01-01}\n",
    "training: {steps: 0x10, seq_len: 1_0, local_batch_size: 0o7}\n",
    "\x00",
    f"module: {CANARY}\nconfig: run\n",
    f"rewards: ['{CANARY}.py:score']\n",
    f"module: rl\nconfig: debugmodel\nrewards: ['{CANARY}.py:score']\n",
    f"module: rl\nconfig: debugmodel\nrollout: {{function: '{CANARY}:roll'}}\n",
    f"module: llama3\nconfig: debugmodel_sft\ndataloader: {{format: '{CANARY}.py:score'}}\n",
    "metrics: {enable_tensorboard: true, save_tb_folder: ../elsewhere}\n",
    "dataloader: {dataset: 'reference://x'}\n",
    "module: ./\nconfig: run\n",
)


def hostile_yaml(content: bytes, generator: random.Random) -> bytes:
    """A document that misleads, hangs, or overwhelms its reader, alone or after the original."""
    return (content if generator.random() < 0.3 else b"") + generator.choice(_YAML).encode()


# Templates
# --------------------------------------------------------------------------------------------------

_TEMPLATE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor "
    "%}{{ n.x }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor "
    "%}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ "
    "n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor "
    "%}{{ n.x }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ [0] * 10 ** 11 }}",
    "{{ 10 ** 10 ** 9 }}",
    "{{ 'a'|center(10 ** 11) }}",
    "{{ '%099999999999d'|format(1) }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ '%99999999999s' % 'a' }}",
    "{{ 'a'.ljust(10 ** 11) }}",
    "{{ ('a' * 99999).replace('a', 'a' * 99999).replace('a', 'a' * 99999) }}",
    "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "{% set n = namespace(x='aaa') %}{% for i in range(99) %}{% set n.x = n.x|replace('a', 'aaa') "
    "%}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}",
    f"{{{{ self.__init__.__globals__.__builtins__.open('{CANARY}', 'w') }}}}",
    "{% include 'secret.txt' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ '\x1b[2J\x1b]0;owned\x07' }}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ messages[99] }}{{ messages.x.y }}",
    "{% for m in messages %}{{ m.content.x.y.z }}{% endfor %}",
    "{% if %}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "{{ 'a'|" + "|".join(["upper"] * 5000) + " }}",
    "{{ strftime_now('%' * 99999) }}",
    "{{ range(10 ** 18) }}",
    "{{ lipsum(n=10 ** 9) }}",
    "{{ 'a'|wordwrap(-1) }}{{ 1 // 0 }}",
    "{% set messages = none %}",
)


def hostile_template(content: bytes, generator: random.Random) -> bytes:
    """An expression that tries to run code, hang, or overwhelm, alone or among the original
    ones."""
    hostile = generator.choice(_TEMPLATE).encode()
    place = generator.choice((0, len(content)))
    return hostile if generator.random() < 0.4 else content[:place] + hostile + content[place:]


# Pickles
# --------------------------------------------------------------------------------------------------


def _payload(generator: random.Random) -> Any:
    touch = f"touch {CANARY}"
    choices = (
        Payload(os.system, touch),
        Payload(exec, f"open({CANARY!r}, 'w')"),
        Payload(eval, f"open({CANARY!r}, 'w')"),
        Payload(open, CANARY, "w"),
        Payload(__import__, CANARY),
        Payload(Path.touch, Path(CANARY)),
        Payload(torch.load, "payload.pt", "cpu", None),
        Payload(subprocess.call, ["touch", CANARY]),
    )
    return generator.choice(choices)


def hostile_pickle(content: bytes, generator: random.Random) -> bytes:
    """A pickle that runs code, nests, multiplies, or holds something else."""
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    stranger = generator.choice(
        (_payload(generator), {"a": _payload(generator)}, deep, None, 1, {1: 2}, [1] * 10)
    )
    raw = (
        b"(" * DEEP + b"t" * 10 + b".",
        b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
        b"\x8e" + b"\xff" * 8,
    )
    whole = pickle.dumps(stranger, protocol=generator.choice((2, 4)))
    if generator.random() < 0.25:
        return generator.choice(raw)
    return whole


def hostile_archive(content: bytes, generator: random.Random) -> bytes:
    """A file of `torch.save` that runs code when it is unpickled."""
    buffer = io.BytesIO()
    stranger = {
        "tok_embeddings.weight": _payload(generator),
        "x": [1, 2],
    }  # not a tensor, whose name in the file may change
    torch.save(stranger, buffer, _use_new_zipfile_serialization=generator.random() < 0.8)
    return buffer.getvalue()


# safetensors
# --------------------------------------------------------------------------------------------------


def changed_header(content: bytes, generator: random.Random) -> bytes:
    """A safetensors file whose header, or the header's length, is changed."""
    (length,) = struct.unpack("<Q", content[:8])
    if generator.random() < 0.2:
        length = generator.choice((0, 1, length - 1, 2**40, 2**64 - 1))
        return struct.pack("<Q", length) + content[8:]
    header = changed_json(content[8 : 8 + length], generator)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]
