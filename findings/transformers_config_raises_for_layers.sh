#!/usr/bin/env bash
# Guess: `getattr(config, "head_dim", None)` and `hasattr(config, "head_dim")` are safe on a
#   configuration of transformers, and what `config.to_dict()` has holds for all layers.
#
# Truth: in transformers 5.23 the sizes that differ between layers cannot be read from the
#   configuration: not only the attribute, but also `getattr` with a default and `hasattr` raise
#   AmbiguousGlobalPerLayerAttributeError, which is a RuntimeError, not an AttributeError: for
#   head_dim of every Gemma 4, for num_attention_heads of Step 3.7. `to_dict()["head_dim"]` is
#   one value; other layers' are in `per_layer_config`.
#
# What a trainer must do: read sizes from `config.per_layer_config` where `is_heterogeneous`; limits
# of tensor parallelism, of caches and of FLOPs counts must hold for each layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import transformers
from transformers import CONFIG_MAPPING

print("transformers", transformers.__version__)
other_heads = {index: {"num_attention_heads": 96} for index in range(45) if index % 4}
CONFIGS = {
    "head_dim": CONFIG_MAPPING["gemma4_text"](),
    "num_attention_heads": CONFIG_MAPPING["step3p7"](
        text_config={"per_layer_config": other_heads}
    ).get_text_config(),
}
EXPECTED = {"head_dim": (256, {256, 512}), "num_attention_heads": (64, {64, 96})}


def outcome(read):
    try:
        return read()
    except Exception as error:
        return f"{type(error).__name__}, an AttributeError: {isinstance(error, AttributeError)}"


for name, config in CONFIGS.items():
    default = outcome(lambda: getattr(config, name, None))
    present = outcome(lambda: hasattr(config, name))
    of_layers = {getattr(layer, name) for layer in config.per_layer_config}
    print(f"{type(config).__name__}.{name}: getattr with a default: {default}; hasattr: {present}")
    print(f"  to_dict: {config.to_dict()[name]}; layers: {sorted(of_layers)}")
    raised = "AmbiguousGlobalPerLayerAttributeError, an AttributeError: False"
    assert default == present == raised
    assert (config.to_dict()[name], of_layers) == EXPECTED[name]
print("as described")
PYTHON
