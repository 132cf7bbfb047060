"""The `tierd` command, one module a subcommand."""
