"""The kill test: compare a run that is repeatedly killed and resumed with an uninterrupted run.

`python -m tests.kill_test --help` runs it; `tests/test_kill.py` runs a short form of it as a test.
As `--module` of `torchtitan train`, this package is the run itself.
"""
