"""lm-eval parses the 14,000 files of its own tasks for each `TaskManager`, ten seconds of processor
time. Tests and their processes share what it found in them."""

import hashlib
import os
import pickle
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tests.conftest import PROJECT

CACHE = PROJECT / ".pytest_cache"


def share_task_files() -> None:
    """Let lm-eval take the contents of its own files from a file in `CACHE`, which the first call
    writes; do nothing without lm-eval. It holds what lm-eval's function returned for each file, and
    belongs to a version of lm-eval in a folder."""
    if not find_spec("lm_eval"):
        return
    from importlib.metadata import version

    from lm_eval.tasks import _index, _yaml_loader

    if _index.load_yaml is not _yaml_loader.load_yaml:
        return  # shared already
    own = Path(_index.__file__).parent
    place = hashlib.sha256(str(own).encode()).hexdigest()[:16]
    file = CACHE / f"lm-eval-{version('lm-eval')}-{place}.pickle"
    if not file.exists():
        _write(file, own)
    contents: Mapping[str, bytes] = pickle.loads(file.read_bytes())

    def load(path: Path, *, resolve_func: bool = True, recursive: bool = True) -> dict[str, Any]:
        known = contents.get(str(path)) if recursive and not resolve_func else None
        if known is None:
            return _yaml_loader.load_yaml(path, resolve_func=resolve_func, recursive=recursive)
        found: dict[str, Any] = pickle.loads(known)
        return found

    _index.load_yaml = load


def _write(file: Path, own: Path) -> None:
    from lm_eval.tasks import _index

    contents = {}
    for path in _index.TaskIndex._iter_yaml_files(own):
        try:
            found = _index.load_yaml(path, resolve_func=False, recursive=True)
        except Exception:
            continue  # lm-eval skips it, too; it reads the file again and finds the same error
        contents[str(path)] = pickle.dumps(found)
    file.parent.mkdir(exist_ok=True)
    # Other workers of pytest may write it at the same time.
    with NamedTemporaryFile(dir=file.parent, delete=False) as written:
        pickle.dump(contents, written)
    os.replace(written.name, file)
