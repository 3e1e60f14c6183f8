#!/usr/bin/env bash
# Guess: `from_pretrained(folder)` gives float32 weights unless `dtype` says otherwise, and
#   TrainingArguments(bf16=True) trains float32 weights with products in bfloat16 (mixed precision), as with
#   transformers 4.
#
# Truth: transformers 5.23 opens a folder in the type of its files, which is bfloat16 for nearly every
#   published model, and Trainer trains the weights in this type: no float32 copy exists, with bf16=True or
#   without. bfloat16 has 8 bits, so a step that is smaller than about a 500th of a weight is rounded
#   away. With AdamW and a usual rate of fine-tuning (1e-5), most weights here are the old bits after ten
#   steps, the norms all of them; in float32, all change.
#
# What a trainer must do: open weights that it trains with dtype=torch.float32 (an adapter's base may stay as
#   it is), or use an optimizer that rounds stochastically or keeps a float32 copy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PYTHON'
import sys

import torch
import transformers

print("torch", torch.__version__, "transformers", transformers.__version__)
folder = sys.argv[1]
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, pad_token_id=None, dtype="bfloat16",
)
torch.manual_seed(0)
tokens = torch.randint(64, (64, 32))
ROWS = [{"input_ids": row, "labels": row} for row in tokens]
transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(f"{folder}/base")


def trained(**options):
    """Return the parts of the matrices' and of the norms' values that ten steps change."""
    model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/base", **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = transformers.TrainingArguments(
        f"{folder}/run", bf16=True, use_cpu=True, max_steps=10, learning_rate=1e-5, report_to=[],
        save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True, logging_strategy="no",
    )
    transformers.Trainer(model=model, args=args, train_dataset=ROWS).train()
    pairs = list(zip(before, model.parameters(), strict=True))
    kinds = [[pair for pair in pairs if pair[0].dim() == n] for n in (2, 1)]
    changed = [
        sum((old != new).sum().item() for old, new in kind) / sum(old.numel() for old, _ in kind)
        for kind in kinds
    ]
    return {parameter.dtype for parameter in model.parameters()}, *changed


for name, options in (("default", {}), ("dtype=torch.float32", {"dtype": torch.float32})):
    dtypes, matrices, norms = trained(**options)
    print(f"{name}: {dtypes}, changed: {matrices:.0%} of matrices, {norms:.0%} of norms")
    if options:
        assert dtypes == {torch.float32} and matrices > 0.98 and norms > 0.98
    else:
        assert dtypes == {torch.bfloat16} and matrices < 0.5 and norms == 0
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"
