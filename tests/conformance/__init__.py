"""One suite for every backend: its cases come from the support declarations."""
