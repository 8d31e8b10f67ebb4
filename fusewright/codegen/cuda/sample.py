"""CUDA C++ of sample programs: under way."""

from __future__ import annotations

from fusewright.codegen.kernel import Kernel
from fusewright.schedule.sample import SampleProgram


def kernel(program: SampleProgram, name: str, reference: str = "") -> Kernel:
    """The stand-alone kernel: one block per sample."""
    raise NotImplementedError
