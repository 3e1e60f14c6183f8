"""Configurations of other libraries, rewritten as ours: `torchtitan migrate`."""
