"""The conformance suite of backends, for ours and for those of other packages.

    from attn_ops.testing import check_backend

    check_backend(BACKEND)

Its cases come from the backend's declaration and are compared with a float64 reference. It needs
torch alone; `import attn_ops` does not import it.
"""

from attn_ops.testing.calls import Case, make_case
from attn_ops.testing.suite import ConformanceCase, check_backend, conformance_cases

__all__ = ["Case", "ConformanceCase", "check_backend", "conformance_cases", "make_case"]
