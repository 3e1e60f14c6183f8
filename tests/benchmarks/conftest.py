"""The benchmarks are commands; put their folder on the import path, as running one does."""

import sys

from tests.conftest import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))
