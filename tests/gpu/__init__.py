"""A package, so that its test_session.py and the one in tests/graphs have different names."""
