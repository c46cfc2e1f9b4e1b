"""The rewrites: one class a file."""
