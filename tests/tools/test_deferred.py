"""Names of packages that are imported on first use."""

from importlib import import_module

import pytest

from tests.conftest import PROJECT

PACKAGES = [
    ".".join(file.parent.relative_to(PROJECT).parts)
    for file in sorted((PROJECT / "torchtitan").rglob("__init__.py"))
    if "= deferred(" in file.read_text(encoding="utf-8")
]


def test_some_packages_defer_names():
    assert "torchtitan.components.data" in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_exist(package):
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute"):
        module.absent  # noqa: B018
