"""Every exception Fusewright raises on purpose: one family, one sentence each.

A message names the operation, the shapes, the cause and the remedy.  `FusewrightError` is a `ValueError`, so a caller
who has never heard of Fusewright still catches it where it catches bad arguments.  Internal invariants use `assert`.
"""


class FusewrightError(ValueError):
    """Anything a user can cause and can mend."""


class CaptureError(FusewrightError):
    """The model cannot be captured whole; it still runs as it did."""


class ProblemError(FusewrightError):
    """A problem file is missing something, or fails while it is loaded."""


class GraphError(FusewrightError):
    """A graph breaks a rule of `fusewright.ir.spec`; the message names the node."""


class UnsupportedError(FusewrightError):
    """An option asks for something this build or this machine does not have."""
