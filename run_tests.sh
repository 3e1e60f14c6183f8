#!/usr/bin/env bash
# Runs the tests; sets itself up on first use. Arguments go to pytest:
#   ./run_tests.sh                    the default tests
#   ./run_tests.sh -m 'not long'      the slow ones too, as .ci/run
#   ./run_tests.sh -m long            tests that take minutes; each has a shorter one of its kind
#   ./run_tests.sh -n 0 tests/components/losses/test_loss.py -k chunk
#                                     some tests, in one process, which starts faster
#   ./run_tests.sh -n 0 --pdb tests/components/losses/test_loss.py
#                                     to debug
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# Each process would compile the library and rewrite the assertions of all tests anew.
unset PYTHONDONTWRITEBYTECODE
# Three processes on two cores, since tests of several processes wait for each other. Each takes a
# third of the tests in their order, so that few fixtures of a module are made twice.
exec python -m pytest -n 3 --dist worksteal --durations=15 -m "not slow and not long" "$@"
