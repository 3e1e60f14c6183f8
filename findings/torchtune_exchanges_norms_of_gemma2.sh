#!/usr/bin/env bash
# Guess: Gemma 2 in torchtune, with weights that its own checkpointer loads from Hugging Face's files,
#   computes what transformers computes.
#
# Truth: torchtune 0.6.1 gives the norm after the feed-forward network of Hugging Face's files to
#   `mlp_norm`, which it applies before that network, and the norm before it to `mlp_scale`, which it
#   applies after. Its logits are others; with both exchanged, they are close to transformers'.
#
# What a trainer must do: not read torchtune's names of Gemma 2 as the model that torchtune trained
#   without a choice of its user; a model fine-tuned with exchanged norms is another one in transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchao==0.14.1 torchtune==0.6.1 transformers==5.23.0
cat > "$folder/try.py" <<'PYTHON'
import sys

import torch
import torchtune
import transformers
from torchtune.models.gemma2 import gemma2
from torchtune.training import FullModelHFCheckpointer

folder, n_layers = sys.argv[1], 2
print("torchtune", torchtune.__version__, "transformers", transformers.__version__)
config = transformers.Gemma2Config(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=n_layers,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
model.save_pretrained(f"{folder}/model")
loader = FullModelHFCheckpointer(
    f"{folder}/model", ["model.safetensors"], "GEMMA2", f"{folder}/out"
)
weights = loader.load_checkpoint()["model"]
theirs = gemma2(
    vocab_size=96, num_layers=n_layers, num_heads=4, head_dim=16, num_kv_heads=2, embed_dim=32,
    intermediate_dim=48, max_seq_len=128, query_pre_attn_scalar=config.query_pre_attn_scalar,
).eval()
tokens = torch.arange(40).reshape(2, 20)


@torch.no_grad()
def difference(weights):
    theirs.load_state_dict(weights)
    expected, logits = model(tokens).logits, theirs(tokens)
    logits = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
    return ((logits - expected).abs().max() / expected.abs().max()).item()


exchanged = dict(weights)
for layer in range(n_layers):
    pair = [f"layers.{layer}.{name}.scale" for name in ("mlp_norm", "mlp_scale")]
    exchanged |= {pair[0]: weights[pair[1]], pair[1]: weights[pair[0]]}
as_loaded, after = difference(weights), difference(exchanged)
print(f"largest difference, relative: as loaded {as_loaded:.3f}, exchanged {after:.3f}")
assert as_loaded > 0.1 > 0.05 > after
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder"
