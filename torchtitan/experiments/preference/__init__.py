"""Training on preferences: pairs of answers to one prompt, one of them preferred.

    --module preference --config dpo --hf_assets_path DIR --dataloader.dataset pairs.jsonl

`dpo` is direct preference optimization (Rafailov et al., arXiv:2305.18290). The reward of an answer is `beta` times the
difference of its log-probabilities under the trained model and under a frozen reference. The loss of a pair is
-log sigmoid(reward of the chosen answer - reward of the rejected one). Metrics and validation report the mean `margin`
of the rewards, the share of pairs whose chosen answer has the higher reward (`preferred`), and both rewards.

The reference has the initial weights of the run, or the weights in `--reference.path`; it is sharded like the model and
not saved in checkpoints.
"""
