#!/usr/bin/env bash
# Guess: the score of lighteval's tasks `aimo_progress_prize_1` and `math:algebra` to `math:precalculus`
#   (competition mathematics) rises with the number of right answers.
#
# Truth: in lighteval 0.13, that of AIMO takes the text in the last \boxed{} of reference and answer, and an
#   empty text if there is none. The references are plain numbers, so they become empty: an answer without
#   a box is right, whatever it says, and \boxed{52} is wrong where 52 is the reference. The tasks of
#   MATH name the same function for their majority of four (maj@n), but compare the whole text with
#   the whole reference solution: each answer but this text scores 0, right ones included. A model that
#   learns to box its answers falls from 1 to 0 on the first, and stays at 0 on the others.
#
# What a trainer must do: score a right answer in other words, a wrong one and nonsense with a task's
#   metric before it decides between checkpoints; and use math-verify or tasks of extractive_match instead.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lighteval==0.13.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

from lighteval.models.model_output import ModelResponse
from lighteval.tasks.tasks.aimo import task as aimo
from lighteval.tasks.tasks.math import TASKS_TABLE

print("lighteval", importlib.metadata.version("lighteval"))


def scores(task, row, texts):
    [metric], document = task.metrics, task.prompt_function(row)
    found = []
    for text in texts:
        answers = ModelResponse(text=[text] * 4)  # those of MATH are a majority of four
        [score] = metric.compute_sample(doc=document, model_response=answers).values()
        found.append(int(score))
    print(f"{task.name}, reference {document.choices[0]!r}:", dict(zip(texts, found)))
    return found


answers = ["52", r"It is \boxed{52}.", r"It is \boxed{7}.", "It is 7.", "I do not know."]
assert scores(aimo, {"problem": "?", "answer": 52}, answers) == [1, 0, 0, 1, 1]
solution = r"So $x$ is \boxed{52}."
tasks = [task for task in TASKS_TABLE if task.name.startswith("math:")]
assert len(tasks) == 7
for task in tasks:
    found = scores(task, {"problem": "?", "solution": solution}, [solution, *answers])
    assert found == [1, 0, 0, 0, 0, 0]
print("as described")
PYTHON
