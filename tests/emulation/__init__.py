"""Generated CUDA C++ run on a CPU."""

from emulation.build import EmulationError
from emulation.emulate import emulate

__all__ = ["EmulationError", "emulate"]
