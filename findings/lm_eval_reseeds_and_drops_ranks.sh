#!/usr/bin/env bash
# Guess: `lm_eval.simple_evaluate` with a model object can be called during training: it changes no
#   state of the run, and returns the results to each process that calls it.
#
# Truth: lm-eval 0.4.13 sets the seeds of random, numpy and torch at each call (0, 1234, 1234), so
#   that a run goes on with the same random numbers, such as dropout's, after every evaluation. In
#   a process whose LOCAL_RANK is not 0, as torchrun sets it, it computes everything and returns
#   None, also for a model that says that it is the only process (rank 0 of 1).
#
# What a trainer must do: keep the states of all generators around an evaluation, and call
# `lm_eval.evaluate`, which does neither, or unset LOCAL_RANK for the call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 lm-eval==0.4.13
cat > "$folder/task.yaml" <<'YAML'
task: two_questions
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
YAML
cat > "$folder/questions.jsonl" <<'JSON'
{"question": "Is 1 below 2?", "answer": 0}
{"question": "Is 2 below 1?", "answer": 1}
JSON
cat > "$folder/try.py" <<'PYTHON'
import random
import sys

import lm_eval
import numpy
import torch
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

print("lm-eval", lm_eval.__version__)


class Yes(LM):
    """Always prefers yes. The base class says that it is rank 0 of 1."""

    def loglikelihood(self, requests, disable_tqdm=False):
        return [(0.0 if "yes" in request.args[1] else -1.0, True) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


tasks = TaskManager(include_path=sys.argv[1], include_defaults=False)
drawn = []
for step in range(2):
    results = lm_eval.simple_evaluate(Yes(), tasks=["two_questions"], task_manager=tasks)
    drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
accuracy = results and results["results"]["two_questions"]["acc,none"]
print("accuracy:", accuracy, "; drawn after both evaluations:", drawn)
assert drawn[0] == drawn[1]
assert accuracy == (0.5 if sys.argv[2] == "0" else None)
PYTHON
cd "$folder"
for rank in 0 1; do
    HF_HUB_OFFLINE=1 LOCAL_RANK=$rank venv/bin/python try.py "$folder" $rank 2>/dev/null
done
echo "as described"
