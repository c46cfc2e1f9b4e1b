"""A package, so that its files import the oracle beside them."""
