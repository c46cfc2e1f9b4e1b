"""How large the KV cache of a session is, and what was measured to know it."""
