#!/usr/bin/env bash
# Guess: rouge-score, which evaluation harnesses call for ROUGE, counts common words in any script: a text
#   scores 1 against itself, and texts that differ by a sign score below 1.
#
# Truth: in rouge-score 0.1.2, the default tokenizer lowers the text and replaces everything but ASCII letters
#   and digits with spaces. A Russian, Greek, Hindi or Chinese text scores 0 against itself; of a mixed text,
#   the Latin words and digits alone decide, so that a wrong answer with the right year scores 1. -5 equals
#   5, and C++ equals C.
#
# What a trainer must do: pass a tokenizer to `RougeScorer` for texts that are not English, also where ROUGE
#   is a reward, and read a ROUGE of 0 in other languages as not measured.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet rouge-score==0.1.2
cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

from rouge_score.rouge_scorer import RougeScorer


class Words:
    """Splits at spaces."""

    def tokenize(self, text):
        return text.lower().split()


print("rouge-score", version("rouge-score"))
default = RougeScorer(["rougeL"])
spaces = RougeScorer(["rougeL"], tokenizer=Words())
ROWS = [
    # reference, answer, default, split at spaces
    ("Кошка сидит на ковре", "Кошка сидит на ковре", 0, 1),
    ("Η γάτα κάθεται", "Η γάτα κάθεται", 0, 1),
    ("बिल्ली चटाई पर बैठी है", "बिल्ली चटाई पर बैठी है", 0, 1),
    ("猫 在 垫子 上", "猫 在 垫子 上", 0, 1),
    ("Пушкин родился в 1799", "Гоголь умер в 1799", 1, 0.5),
    ("it is -5", "it is 5", 1, 2 / 3),
    ("written in C++", "written in C", 1, 2 / 3),
    ("The CAT sat", "the cat sat", 1, 1),
]
for reference, answer, expected, of_words in ROWS:
    found = default.score(reference, answer)["rougeL"].fmeasure
    split = spaces.score(reference, answer)["rougeL"].fmeasure
    print(f"{answer!r} for {reference!r}: {found:.3f}, split at spaces {split:.3f}")
    assert abs(found - expected) < 1e-9
    assert abs(split - of_words) < 1e-9
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py
