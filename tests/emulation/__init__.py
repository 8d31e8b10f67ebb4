"""Generated CUDA C++ run on a CPU."""

from emulation.emulate import EmulationError, emulate

__all__ = ["EmulationError", "emulate"]
