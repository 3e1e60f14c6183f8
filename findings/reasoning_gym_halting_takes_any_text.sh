#!/usr/bin/env bash
# Guess: reasoning-gym's `score_answer` of a question with the answers True and False gives 1.0 to the
#   right one and 0.0 to the other.
#
# Truth: in reasoning-gym 0.1.25, `game_of_life_halting` compares `bool(answer)` with
#   `bool(entry["answer"])`, and both are strings, so every answer that is not empty scores 1.0: True,
#   False and "I do not know" alike. A policy learns to answer anything, and the reward curve says that
#   it solved the task. Other datasets compare as expected (`circuit_logic`, `syllogism` in the list
#   below).
#
# What a trainer must do: score a wrong answer and nonsense beside the right one on every dataset of an
#   environment before training, and refuse a reward that is the same for all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet reasoning-gym==0.1.25 2> "$folder/pip" || { cat "$folder/pip"; exit 1; }
cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

import reasoning_gym

OTHER = {"True": "False", "False": "True", "Yes": "No", "No": "Yes", "0": "1", "1": "0"}
print("reasoning-gym", version("reasoning-gym"))
for name in ("game_of_life_halting", "circuit_logic", "syllogism"):
    dataset = reasoning_gym.create_dataset(name, size=8, seed=1)
    entries = [dataset[index] for index in range(8)]
    scores = {
        "right": [dataset.score_answer(entry["answer"], entry) for entry in entries],
        "wrong": [dataset.score_answer(OTHER[entry["answer"]], entry) for entry in entries],
        "nonsense": [dataset.score_answer("I do not know", entry) for entry in entries],
    }
    print(name, sorted({entry["answer"] for entry in entries}), scores)
    assert set(scores["right"]) == {1.0}
    if name == "game_of_life_halting":
        assert {entry["answer"] for entry in entries} == {"True", "False"}
        assert set(scores["wrong"]) == set(scores["nonsense"]) == {1.0}
    else:
        assert max(scores["wrong"] + scores["nonsense"]) < 0.1
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
