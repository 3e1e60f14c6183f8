"""The container file: lint, the files that it copies, and the version of its image. Building it needs the image."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.test_packaging import pins

FILE = PROJECT / "Containerfile"


@pytest.fixture(scope="module")
def hadolint() -> str:
    places = [sysconfig.get_path("scripts"), *(str(Path(one, "bin")) for one in sys.path)]
    found = shutil.which("hadolint") or shutil.which("hadolint", path=":".join(places))
    return found or pytest.skip("hadolint is not installed")


def lint(hadolint: str, text: str) -> str:
    result = subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


def test_container_file_is_linted(hadolint: str):
    text = FILE.read_text()
    assert lint(hadolint, text) == ""
    assert "DL3000" in lint(hadolint, text.replace("WORKDIR /work\n", "WORKDIR work\n"))


def test_copied_files_exist_and_are_sent():
    """The build sends what .dockerignore does not leave out."""
    copied = [
        line.split()[1:-1] for line in FILE.read_text().splitlines() if line.startswith("COPY")
    ]
    names = {name for line in copied for name in line}
    sent = re.findall("^!(.+)$", (PROJECT / ".dockerignore").read_text(), re.MULTILINE)
    assert names == {*sent} and all((PROJECT / name).exists() for name in names)


def test_image_has_the_pinned_torch():
    (version,) = re.findall(r"^ARG IMAGE=.*/pytorch:([\d.]+)-cuda.*-devel$", FILE.read_text(), re.M)
    assert version == pins()["torch"]
