"""`tierd bench plot`: what other measurements printed with `--json`, as pictures."""
