#!/usr/bin/env bash
# Guess: `parse_judge_choice` of verifiers, with which its judges read a verdict such as A (right) or B (wrong),
#   finds the letter in a sentence, or returns None.
#
# Truth: verifiers 0.4 writes the text in capitals and takes the last single A, B or C. The article "a" is an A:
#   "The response is B, since it gives a wrong year." is A, as is "B) a different number". With ReferenceJudge
#   and the labels A and B, an explained refusal is the full reward, and the longer a judge
#   explains, the more answers are right. A verdict alone ("B") is read as it is, and so is a last line
#   "FINAL ANSWER: B"; the labels yes and no have no such article, but "no, I would not say yes" is yes.
#
# What a trainer must do: ask the judge for a line "FINAL VERDICT: B", choose labels that are no words
#   (CORRECT, INCORRECT), and read explanations of wrong answers through the parser before training.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q verifiers==0.4.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

from verifiers.v1 import parse_judge_choice
from verifiers.v1.judge import JudgeResponse
from verifiers.v1.judges.reference import ReferenceJudge, ReferenceJudgeConfig

print("verifiers", importlib.metadata.version("verifiers"))
SENTENCES = [
    "The response is B, since it gives a wrong year.",
    "B) a different number",
    "I choose B. It is a mistake.",
    "Verdict: this is a B",
]
for sentence in SENTENCES:
    print(f"{sentence!r}:", parse_judge_choice(sentence))
    assert parse_judge_choice(sentence) == "A"
for sentence in ("B", "It is a mistake.\nFINAL ANSWER: B", "B, as the year differs."):
    assert parse_judge_choice(sentence) == "B"

letters = ReferenceJudge(ReferenceJudgeConfig(choices=("A", "B")))
rewards = [letters.parse(JudgeResponse(text=text)) for text in ("B", *SENTENCES)]
print("rewards of B:", rewards)
assert rewards == [0.0, 1.0, 1.0, 1.0, 1.0]
words = ReferenceJudge(ReferenceJudgeConfig())
assert words.parse(JudgeResponse(text="The answer is no.")) == 0
assert words.parse(JudgeResponse(text="no, I would not say yes")) == 1
print("as described")
PYTHON
