#!/usr/bin/env bash
# Guess: MLflow returns a metric that was logged as infinite as infinite, as it returns NaN as NaN.
#
# Truth: MLflow 3.17 with a database stores the largest double, 1.797e308, in its place, and returns
#   that. `math.isinf` is false for it, the smallest or largest loss of a diverged run is a number,
#   and a chart of the run is scaled to it.
#
# What a trainer must do: log NaN in place of infinity, or leave the value out, so that a run that
#   diverged has no finite loss at that step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 sqlparse
cat >"$folder/try.py" <<'PYTHON'
import logging
import math

import mlflow

logging.disable(logging.INFO)
client = mlflow.MlflowClient("sqlite:///runs.db")
run = client.create_run(client.create_experiment("losses")).info.run_id
for step, loss in enumerate([2.5, math.inf, -math.inf, math.nan]):
    client.log_metric(run, "loss", loss, step=step)
losses = [metric.value for metric in client.get_metric_history(run, "loss")]
print(f"mlflow {mlflow.__version__}: logged 2.5, inf, -inf, nan; returned {losses}")
assert losses[0] == 2.5 and math.isnan(losses[3]), losses
assert losses[1] == -losses[2] and 1.797e308 < losses[1] < math.inf, losses
print("as described")
PYTHON
cd "$folder" && venv/bin/python try.py
