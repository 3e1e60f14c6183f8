"""Proximal policy optimization: reinforcement learning with a value head on the policy, in place of groups.

--module ppo --config ppo --hf_assets_path DIR --dataloader.dataset prompts.jsonl --rewards my_rewards.py:score
"""
