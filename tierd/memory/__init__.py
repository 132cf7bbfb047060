"""Host memory: what the machine has, and the chunks that pools claim of it."""
