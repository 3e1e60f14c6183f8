#!/usr/bin/env bash
# Guess: the score of a numeric answer says whether it is right, so a reward above 0 means progress, and
#   spaces around the answer do not matter.
#
# Truth: the rule that most datasets of reasoning-gym 0.1.25 inherit compares text: equal text scores
#   1.0; an answer that contains the right text scores the ratio of the lengths. For `gcd` with the answer
#   "1", the wrong numbers 10, 21 and -1 score 0.5, more than the right answers "1.0", " 1\n" and "The
#   answer is 1." (0.33 and 0.06); 8765431 scores 0.14. Of `chain_sum`, which has a
#   rule of its own, the right number scores 1.0 in each of these forms but the sentence.
#
# What a trainer must do: take only 1.0 as right (accuracy, filters of solved questions, pass@k), strip
#   the answer before scoring it, and look at the dataset's rule before its scores become advantages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet reasoning-gym==0.1.25 2> "$folder/pip" || { cat "$folder/pip"; exit 1; }
cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

import reasoning_gym

print("reasoning-gym", version("reasoning-gym"))


def scored(name, answer_of):
    """Return the scores of forms of the right answer, for the first entry with a one-digit answer."""
    dataset = reasoning_gym.create_dataset(name, size=200, seed=1)
    entry = next(entry for entry in dataset if len(entry["answer"]) == 1)
    scores = {
        form: round(dataset.score_answer(form.format(entry["answer"]), entry), 2)
        for form in answer_of
    }
    print(name, f"(answer {entry['answer']})", scores)
    return list(scores.values())


RIGHT = ["{}", "{}.0", " {}\n", "The answer is {}."]
WRONG = ["{}0", "2{}", "-{}", "876543{}"]
assert scored("gcd", RIGHT) == [1.0, 0.33, 0.33, 0.06]
assert scored("gcd", WRONG) == [0.5, 0.5, 0.5, 0.14]
assert scored("chain_sum", RIGHT)[:3] == [1.0, 1.0, 1.0]
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
