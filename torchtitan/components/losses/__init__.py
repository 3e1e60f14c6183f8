"""Losses, each a function of tensors that can be called without a trainer.

- `loss`: the interface of losses, cross entropy in chunks, and its variants.
- `labels`: the label of a token that is not predicted.
- `cross_entropy`: the closed-form gradient of cross entropy in chunks of tokens.
- `log_probs`: log-probabilities of given tokens.
- `entropies`: log-probabilities and entropies of next-token distributions.
- `preference_losses`: DPO and its relatives, KTO, reward models.
- `policy_loss`: policy gradients with clipping.
- `distillation`: divergences from a teacher.
- `token_result`: form of results of a frozen model for each token.
- `load_balance`: penalties and statistics of expert routers.
"""
