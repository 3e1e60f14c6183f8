"""Hooks of the documentation site: links and lists appear as on GitHub."""

import importlib.util
import posixpath
from types import ModuleType, SimpleNamespace

import pytest

from tests.conftest import PROJECT

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "mkdocs_hooks", PROJECT / "scripts/mkdocs_hooks.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(hooks: ModuleType, page: str, markdown: str) -> str:
    """Return the Markdown of a page as mkdocs receives it."""
    ours = {
        path.relative_to(PROJECT / "docs").as_posix() for path in (PROJECT / "docs").rglob("*.md")
    }
    pages = ours | {f"project/{name}" for name in hooks.PROJECT_PAGES}
    files = SimpleNamespace(
        get_file_from_path=lambda path: path if posixpath.normpath(path) in pages else None
    )
    here = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    text: str = hooks.on_page_markdown(markdown, page=here, config=None, files=files)
    return text


@pytest.mark.parametrize(
    ("page", "link", "on_site"),
    [
        ("data.md", "[a](checkpoints.md#format)", "[a](checkpoints.md#format)"),
        ("data.md", "[a](../SECURITY.md)", "[a](project/SECURITY.md)"),
        ("data.md", "[a](../README.md)", "[a](index.md)"),
        ("data.md", "[`a`](../torchtitan/train.py)", "`a`"),
        ("data.md", "[a](../no-such-page.md)", "[a](../no-such-page.md)"),
        (
            "data.md",
            "[a](#here), [b](https://example.org/x.md)",
            "[a](#here), [b](https://example.org/x.md)",
        ),
        ("api/index.md", "[a](../data.md), [b](loss.md)", "[a](../data.md), [b](loss.md)"),
        ("api/index.md", "[a](../../RELEASING.md)", "[a](../project/RELEASING.md)"),
        ("project/CONTRIBUTING.md", "[a](docs/architecture.md), [b](SECURITY.md)", None),
        ("project/benchmarks/README.md", "[a](../docs/data.md#x)", "[a](../../data.md#x)"),
    ],
)
def test_links_point_to_pages_of_the_site(
    hooks: ModuleType, page: str, link: str, on_site: str | None
):
    assert rendered(hooks, page, link) == (on_site or "[a](../architecture.md), [b](SECURITY.md)")


def test_lists_without_blank_line_and_unchanged_code(hooks: ModuleType):
    assert rendered(hooks, "data.md", "Text\n- a\n- b") == "Text\n\n- a\n- b"
    nested = "- a\n  - b\n\n  ```toml\n  [x](../README.md)\n\n    y\n  ```\n- c"
    assert (
        rendered(hooks, "data.md", nested)
        == "- a\n    - b\n\n    ```toml\n    [x](../README.md)\n\n      y\n    ```\n- c"
    )
    code = "```bash\ntext\n- a\n[x](../README.md)\n```"
    assert rendered(hooks, "data.md", code) == code


def test_folded_sections_render_markdown(hooks: ModuleType):
    folded = "<details>\n<summary>All</summary>\n\n| a |\n|---|\n\n</details>"
    assert rendered(hooks, "data.md", folded) == folded.replace(
        "<details>", '<details markdown="1">'
    )
