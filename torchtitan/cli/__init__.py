"""The `torchtitan` command: one module per subcommand."""
