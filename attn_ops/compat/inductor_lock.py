"""The lock under which Inductor is patched."""

import threading

INDUCTOR_LOCK = threading.RLock()
"""Global, as what it guards: contexts that overlap would put the wrong originals back."""
