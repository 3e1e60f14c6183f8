"""The command `torchtitan`: one module per sub-command."""
