"""What the text of a solution file is made of: one draft for every device that it is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn

from fusewright.codegen.aten import Program, attribute
from fusewright.dispatch import Args, Entry, Guard, Kwargs
from fusewright.emit.conditions import Inputs, inputs_of, served
from fusewright.plan import Plan
from fusewright.problem import Problem
from fusewright.schedule.wishes import NO_WISHES, Wishes


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

    def reads(self, path: str) -> bool:
        """Whether the program reads the tensor of the model at a dotted path."""
        return bool(re.search(rf"(?<![\w.]){re.escape(attribute('self', path))}(?!\w)", self.program.source))


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A model's parameters and buffers by their paths, shared ones under each of them."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
