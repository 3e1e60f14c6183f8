"""The equivalence matrix: every parallel layout against the same training in a single process.

`python -m tests.equivalence --help` runs it; `tests/test_equivalence.py` runs parts of it as tests.
"""
