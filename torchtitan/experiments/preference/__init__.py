"""Training on preferences: pairs of answers to one prompt, of which one is preferred.

    --module preference --config dpo --hf_assets_path DIR --dataloader.dataset pairs.jsonl

`dpo` is direct preference optimization (Rafailov et al., arXiv:2305.18290): with the log-probability of an answer under
the trained model less that under a frozen reference, times `beta`, as its reward, the loss of a pair is
-log sigmoid(reward of the chosen answer - reward of the rejected one). Metrics and validation report the mean `margin`
of the rewards, the share of pairs whose chosen answer has the higher one (`preferred`), and both rewards.

The reference has the weights that the run begins from, or those of `--reference.path`; it is sharded like the model and
not in the checkpoints.
"""
