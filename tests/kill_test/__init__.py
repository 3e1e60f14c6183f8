"""The kill test: a training run that is killed again and again, and resumed, against one that is left alone.

`python -m tests.kill_test --help` runs it; `tests/test_kill.py` runs a short form of it as a test. As `--module` of
`torchtitan train`, this package is the run itself.
"""
