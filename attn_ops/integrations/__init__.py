"""Bridges to model libraries. Each is imported by name, so none of them is needed."""
