"""What the text of a solution file is made of: one draft for every device that it is for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusewright.codegen.aten import Program, attribute
from fusewright.dispatch import Args, Entry, Guard, Kwargs
from fusewright.emit.conditions import Inputs, inputs_of, served
from fusewright.emit.header import called_in
from fusewright.kernel import Kernel
from fusewright.plan import Plan
from fusewright.problem import Problem
from fusewright.schedule.wishes import NO_WISHES, Wishes

# Modules whose parts are found by number, and how a program's text reads one of those.
_LISTS = (nn.Sequential, nn.ModuleList, nn.ParameterList)
_ITEM = re.compile(r"getattr\(((?:self|model)(?:\.\w+|\[\d+\])*), '(\d+)'\)")


@dataclass(frozen=True)
class Draft:
    """Everything that the text of a solution for one device is made of, but for what is known once it has run.

    either_mode  the forward is the same in training and in evaluation mode
    suffix       what sets its names apart where a file is for several devices
    """

    problem: Problem
    model: nn.Module
    args: Args
    kwargs: Kwargs
    entry: Entry
    precision: str = "eager"
    wishes: Wishes = NO_WISHES
    either_mode: bool = False
    target: str = "cuda"
    suffix: str = ""

    @property
    def plan(self) -> Plan:
        """What was done, and why."""
        assert self.entry.plan is not None
        return self.entry.plan

    @property
    def program(self) -> Program:
        """What runs."""
        assert self.entry.runner is not None
        return self.entry.runner.program

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The program's kernels in the order in which they run first."""
        forward = self.program.source.partition("def forward(")[2]
        return tuple(sorted(self.program.kernels, key=lambda kernel: forward.find(f"{kernel.name}(")))

    @property
    def rest(self) -> tuple[str, ...]:
        """The operations that the forward asks PyTorch for by name, views left out."""
        forward = self.program.source.partition("def forward(")[2]
        return tuple(called_in(forward))

    @property
    def guard(self) -> Guard:
        """The calls it serves."""
        assert self.entry.runner is not None
        return self.entry.runner.guard

    @property
    def inputs(self) -> Inputs:
        """Where the forward's parameters hold the program's inputs."""
        return inputs_of(self.model.forward, self.args, self.kwargs)

    @property
    def served(self) -> str:
        """The calls that its kernels serve, in words."""
        mode = "training" if self.model.training else "evaluation"
        modes = "in either mode" if self.either_mode else f"in {mode} mode"
        return f"{served(self.inputs.tensors, self.guard, self.entry.sides)}, {modes}"

    def method(self, name: str) -> str:
        """The name of a method that is ours: one that the model does not use."""
        name += self.suffix
        while hasattr(self.model, name):
            name += "_"
        return name

    def indexed(self, text: str) -> str:
        """`text` with ``self.layers[0]`` for ``getattr(self.layers, '0')``, where these are the same."""

        def item(found: re.Match[str]) -> str:
            modules: Any = self.model
            for name in re.findall(r"\.(\w+)|\[(\d+)\]", found[1]):
                modules = getattr(modules, "".join(name))
            name = found[2]
            same = isinstance(modules, _LISTS) and modules[int(name)] is getattr(modules, name)
            return f"{found[1]}[{name}]" if same else found[0]

        while (changed := _ITEM.sub(item, text)) != text:
            text = changed
        return text

    def reads(self, path: str) -> bool:
        """Whether the program reads the tensor of the model at a dotted path."""
        return bool(re.search(reading(path), self.program.source))


def reading(path: str) -> str:
    """The pattern of the text that reads the tensor of the model at a dotted path."""
    return rf"(?<![\w.]){re.escape(attribute('self', path))}(?!\w)"


def read_paths(drafts: Sequence[Draft]) -> list[str]:
    """The paths of the model's tensors that a program reads, in the order of the model."""
    return [path for path, _ in named_tensors(drafts[0].model) if any(draft.reads(path) for draft in drafts)]


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A model's parameters and buffers by their paths, shared ones under each of them."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
