"""Work-arounds for versions of torch; each file is named with the version from which it may go.

`x_until_2_13.py` may be deleted when the oldest torch that we support is 2.13. "until 2.16": 2.15
still needs it, or was not tried. Each file says what it does, which versions need it and how to see
that it can go. `torch_version`, `inductor_lock` and `cuda_driver` stay as long as something uses
them.
"""
