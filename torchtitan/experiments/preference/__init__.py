"""Training on preferences: pairs of answers to one prompt, one of them preferred, or single answers with labels.

    --module preference --config dpo|ipo|simpo|kto --hf_assets_path DIR --dataloader.dataset pairs.jsonl

`torchtitan.components.preference_losses` has the formulas and their sources; docs/post_training.md explains metrics.
"""
