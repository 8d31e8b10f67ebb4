"""The GPUs that a file's kernels run on: how the file recognizes them, and what the compiler is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusewright.kernel import Kernel


@dataclass(frozen=True)
class Architecture:
    """What all of some kernels run on.

    needs  the least compute capability, times ten
    name   the one architecture that they are written for, such as ``"sm_90a"``; then no other capability serves
    """

    needs: int = 0
    name: str = ""

    @property
    def condition(self) -> str:
        """Python that says whether ``device``, a GPU, is one of these."""
        comparison = "==" if self.name else ">="
        return f"torch.cuda.get_device_capability(device) {comparison} ({self.needs // 10}, {self.needs % 10})"

    @property
    def of_device(self) -> str:
        """Python of the number of the architecture that ``device`` is compiled for: ``"90"``, ``"90a"``."""
        number = self.name.removeprefix("sm_")
        return f'"{number}"' if number else '"{}{}".format(*torch.cuda.get_device_capability(device))'

    def among(self, capabilities: Sequence[int]) -> list[str]:
        """The architectures of devices of these capabilities that the kernels run on."""
        return [self.name or f"sm_{n}" for n in capabilities if n == self.needs or (n > self.needs and not self.name)]


def architecture(kernels: Iterable[Kernel]) -> Architecture:
    """What all of `kernels` run on."""
    kernels = list(kernels)
    names = {kernel.arch for kernel in kernels} - {""}
    assert len(names) <= 1, f"no device runs kernels for all of {names}"
    return Architecture(max((kernel.needs for kernel in kernels), default=0), "".join(names))
