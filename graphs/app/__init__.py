"""The command line, and what it runs: a model, its parity with Transformers, reports."""
