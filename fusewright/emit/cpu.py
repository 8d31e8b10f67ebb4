"""The text around a CPU kernel in a solution file: calls of its functions in as many threads as there is work for."""

from __future__ import annotations

from fusewright.codegen.text import Lines
from fusewright.emit.kernel_text import KernelText, parameters_of
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.runtime.native import GRAIN


class CpuText(KernelText):
    """Everything a solution file says about a CPU kernel."""

    target = "cpu"
    says = "CPU"
    returns = ("void ", "None")
    last = ("int threads", "ctypes.c_int", "torch.get_num_threads()")
    alignment = ("its element", "tensor.itemsize")

    def __init__(self, kernel: Kernel, suffix: str = "") -> None:
        super().__init__(kernel, suffix)
        if kernel.looks_up:
            self.returns = ("int ", "ctypes.c_int")

    def _launcher(self) -> Lines:
        threaded = any(argument.kind == "threads" for launch in self.kernel.launches for argument in launch.arguments)
        says = [f"// Less than {GRAIN} operations are done in one thread."] if threaded else []
        name = self.kernel.name
        return [f"namespace {name} {{", "", *says, *super()._launcher(), "", f"}}  // namespace {name}"]

    def _launch(self, launch: Launch) -> Lines:
        """The lines of one call."""
        parameters = parameters_of(self.kernel.source, launch.entry)
        arguments = [self._argument(a, p.name) for a, p in zip(launch.arguments, parameters, strict=True)]
        return [f"{'return ' if self.kernel.looks_up else ''}{launch.entry}({', '.join(arguments)});"]

    def _argument(self, argument: Argument, name: str) -> str:
        if argument.kind != "threads":
            return super()._argument(argument, name)
        return f"{self._passed(argument.text, 'work', 'long')} < {GRAIN} ? 1 : threads"

    def _called(self, arguments: str) -> Lines:
        call = f"{self.builder}().launch_{self.kernel.name}({arguments})"
        if not self.kernel.looks_up:
            return [call]
        error, said = self.kernel.outside
        return [f"if {call}:", f'    raise {error.__name__}("{said}")  # as eager does']
