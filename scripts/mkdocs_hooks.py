"""Hooks of the documentation site (mkdocs.yml): pages are written for GitHub, and read on the site
unchanged.

Pages of the repository outside `docs/` appear on the site under `project/`. Relative links lead to
a page of the site, if the site has one, and become plain text otherwise. Lists need no blank line
before them and no four-column indent, and `<details>` may hold Markdown.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PROJECT_PAGES = [
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "RELEASING.md",
    "SECURITY.md",
    "benchmarks/README.md",
]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
ITEM = re.compile(r" *([-*+]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages to the site."""
    for name in PROJECT_PAGES:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate links and lists of one page."""
    here = page.file.src_uri
    path = here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}"

    def site_link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if in_repository == "README.md":
            on_site = "index.md"
        elif in_repository in PROJECT_PAGES:
            on_site = f"project/{in_repository}"
        else:
            on_site = in_repository.removeprefix("docs/")
        if files.get_file_from_path(on_site):
            return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"
        # A file that the site does not show; a target that does not exist stays, so that the build
        # reports it.
        return text if (ROOT / in_repository).exists() else match[0]

    lines: list[str] = []
    fence = indent = previous = ""
    for line in markdown.splitlines():
        if fence:
            lines.append(indent + line if line else line)
            if line.strip() == fence:
                fence = indent = ""
        elif match := re.match(r"( *)(```+|~~~+)", line):
            fence, indent = match[2], "  " if len(match[1]) in (2, 3) else ""
            lines.append(indent + line)
        else:
            if ITEM.match(line) and re.match(r"[^\s#|]", previous) and not ITEM.match(previous):
                lines.append("")
            nested = re.match(r" {2,3}([-*+]|\d+\.) ", line)
            line = re.sub(r"^<details>", '<details markdown="1">', line)
            lines.append(("  " if nested else "") + LINK.sub(site_link, line))
        previous = line
    return "\n".join(lines)
