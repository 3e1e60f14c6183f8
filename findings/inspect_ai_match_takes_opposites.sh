#!/usr/bin/env bash
# Guess: inspect-ai's scorer `match()`, which wants the target at the end of the answer, compares words or
#   numbers, and `match(numeric=True)` finds the number in the usual ways to write it.
#
# Truth: in inspect-ai 0.3.285, `match()` asks whether the text ends with the letters of the target, so
#   "disagree" is correct for "agree", "invalid" for "valid", and 15, 3.5 and -5 for 5: labels that contain
#   each other score above chance for a model that always gives the longer one. With `numeric=True`, whole
#   numbers are compared and 1,000 equals 1e3, but `\boxed{5}` and `5%` are incorrect for 5.
#
# What a trainer must do: score labels with `exact()` or a pattern, try opposite labels on the scorer
#   before it decides between checkpoints, and take a number out of its box first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet inspect-ai==0.3.285
cat > "$folder/try.py" <<'PYTHON'
import asyncio
from importlib.metadata import version

from inspect_ai.model import ModelName, ModelOutput
from inspect_ai.scorer import CORRECT, INCORRECT, Target, exact, match
from inspect_ai.solver import TaskState


def score(scorer, output, target):
    state = TaskState(ModelName("mockllm/model"), 1, 1, "question", [])
    state.output = ModelOutput.from_content("mockllm/model", output)
    return asyncio.run(scorer(state, Target(target))).value


TEXTS = [("disagree", "agree"), ("invalid", "valid"), ("not true", "true"), ("It is 15", "5"), ("3.5", "5")]
NUMBERS = {
    CORRECT: [("It is 5.", "5"), ("$1,000", "1000"), ("1e3", "1000"), ("**5**", "5")],
    INCORRECT: [("It is 15", "5"), ("-5", "5"), (r"\boxed{5}", "5"), ("5%", "5")],
}
print("inspect-ai", version("inspect-ai"))
for output, target in TEXTS:
    found = score(match(), output, target), score(exact(), output, target)
    print(f"{output!r} for {target!r}: match {found[0]}, exact {found[1]}")
    assert found == (CORRECT, INCORRECT)
for expected, pairs in NUMBERS.items():
    for output, target in pairs:
        found = score(match(numeric=True), output, target)
        print(f"{output!r} for {target!r}: numeric {found}")
        assert found == expected
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py
