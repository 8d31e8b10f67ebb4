"""Fusewright makes PyTorch models faster by doing less, then fusing; proves the result and keeps what measured faster.

>>> fast = fusewright.optimize(model, example_inputs)
>>> print(fusewright.explain(fast))
>>> print(fusewright.verify(model, fast, example_inputs))
"""

from fusewright.errors import CaptureError, FusewrightError, ProblemError, UnsupportedError
from fusewright.optimizer import explain, optimize
from fusewright.verification import verify

__version__ = "0.1.0"
__all__ = ["CaptureError", "FusewrightError", "ProblemError", "UnsupportedError", "explain", "optimize", "verify"]
