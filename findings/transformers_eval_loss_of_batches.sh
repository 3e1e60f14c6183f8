#!/usr/bin/env bash
# Guess: Trainer's eval_loss is the mean over the tokens of the evaluation data, as its training loss
#   is over the tokens of a step since the fix of gradient accumulation.
#
# Truth: transformers 5.23 repeats the mean of each batch for each of its rows, and takes the mean of
#   these numbers: a token counts less in a batch with more tokens. So eval_loss, perplexity and the
#   choice of the best checkpoint depend on per_device_eval_batch_size and on the order of the rows.
#   With short answers beside long ones, the difference is not small.
#
# What a trainer must do: sum losses and valid tokens over batches and ranks, and divide once; compare
#   losses of two runs of Trainer only with equal batch size and order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PYTHON'
import logging
import sys
import warnings

import torch
import torch.nn.functional as F
import transformers

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
print("transformers", transformers.__version__)
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, pad_token_id=0,
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(CONFIG)
ROWS = []
for n_trained in (1, 30, 2, 30, 1, 30, 2, 30):
    tokens = torch.randint(1, 64, (32,))
    labels = F.pad(tokens[32 - n_trained :], (32 - n_trained, 0), value=-100)
    ROWS.append({"input_ids": tokens, "labels": labels})
# The model knows the long answers, as one knows answers with many tokens that follow from others.
LONG = {key: torch.stack([row[key] for row in ROWS[1::2]]) for key in ROWS[0]}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(60):
    model(**LONG).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trainer(batch_size, **options):
    arguments = transformers.TrainingArguments(
        sys.argv[1], per_device_eval_batch_size=batch_size, report_to=[], use_cpu=True,
        disable_tqdm=True, **options,
    )
    made = transformers.Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS)
    made.remove_callback(transformers.PrinterCallback)
    return made


with torch.no_grad():
    logits = model(torch.stack([row["input_ids"] for row in ROWS])).logits[:, :-1]
labels = torch.stack([row["labels"] for row in ROWS])[:, 1:]
of_tokens = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
losses = {size: trainer(size).evaluate()["eval_loss"] for size in (1, 2, 8)}
print(f"mean over tokens {of_tokens:.4f}; eval_loss by batch size {losses}")
assert abs(losses[8] / of_tokens - 1) < 1e-4
assert losses[1] > 2 * of_tokens, "each row counts as much as another one"
in_training = {}
for size, steps in ((8, 1), (1, 8)):
    options = {"gradient_accumulation_steps": steps, "max_steps": 1, "learning_rate": 0.0}
    run = trainer(8, per_device_train_batch_size=size, save_strategy="no", **options)
    in_training[size] = run.train().training_loss
print(f"training loss by size of a micro-batch {in_training}")
assert all(abs(loss / of_tokens - 1) < 1e-4 for loss in in_training.values())
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/run"
