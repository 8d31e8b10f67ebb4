"""The text around a CUDA kernel in a solution file: what gives it shared memory, and its launches."""

from __future__ import annotations

from fusewright.codegen.text import Lines, block
from fusewright.emit import support
from fusewright.emit.kernel_text import KernelText, parameters_of
from fusewright.kernel import Launch

# More dynamic shared memory, or larger clusters, need permission.
_PLAIN_SHARED, _PORTABLE_CLUSTER = 48 << 10, 8


class CudaText(KernelText):
    """Everything a solution file says about a CUDA kernel."""

    target = "cuda"
    says = "CUDA"
    returns = ("const char* ", "ctypes.c_char_p")
    last = ("cudaStream_t stream", "ctypes.c_void_p", "raw_stream(device)")
    alignment = ("16 bytes", "16")
    failure = support.FAILURE

    @property
    def declarations(self) -> Lines:
        """The lines of Python that tell ctypes of the launcher and make the kernel ready."""
        if not self.prepares:
            return super().declarations
        prepare = f"kernels.prepare_{self.kernel.name}"
        return [
            *super().declarations,
            f"{prepare}.restype = ctypes.c_char_p",
            "with torch.cuda.device(device):",
            f'    check("{self.kernel.name}", {prepare}())',
        ]

    def sources(self, among: int) -> list[str]:
        """The constants that are compiled, in order; where several kernels are, their helpers have the same names."""
        own = super().sources(among)
        return own if among == 1 else [f'"namespace of_{self.kernel.name} {{"', *own, '"}"']

    def _launcher(self) -> Lines:
        lines = super()._launcher()
        if not self.prepares:
            return lines
        return [*block(f'extern "C" const char* prepare_{self.kernel.name}()', self._preparation()), "", *lines]

    def _body(self) -> Lines:
        *first, last = (launch for (launch,) in self.launches)
        checked = (f"if (const char* error = failure({launch})) return error;" for launch in first)
        return [*checked, f"return failure({last});"]

    def _called(self, arguments: str) -> Lines:
        launch = f"{self.builder}(device).launch_{self.kernel.name}"
        return [
            f"device = {self.kernel.operands[0]}.get_device()",
            f'check("{self.kernel.name}", {launch}({arguments}))',
        ]

    @property
    def prepares(self) -> bool:
        """Whether a kernel must be given more than what every kernel may have."""
        return any(n.shared > _PLAIN_SHARED or n.cluster > _PORTABLE_CLUSTER for n in self.kernel.launches)

    def _preparation(self) -> list[str]:
        calls = []
        for launch in self.kernel.launches:
            if launch.shared > _PLAIN_SHARED:
                attribute = f"cudaFuncAttributeMaxDynamicSharedMemorySize, {launch.shared}"
                calls.append(f"cudaFuncSetAttribute({launch.entry}, {attribute})")
            if launch.cluster > _PORTABLE_CLUSTER:
                calls.append(f"cudaFuncSetAttribute({launch.entry}, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)")
        checked = [f"if (const char* error = failure({call})) return error;" for call in calls[:-1]]
        return [*checked, f"return failure({calls[-1]});"]

    def _launch(self, launch: Launch) -> list[str]:
        """The call that launches."""
        parameters = parameters_of(self.kernel.source, launch.entry)
        pairs = list(zip(launch.arguments, parameters, strict=True))
        arguments = [self._argument(argument, parameter.name) for argument, parameter in pairs]
        grid = [self._passed(n, name, "int") for n, name in zip(launch.grid, ("blocks", "rows", "layers"), strict=True)]
        while len(grid) > 1 and grid[-1] == "1":
            grid.pop()
        shape = grid[0] if len(grid) == 1 else f"dim3({', '.join(grid)})"
        how = f"{shape}, {launch.threads}, {launch.shared}, stream"
        return [f"launch({launch.entry}, {how}, {', '.join(arguments)})"]
