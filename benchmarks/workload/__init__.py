"""A whole workload: many requests of random lengths, from the first prompt to the last token."""
