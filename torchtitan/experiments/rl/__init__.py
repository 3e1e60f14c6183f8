"""Reinforcement learning: the model samples answers, and learns from their rewards.

    --module rl --config grpo --hf_assets_path DIR --dataloader.dataset prompts.jsonl --rewards my_rewards.py:score

A step samples `--rollout.group_size` answers to each prompt with the run's own weights, rates them, and updates the
weights once or more. `--policy.method` selects GRPO, Dr. GRPO, DAPO, RLOO or GSPO
(`torchtitan.components.policy_loss.METHODS`); `--module ppo` has a critic.
"""
