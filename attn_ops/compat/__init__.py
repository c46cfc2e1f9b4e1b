"""Work-arounds for versions of torch; each file is named with the version from which it may go.

`x_until_2_13.py` may be deleted when the oldest torch that we support is 2.13. "until 2.16" means
that 2.15, the newest tried, still needs it. Each file says what it does and how to see that it can
go; everything that calls it imports it by name.
"""
