"""Training on preferences: pairs of answers to one prompt, one of them preferred, or single answers with labels.

    --module preference --config dpo|ipo|simpo|kto --hf_assets_path DIR --dataloader.dataset pairs.jsonl

`torchtitan.components.preference_losses` has the formulas and their sources. Metrics and validation report the mean
rewards of the chosen and rejected answers (`rewards/chosen`, `rewards/rejected`), their difference (`rewards/margins`),
the share of pairs whose chosen answer has the higher reward (`rewards/accuracies`), and `kl`: the mean log-ratio of
reference and model per token of the answers, which estimates the divergence if the reference would write them. KTO
reports the rewards of desirable and undesirable answers, and its own estimate of the divergence as `kl`.
"""
