"""Fused operators as benchmarks combine them: a convolution or a linear layer, what follows it, and a shape of input.

Rows 1 to 100 were written from memory of which operators and sizes such benchmarks combine, 101 to 103 for chains
behind strided transposed convolutions, 104 to 128 for what there is without a layer, or with little: losses, norms
that are spelled out, gates, rotary embeddings, attention by `torch.einsum`; the last ones for elements that only move,
further losses, and blocks of common networks.  Each row is written as a problem file, as a user would write it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch.nn.functional as F

Shape = tuple[int, ...]

# A number of its own, on the CPU wherever the model is, as the view of a parameter stays there.
NUMBER = "nn.Parameter(torch.randn(1)).squeeze()"
_LAYERS = {"conv": "nn.Conv{n}d", "convT": "nn.ConvTranspose{n}d", "linear": "nn.Linear"}
_OPTIONS = {"s": "stride", "p": "padding", "o": "output_padding"}


@dataclass(frozen=True)
class Row:
    """One model.

    layer     kind, channels (from-to), kernel, stride, padding, output padding: ``convT2d 64-64 k3 s2 p1 o1``
    chain     what follows, as Python: of the layer's output `y`, of the input `x`, of `layer` where it is not first;
              steps are separated by semicolons.  `b` and `m` are parameters with one number per channel
    shape     of the input
    held      what else the model has by name: the shape of a parameter, another layer, or the Python that makes it
    training  whether batch norms use the statistics of the batch
    given     shapes of further inputs, by name: what a model is called with is no parameter, of which much could be
              computed ahead
    """

    index: int
    layer: str
    chain: str
    shape: Shape
    held: dict[str, Shape | str] = field(default_factory=dict)
    training: bool = False
    given: dict[str, Shape] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layer}, {self.chain}" if self.layer else self.chain

    def divided(self, by: int) -> Row:
        """With a batch so many times smaller, of at least two samples."""
        batch = min(self.shape[0], max(2, self.shape[0] // by))
        given = {name: (batch, *shape[1:]) for name, shape in self.given.items()}
        return replace(self, shape=(batch, *self.shape[1:]), given=given)

    @property
    def inputs(self) -> tuple[Shape, ...]:
        """Shapes of all inputs."""
        return self.shape, *self.given.values()

    def source(self) -> str:
        """The text of a problem file."""
        held = {"layer": self.layer, **self._numbers(), **self.held} if self.layer else self.held
        *steps, last = self.chain.split("; ")
        if self.layer and "layer(" not in self.chain:
            steps = ["y = layer(x)", *steps]
        names = list(held)
        own = [f"{', '.join(names)} = {', '.join(f'self.{name}' for name in names)}"] if names else []
        lines = [
            "import torch",
            "from torch import nn",
            *_imports(self.chain, held),
            "\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()",
            *(f"        self.{name} = {_made(what)}" for name, what in held.items()),
            f"\n    def forward(self, {', '.join(('x', *self.given))}):",
            *(f"        {line}" for line in (*own, *steps, f"return {last}")),
            f"\n\ndef get_inputs():\n    return [{', '.join(f'torch.randn{shape}' for shape in self.inputs)}]",
            "\n\ndef get_init_inputs():\n    return []",
        ]
        return "\n".join(lines) + "\n"

    def _numbers(self) -> dict[str, Shape]:
        """The parameters with one number per channel that the chain names."""
        channels = int(self.layer.split()[1].split("-")[1])
        shape = (channels, *(1,) * (len(self.shape) - 2))
        return {name: shape for name in ("b", "m") if name not in self.held and re.search(rf"\b{name}\b", self.chain)}


def _imports(chain: str, held: dict[str, Shape | str]) -> list[str]:
    """Import statements of the functions that a chain calls."""
    called = set(re.findall(r"(?<![\w.])([a-z]\w*)\(", chain)) - held.keys()
    functional = sorted(name for name in called if hasattr(F, name))
    others = sorted(called - set(functional))
    return [
        f"from {module} import {', '.join(names)}"
        for module, names in (("torch", others), ("torch.nn.functional", functional))
        if names
    ]


def _made(what: Shape | str) -> str:
    """The Python that makes what a model holds."""
    if isinstance(what, tuple):
        return f"nn.Parameter(torch.randn{what})"
    if what.partition(".")[0] == "nn":
        return what
    kind, channels, *options = what.split()
    match = re.fullmatch(r"(\D+?)(?:(\d)d)?", kind)
    assert match is not None, what
    arguments = channels.split("-")
    for option in options:
        if option == "nobias":
            arguments.append("bias=False")
        else:
            arguments.append(option[1:] if option[0] == "k" else f"{_OPTIONS[option[0]]}={option[1:]}")
    return f"{_LAYERS[match[1]].format(n=match[2])}({', '.join(arguments)})"


def _row(
    index: int,
    layer: str,
    chain: str,
    shape: Shape,
    training: bool = False,
    given: dict[str, Shape] | None = None,
    **held: Shape | str,
) -> Row:
    return Row(index, layer, chain, shape, held, training, given or {})


# fmt: off
ROWS = (
    _row(1, "conv2d 64-128 k3", "relu(y) + b", (128, 64, 128, 128)),
    _row(2, "convT2d 64-64 k3 s2 p1 o1", "clamp(clamp(y + b, 0.0, 1.0) * 2.0, 0.0, 1.0) / 2.0", (128, 64, 128, 128)),
    _row(3, "convT3d 32-64 k3 s2 p1 o1", "gelu(avg_pool3d(norm(y + s), 2))", (32, 32, 16, 32, 32),
         s=NUMBER, norm="nn.LayerNorm(64)"),
    _row(4, "conv2d 64-128 k3", "mish(mish(y))", (64, 64, 256, 256)),
    _row(5, "convT2d 64-64 k4 s2 p1 o1", "tanh(y - b)", (32, 64, 256, 256)),
    _row(6, "conv3d 3-16 k3", "max_pool3d(max_pool3d(softmax(y, 1), 2), 2)", (128, 3, 16, 32, 32)),
    _row(7, "conv3d 8-32 k3", "sigmoid(gelu(leaky_relu(relu(y), 0.01))) + b", (64, 8, 32, 64, 64)),
    _row(8, "conv3d 8-16 k3", "(adaptive_avg_pool3d(max_pool3d(y / 2.0, 2), 1) + b).sum(1)", (128, 8, 16, 64, 64)),
    _row(9, "linear 8192-8192", "relu((y - 2.0) * 1.5)", (1024, 8192)),
    _row(10, "convT2d 64-64 k3 s1 p1", "tanh(hardtanh(max_pool2d(y, 2, 2), -1, 1).mean((2, 3), keepdim=True))",
         (128, 64, 256, 256)),
    _row(11, "convT2d 64-128 k5 s1 p1", "group(max_pool2d(tanh(norm(y)), 2, 2))", (512, 64, 32, 32), training=True,
         norm="nn.BatchNorm2d(128)", group="nn.GroupNorm(8, 128)"),
    _row(12, "linear 8192-8192", "leaky_relu(y * 2.0, 0.1)", (1024, 8192)),
    _row(13, "convT3d 16-64 k3 s1 p1", "tanh(softmax(y.mean(2, keepdim=True) + b, 1)) * 2.0", (16, 16, 32, 128, 128),
         b=(1, 64, 1, 1, 1)),
    _row(14, "", "(torch.matmul(x, weight.T) / 2).sum(1, keepdim=True) * 1.5", (1024, 8192), weight=(8192, 8192)),
    _row(15, "convT3d 16-32 k3 s2 p1", "y = norm(y); y - y.mean((2, 3, 4), keepdim=True)", (16, 16, 32, 32, 32),
         training=True, norm="nn.BatchNorm3d(32)"),
    _row(16, "convT2d 64-64 k3 s2 p1 o1", "hardtanh(mish(y) + 0.5, -1, 1) * 2", (128, 64, 128, 128)),
    _row(17, "conv2d 64-128 k3", "norm(y) / 2.0", (128, 64, 128, 128), norm="nn.InstanceNorm2d(128)"),
    _row(18, "linear 8192-8192",
         "y = y.sum(1, True).max(1, True)[0].mean(1, True); logsumexp(logsumexp(y, 1, True), 1, True)", (1024, 8192)),
    _row(19, "convT2d 64-64 k3 s1", "norm(gelu(y))", (128, 64, 256, 256), norm="nn.GroupNorm(8, 64)"),
    _row(20, "convT3d 32-64 k3 s2 p1 o1", "((y + b) + y) * y + y", (16, 32, 16, 32, 32)),
    _row(21, "conv2d 8-32 k3", "norm(sigmoid((y + b) * m))", (128, 8, 256, 256), norm="nn.GroupNorm(8, 32)"),
    _row(22, "linear 8192-8192", "y = y * 2.0; y = logsumexp(clamp(y + y, -10, 10), 1, keepdim=True); y * mish(y)",
         (1024, 8192)),
    _row(23, "conv3d 3-24 k3", "norm(y).mean((1, 2, 3, 4))", (128, 3, 24, 32, 32), norm="nn.GroupNorm(8, 24)"),
    _row(24, "conv3d 3-24 k3", "softmax(y.min(2)[0], 1)", (128, 3, 24, 32, 32)),
    _row(25, "conv2d 16-64 k3", "tanh(tanh(y.min(1, keepdim=True)[0]))", (128, 16, 256, 256)),
    _row(26, "convT3d 32-64 k3 s2 p1 o1", "y = y + 1.0; y * hardswish(y)", (128, 32, 16, 16, 16)),
    _row(27, "conv3d 3-16 k4", "norm(hardswish(y)).mean((2, 3, 4))", (256, 3, 16, 32, 32), norm="nn.GroupNorm(4, 16)"),
    _row(28, "linear 8192-8192", "(instance_norm(y[:, None, None, :]).squeeze(1).squeeze(1) + x) * x", (1024, 8192)),
    _row(29, "linear 8192-8192", "mish(mish(y))", (1024, 8192)),
    _row(30, "linear 8192-8192", "hardtanh(norm(y), -2.0, 2.0)", (1024, 8192), norm="nn.GroupNorm(16, 8192)"),
    _row(31, "conv2d 64-128 k3", "(torch.min(y, torch.tensor(0.5, device=x.device)) + b) * 2.0", (128, 64, 128, 128)),
    _row(32, "conv2d 64-128 k3", "(y * 2.0).min(1, keepdim=True)[0]", (64, 64, 256, 256)),
    _row(33, "linear 8192-8192", "norm(y * m)", (1024, 8192), training=True, norm="nn.BatchNorm1d(8192)"),
    _row(34, "convT3d 32-64 k4 s2 p1", "gelu(norm(y)) * 1.5", (32, 32, 16, 32, 32), norm="nn.LayerNorm(64)"),
    _row(35, "conv2d 64-128 k3", "mish(max_pool2d(hardswish(y - 0.5), 2))", (128, 64, 128, 128)),
    _row(36, "convT2d 64-128 k3 s2 p1 o1", "gelu(y.min(1, keepdim=True)[0].sum(2, keepdim=True)) + b",
         (16, 64, 128, 128), b=(1, 1, 1)),
    _row(37, "linear 1024-4096", "norm(sigmoid(y) * y + b)", (8192, 1024), norm="nn.GroupNorm(64, 4096)"),
    _row(38, "convT3d 32-64 k3 s2 p1 o1",
         "y = layer(avg_pool3d(x, 2)); z = clamp(y, 0.0, 1.0).view(*y.shape[:2], -1); softmax(z, 2).view_as(y) * m",
         (32, 32, 32, 64, 64), m=(1, 64, 1, 1, 1)),
    _row(39, "linear 4096-4096", "norm(y * m)", (8192, 4096), training=True, norm="nn.BatchNorm1d(4096)"),
    _row(40, "linear 4096-4096", "y * 0.5 + y.clone().detach()", (8192, 4096)),
    _row(41, "linear 4096-4096", "relu(gelu(norm(y)))", (8192, 4096), training=True, norm="nn.BatchNorm1d(4096)"),
    _row(42, "convT2d 64-128 k3",
         "logsumexp(y.mean((2, 3), keepdim=True) + b, 1, keepdim=True).sum((2, 3)) * 10.0", (16, 64, 256, 256)),
    _row(43, "conv3d 32-64 k3 p1", "relu(logsumexp(max_pool3d(y, 2, 2), 1, keepdim=True))", (4, 32, 32, 128, 128)),
    _row(44, "convT2d 64-128 k3 s2 p1 o1", "(y * 0.5).mean((2, 3), keepdim=True).mean((2, 3), keepdim=True)",
         (16, 64, 128, 128)),
    _row(45, "linear 2048-4096", "logsumexp(last(sigmoid(y)), 1)", (8192, 2048), last="linear 4096-1024"),
    _row(46, "conv2d 64-128 k3", "avg_pool2d(tanh(y - 0.5) - 0.2, 2)", (128, 64, 128, 128)),
    _row(47, "conv3d 32-64 k3", "tanh(mish(y))", (16, 32, 32, 64, 64)),
    _row(48, "conv3d 3-16 k3", "sigmoid(tanh(y * m) * b)", (128, 3, 16, 64, 64)),
    _row(49, "convT3d 32-64 k3 s2 p1 o1", "sigmoid(softmax(y, 1))", (16, 32, 16, 32, 32)),
    _row(50, "convT3d 3-16 k3 s2 p1", "(avg_pool3d(y * s, 2) + b) * t", (128, 3, 16, 32, 32), s=NUMBER, t=NUMBER),
    _row(51, "linear 8192-8192",
         "gelu(logsumexp((y - b).mean(1, keepdim=True), 1, keepdim=True)) + x.clone().detach()", (2048, 8192)),
    _row(52, "conv2d 64-128 k3", "norm(tanh(softplus(y)) * y)", (64, 64, 128, 128), training=True,
         norm="nn.BatchNorm2d(128)"),
    _row(53, "linear 8192-8192", "gelu(hardtanh(y * 0.5, -2, 2))", (2048, 8192)),
    _row(54, "conv2d 64-64 k3", "gelu(leaky_relu(y * m))", (64, 64, 256, 256)),
    _row(55, "linear 32768-8192", "max_pool1d(y.unsqueeze(1), 2).squeeze(1).sum(1) * 0.5", (128, 32768)),
    _row(56, "linear 32768-8192", "sigmoid(y).sum(1, keepdim=True)", (128, 32768)),
    _row(57, "conv2d 8-64 k3", "y = relu(y); y * clamp((y + 3) / 6, 0, 1)", (128, 8, 128, 128)),
    _row(58, "convT3d 3-16 k3 s2 p1", "y = logsumexp(y, 1, keepdim=True); clamp(y * sigmoid(y + 3) / 6 - b, -1, 1)",
         (128, 3, 16, 32, 32), b=(1, 1, 1, 1)),
    _row(59, "linear 8192-8192", "sigmoid(y) * y * 2.0", (1024, 8192)),
    _row(60, "convT3d 3-16 k3 s2 p1", "hardswish(norm(sigmoid(y) * y))", (128, 3, 16, 32, 32),
         norm="nn.GroupNorm(4, 16)"),
    _row(61, "convT3d 64-128 k3 nobias", "norm(relu(y))", (16, 64, 32, 32, 32), norm="nn.GroupNorm(8, 128)"),
    _row(62, "linear 8192-8192", "y = leaky_relu(norm(y), 0.01); y + y", (1024, 8192), norm="nn.GroupNorm(512, 8192)"),
    _row(63, "linear 8192-8192", "relu(y) / 2.0", (1024, 8192)),
    _row(64, "linear 8192-8192", "gelu(gelu(leaky_relu(leaky_relu(logsumexp(y, 1, keepdim=True), 0.01), 0.01)))",
         (1024, 8192)),
    _row(65, "conv2d 8-64 k3", "sigmoid(avg_pool2d(y, 4)).sum((1, 2, 3))", (128, 8, 384, 384)),
    _row(66, "linear 16384-16384", "softmax(drop(y), 1)", (128, 16384), drop="nn.Dropout(0.2)"),
    _row(67, "conv2d 8-64 k3", "adaptive_avg_pool2d(gelu(y), 1).squeeze(-1).squeeze(-1)", (128, 8, 256, 256)),
    _row(68, "linear 16384-16384", "torch.min(y, s) - s", (128, 16384), s="nn.Parameter(torch.tensor(2.0))"),
    _row(69, "conv2d 8-64 k3", "relu(hardswish(y))", (128, 8, 128, 128)),
    _row(70, "linear 8192-8192", "sigmoid(y) * 2.0 + y", (1024, 8192)),
    _row(71, "conv2d 8-64 k3", "leaky_relu(y / 2, 0.01)", (128, 8, 128, 128)),
    _row(72, "convT3d 3-16 k3 s2 p1", "avg_pool3d(avg_pool3d(norm(y), 2), 2)", (64, 3, 32, 32, 32), training=True,
         norm="nn.BatchNorm3d(16)"),
    _row(73, "conv2d 8-64 k3", "norm(y) * 2.0", (128, 8, 128, 128), training=True, norm="nn.BatchNorm2d(64)"),
    _row(74, "convT3d 16-32 k3 s2 p1 o1", "max_pool3d(leaky_relu(leaky_relu(y, 0.2) * m, 0.2), 2)",
         (16, 16, 16, 32, 32)),
    _row(75, "linear 8192-8192", "norm(y).min(1, keepdim=True)[0] + b", (1024, 8192), norm="nn.GroupNorm(512, 8192)",
         b=(1, 8192, 1, 1)),
    _row(76, "linear 8192-8192 nobias", "relu(y + b)", (1024, 8192)),
    _row(77, "convT3d 64-128 k5", "adaptive_avg_pool3d(norm(y * 2.0), 1)", (16, 64, 16, 32, 32), training=True,
         norm="nn.BatchNorm3d(128)"),
    _row(78, "convT3d 32-64 k5 s2 p2", "max_pool3d(max_pool3d(y, 2), 3).sum(1, keepdim=True)", (16, 32, 32, 32, 32)),
    _row(79, "conv3d 3-16 k3", "(clamp(norm(y * m), -1.0, 1.0) * m).max(1)[0]", (128, 3, 16, 32, 32),
         norm="nn.InstanceNorm3d(16)"),
    _row(80, "linear 8192-8192", "y = y.max(1, keepdim=True)[0]; gelu(y - y.mean(1, keepdim=True))", (1024, 8192)),
    _row(81, "linear 8192-8192", "clamp(tanh(clamp(sigmoid(y) * y / 2.0, -1.0, 1.0)), -1.0, 1.0)", (1024, 8192)),
    _row(82, "conv2d 8-64 k3", "max_pool2d(tanh(y) * 2.0 + b, 4)", (128, 8, 256, 256)),
    _row(83, "conv3d 3-16 k3", "clamp(torch.min(norm(y), torch.tensor(0.0, device=x.device)), 0.0, 1.0)",
         (128, 3, 16, 64, 64), norm="nn.GroupNorm(8, 16)"),
    _row(84, "linear 8192-8192", "softmax(m * norm(y), 1)", (1024, 8192), training=True,
         norm="nn.BatchNorm1d(8192)", m=(1,)),
    _row(85, "conv2d 8-64 k3", "clamp(max_pool2d(norm(y) * m, 4), 0.0, 1.0)", (128, 8, 128, 128),
         norm="nn.GroupNorm(16, 64)"),
    _row(86, "linear 8192-8192", "gelu(y / 10.0)", (1024, 8192)),
    _row(87, "conv2d 8-64 k3", "mish(y - 0.5 - 0.2)", (128, 8, 256, 256)),
    _row(88, "linear 8192-8192", "y = norm(y); y = sigmoid(y) * y * m; sigmoid(y) * y", (1024, 8192),
         norm="nn.GroupNorm(256, 8192)"),
    _row(89, "convT3d 3-16 k3 s2 p1 o1", "y = softmax(max_pool3d(y, 2), 1) - b; (sigmoid(y) * y).max(1)[0]",
         (128, 3, 16, 32, 32)),
    _row(90, "conv3d 8-64 k3", "gelu(clamp(leaky_relu(y, 0.2) + b, -1.0, 1.0))", (128, 8, 16, 64, 64)),
    _row(91, "convT2d 64-128 k4 s2 p1 o1", "sigmoid((softmax(y, 1) + b) * 2.0)", (128, 64, 64, 64)),
    _row(92, "conv2d 8-64 k3", "logsumexp(y + hardswish(tanh(norm(y))), 1, keepdim=True)", (128, 8, 128, 128),
         norm="nn.GroupNorm(16, 64)"),
    _row(93, "convT2d 64-128 k4 s2", "gelu(torch.min(y + 0.5, torch.tensor(0.0, device=x.device))) * 2.0",
         (128, 64, 64, 64)),
    _row(94, "linear 1024-8192", "norm(mish(hardtanh(y + b)))", (1024, 1024), norm="nn.GroupNorm(256, 8192)"),
    _row(95, "linear 8192-8192", "y = y + b; hardtanh(gelu(tanh(sigmoid(y) * y)), -1, 1)", (1024, 8192)),
    _row(96, "convT3d 3-16 k3 s2 p1", "clamp(adaptive_avg_pool3d(max_pool3d(y * 0.5, 2), 1), 0, 1)",
         (128, 3, 16, 32, 32)),
    _row(97, "linear 8192-8192", "y = (norm(y) + b) / 1.0; sigmoid(y) * y", (1024, 8192), training=True,
         norm="nn.BatchNorm1d(8192)", b=(1,)),
    _row(98, "linear 8192-8192", "(gelu(avg_pool1d(y.unsqueeze(1), 16).squeeze(1)) * 2.0).max(1)[0]", (1024, 8192)),
    _row(99, "linear 8192-8192", "softmax(gelu(y), 1)", (1024, 8192)),
    _row(100, "convT3d 64-128 k3 s2 p1", "clamp(y, min=-1.0) / 2.0", (16, 64, 24, 48, 48)),
    _row(101, "convT2d 64-64 k4 s2 p1", "sigmoid((softmax(y, 1) + b) * 2)", (64, 64, 64, 64)),
    _row(102, "convT2d 64-128 k5 s2 p2 o1", "gelu(y.min(1, keepdim=True)[0].sum(2, keepdim=True)) + 0.1",
         (16, 64, 64, 64)),
    _row(103, "convT2d 32-16 k4 s2 p1 o1", "tanh(y - b)", (128, 32, 64, 64)),
    _row(104, "", "normalize(x)", (32768, 2048)),
    _row(105, "", "x / x.norm(dim=1, keepdim=True)", (64, 64, 256, 256)),
    _row(106, "", "x / torch.norm(x)", (64, 64, 128, 256)),
    _row(107, "", "x / x.abs().mean(1, keepdim=True)", (32768, 2048)),
    _row(108, "", "(x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6)", (32768, 2048)),
    _row(109, "", "cosine_similarity(x, t)", (16384, 4096), t=(4096,)),
    _row(110, "", "smooth_l1_loss(x, t.expand_as(x))", (16384, 4096), t=(4096,)),
    _row(111, "", "kl_div(log_softmax(x, 1), softmax(t.expand_as(x), 1), reduction='batchmean')", (16384, 4096),
         t=(4096,)),
    _row(112, "", "triplet_margin_loss(x, p.expand_as(x), n.expand_as(x))", (16384, 2048), p=(2048,), n=(2048,)),
    _row(113, "", "mse_loss(sigmoid(x), t.expand_as(x))", (16384, 4096), t=(4096,)),
    _row(114, "", "glu(x, 1)", (32768, 4096)),
    _row(115, "linear 1024-4096", "glu(y)", (8192, 1024)),
    _row(116, "", "one, other = x.chunk(2, -1); silu(one) * other", (16384, 8192)),
    _row(117, "", "h = x.unflatten(-1, (16, 64)).transpose(1, 2); one, other = h.chunk(2, -1); "
         "r = h * c + torch.cat((-other, one), -1) * s; "
         "project(scaled_dot_product_attention(r, r, h).transpose(1, 2).flatten(2))", (16, 1024, 1024),
         c=(1024, 64), s=(1024, 64), project="linear 1024-1024"),
    _row(118, "", "q, k, v = x.unflatten(-1, (3, 12, 64)).unbind(2); "
         "w = softmax(torch.einsum('bihd,bjhd->bhij', q, k) * 0.125, -1); "
         "torch.einsum('bhij,bjhd->bihd', w, v).flatten(2)", (16, 512, 2304)),
    _row(119, "linear 768-2304", "q, k, v = y.unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4); "
         "w = softmax(torch.einsum('bhid,bhjd->bhij', normalize(q, dim=-1), normalize(k, dim=-1)) * 10.0, -1); "
         "torch.einsum('bhij,bhjd->bihd', w, v).flatten(2)", (16, 512, 768)),
    _row(120, "conv2d 64-256 k3 p1", "pixel_shuffle(relu(y), 2)", (32, 64, 128, 128)),
    _row(121, "conv2d 64-64 k3 p1", "prelu(y, w)", (64, 64, 128, 128), w=(64,)),
    _row(122, "", "0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)))", (16384, 4096)),
    _row(123, "", "binary_cross_entropy_with_logits(x, sigmoid(t).expand_as(x))", (16384, 4096), t=(4096,)),
    _row(124, "", "x * sigmoid(second(relu(first(x.mean((2, 3))))))[:, :, None, None]", (64, 128, 112, 112),
         first="linear 128-32", second="linear 32-128"),
    _row(125, "", "torch.cat((relu(x), relu(-x)), 1)", (64, 64, 128, 128)),
    _row(126, "", "x.repeat_interleave(2, 2).repeat_interleave(2, 3) + t", (32, 64, 64, 64), t=(64, 1, 1)),
    _row(127, "", "x / torch.sqrt((x ** 2).mean(1, keepdim=True) + 1e-5)", (16, 64, 256, 256)),
    _row(128, "", "low = x.amin(1, keepdim=True); (x - low) / (x.amax(1, keepdim=True) - low + 1e-6)", (32768, 2048)),
    _row(129, "", "interpolate(relu(x), scale_factor=2.0)", (32, 64, 64, 64)),
    _row(130, "conv2d 64-64 k3 p1", "interpolate(leaky_relu(y), scale_factor=2) + t", (32, 64, 64, 64),
         t=(64, 128, 128)),
    _row(131, "conv2d 64-1 k1", "sigmoid(interpolate(y, scale_factor=4, mode='bilinear'))", (32, 64, 128, 128)),
    _row(132, "", "cross_entropy(x, arange(x.shape[0], device=x.device))", (8192, 16384)),
    _row(133, "linear 1024-256", "z = normalize(y); "
         "cross_entropy(z @ z.T / 0.5, arange(x.shape[0], device=x.device))", (8192, 1024)),
    _row(134, "", "(t * (1.0 - sigmoid(x)) ** 2 * softplus(-x)).mean()", (16384, 4096), t=(4096,)),
    _row(135, "", "p = sigmoid(x); 1.0 - (2.0 * (p * t).sum((1, 2, 3)) + 1.0) / (p.sum((1, 2, 3)) + t.sum() + 1.0)",
         (64, 16, 256, 256), t=(256, 256)),
    _row(136, "", "relu(torch.cumsum(x, 1))", (4096, 8192)),
    _row(137, "", "torch.roll(x, (3, 3), (1, 2)) + x", (64, 56, 56, 96)),
    _row(138, "", "h = torch.roll(x, (-3, -3), (1, 2)).unflatten(1, (8, 7)).unflatten(3, (8, 7)); "
         "norm(h.transpose(2, 3).flatten(3, 4).flatten(0, 2))", (64, 56, 56, 96), norm="nn.LayerNorm(96)"),
    _row(139, "", "one, other = x[..., ::2], x[..., 1::2]; "
         "torch.stack((one * c - other * s, one * s + other * c), -1).flatten(-2)", (16, 16, 1024, 64),
         c=(1024, 32), s=(1024, 32)),
    _row(140, "", "x.flip(-1) + x", (64, 64, 128, 128)),
    _row(141, "", "relu(channel_shuffle(x, 4))", (64, 128, 56, 56)),
    _row(142, "", "x + project(relu6(norm2(depth(relu6(norm1(widen(x)))))))", (64, 32, 56, 56),
         widen="conv2d 32-192 k1", norm1="nn.BatchNorm2d(192)", depth="nn.Conv2d(192, 192, 3, padding=1, groups=192)",
         norm2="nn.BatchNorm2d(192)", project="conv2d 192-32 k1"),
    _row(143, "", "relu(x + norm2(conv2(relu(norm1(conv1(x))))))", (64, 64, 56, 56), conv1="conv2d 64-64 k3 p1",
         norm1="nn.BatchNorm2d(64)", conv2="conv2d 64-64 k3 p1", norm2="nn.BatchNorm2d(64)"),
    _row(144, "", "x + conv2(silu(norm2(conv1(silu(norm1(x))))))", (16, 128, 64, 64), conv1="conv2d 128-128 k3 p1",
         norm1="nn.GroupNorm(32, 128)", conv2="conv2d 128-128 k3 p1", norm2="nn.GroupNorm(32, 128)"),
    _row(145, "", "x + (second(gelu(first(norm(depth(x).permute(0, 2, 3, 1))))) * g).permute(0, 3, 1, 2)",
         (32, 96, 56, 56), depth="nn.Conv2d(96, 96, 7, padding=3, groups=96)", norm="nn.LayerNorm(96)",
         first="linear 96-384", second="linear 384-96", g=(96,)),
    _row(146, "", "down(silu(gate(x)) * up(x))", (4096, 1024), gate="linear 1024-2816 nobias",
         up="linear 1024-2816 nobias", down="linear 2816-1024 nobias"),
    _row(147, "", "q, k, v = qkv(norm1(x)).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4); "
         "x = x + project(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)); "
         "x + down(gelu(up(norm2(x))))", (16, 512, 768), norm1="nn.LayerNorm(768)", qkv="linear 768-2304",
         project="linear 768-768", norm2="nn.LayerNorm(768)", up="linear 768-3072", down="linear 3072-768"),
    _row(148, "", "tanh(f(x)) * sigmoid(g(x))", (32, 64, 16384), f="nn.Conv1d(64, 64, 3, padding=2, dilation=2)",
         g="nn.Conv1d(64, 64, 3, padding=2, dilation=2)"),
    _row(149, "", "silu(causal(x)[..., :-3])", (8, 1024, 4096),
         causal="nn.Conv1d(1024, 1024, 4, padding=3, groups=1024)"),
    _row(150, "", "x * sigmoid(both(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)))",
         (64, 128, 56, 56), both="conv2d 2-1 k7 p3"),
    _row(151, "", "x * sigmoid(second(relu(first(adaptive_avg_pool2d(x, 1)))))", (64, 128, 56, 56),
         first="conv2d 128-32 k1", second="conv2d 32-128 k1"),
    _row(152, "", "relu(norm2(point(relu(norm1(depth(x))))))", (64, 128, 56, 56),
         depth="nn.Conv2d(128, 128, 3, padding=1, groups=128)", norm1="nn.BatchNorm2d(128)", point="conv2d 128-128 k1",
         norm2="nn.BatchNorm2d(128)"),
    _row(153, "", "torch.cat((relu(one(x)), relu(three(x)), max_pool2d(x, 3, 1, 1)), 1)", (64, 64, 56, 56),
         one="conv2d 64-64 k1", three="conv2d 64-96 k3 p1"),
    _row(154, "", "max_pool2d(relu(norm2(conv2(relu(norm1(conv1(x)))))), 2)", (16, 32, 256, 256),
         conv1="conv2d 32-32 k3 p1", norm1="nn.BatchNorm2d(32)", conv2="conv2d 32-32 k3 p1",
         norm2="nn.BatchNorm2d(32)"),
    _row(155, "conv2d 64-128 k4 s2 p1", "leaky_relu(norm(y), 0.2)", (64, 64, 128, 128), norm="nn.InstanceNorm2d(128)"),
    _row(156, "", "(x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-5) * s + t",
         (32, 64, 128, 128), s=(64, 1, 1), t=(64, 1, 1)),
    _row(157, "", "f = x.flatten(2); f @ f.transpose(1, 2) / f.shape[-1]", (32, 128, 128, 128)),
    _row(158, "", "(x[:, :, 1:] - x[:, :, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()",
         (64, 3, 512, 512)),
    _row(159, "", "mu = avg_pool2d(x, 11, 1); s = avg_pool2d(x * x, 11, 1) - mu * mu; "
         "((2.0 * mu * t + 0.01) / (mu * mu + t * t + 0.01) / (s + 0.03)).mean()", (32, 3, 256, 256), t=(246, 246)),
    _row(160, "", "log_softmax(x, 1).gather(1, x.argmax(1, keepdim=True))", (65536, 1024)),
    _row(161, "linear 1024-64", "w, _ = softmax(y, -1).topk(2, -1); w / w.sum(-1, keepdim=True)", (65536, 1024)),
    _row(162, "", "torch.cat((x[:, 0], (x @ x.transpose(1, 2)).flatten(1)), 1)", (4096, 27, 64)),
    _row(163, "linear 3-128", "torch.cat((sin(y), cos(y)), -1)", (262144, 3)),
    _row(164, "", "head(relu(c(relu(b(relu(a(x)))))))", (262144, 64), a="linear 64-256", b="linear 256-256",
         c="linear 256-256", head="linear 256-4"),
    _row(165, "", "head(norm(x).mean(1))", (64, 197, 768), norm="nn.LayerNorm(768)", head="linear 768-1000"),
    _row(166, "", "(x - x.mean(1, True)) * torch.rsqrt(x.var(1, unbiased=False, keepdim=True) + 1e-6) * s + t",
         (32, 96, 112, 112), s=(96, 1, 1), t=(96, 1, 1)),
    _row(167, "conv2d 3-768 k16 s16", "y.flatten(2).transpose(1, 2) + t", (64, 3, 224, 224), t=(196, 768)),
    _row(168, "", "relu(down(pixel_unshuffle(x, 2)))", (32, 32, 128, 128), down="conv2d 128-64 k1"),
    _row(169, "conv1d 64-1024 k1", "relu(norm(y)).max(2)[0]", (32, 64, 4096), norm="nn.BatchNorm1d(1024)"),
    _row(170, "", "(tanh(a(x)[:, :, None] + b(x)[:, None]) * v).sum(-1)", (32, 256, 64), a="linear 64-64",
         b="linear 64-64", v=(64,)),
    _row(171, "", "x.mean(1)", (64, 2048, 512)),
    _row(172, "", "x.max(1)[0]", (64, 2048, 512)),
    _row(173, "", "batch(x)", (64, 64, 256, 256), training=True, batch="nn.BatchNorm2d(64)"),
    _row(174, "", "instance(x)", (64, 64, 256, 256), instance="nn.InstanceNorm2d(64)"),
    _row(175, "", "group(x)", (64, 64, 256, 256), group="nn.GroupNorm(8, 64)"),
    _row(176, "", "whole(x)", (16, 64, 256, 256), whole="nn.LayerNorm((64, 256, 256))"),
    _row(177, "", "max_pool2d(x, 4, 2, 1)", (32, 64, 256, 256)),
    _row(178, "", "avg_pool1d(x, 8, 1, 4)", (64, 128, 16384)),
    _row(179, "", "max_pool1d(x, 8, 1, 4, 3)", (64, 128, 16384)),
    _row(180, "", "avg_pool3d(x, 3, 2, 1)", (16, 32, 64, 64, 64)),
    _row(181, "", "max_pool3d(x, 3, 2, 1, 3)", (16, 32, 64, 64, 64)),
    _row(182, "", "clamp(1 - x * t, min=0).mean()", (32768, 4096), t=(4096,)),
    _row(183, "", "torch.tril(x @ w)", (4096, 4096), w=(4096, 4096)),
    _row(184, "", "x @ torch.diag(d)", (4096, 4096), d=(4096,)),
    _row(185, "", "torch.einsum('bijl,lk->bijk', x, w)", (8, 256, 512, 256), w=(256, 768)),
    _row(186, "", "x @ w", (2048, 65536), w=(65536, 1)),
    _row(187, "", "x @ w", (16384, 64), w=(64, 16384)),
    _row(188, "", "depth(x)", (64, 128, 128, 128), depth="nn.Conv2d(128, 128, 3, groups=128)"),
    _row(189, "", "point(depth(x))", (32, 64, 256, 256), depth="nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)",
         point="nn.Conv2d(64, 128, 1, bias=False)"),
    _row(190, "", "wide(x)", (64, 64, 65536), wide="nn.Conv1d(64, 128, 3, stride=3, dilation=4)"),
    _row(191, "", "y = relu(squeeze(x)); torch.cat((relu(one(y)), relu(three(y))), 1)", (64, 96, 54, 54),
         squeeze="conv2d 96-16 k1", one="conv2d 16-64 k1", three="conv2d 16-64 k3 p1"),
    _row(192, "", "torch.cat((x, more(relu(norm(x)))), 1)", (32, 64, 56, 56), norm="nn.BatchNorm2d(64)",
         more="conv2d 64-32 k3 p1 nobias"),
    _row(193, "", "y = channel_shuffle(relu(n1(c1(x))), 3); relu(n3(c3(n2(c2(y)))) + x)", (32, 240, 28, 28),
         c1="nn.Conv2d(240, 60, 1, groups=3, bias=False)", n1="nn.BatchNorm2d(60)",
         c2="nn.Conv2d(60, 60, 3, padding=1, groups=60, bias=False)", n2="nn.BatchNorm2d(60)",
         c3="nn.Conv2d(60, 240, 1, groups=3, bias=False)", n3="nn.BatchNorm2d(240)"),
    _row(194, "", "torch.cat((a(x), b2(b1(x)), c2(c1(x)), d(max_pool2d(x, 3, 1, 1))), 1)", (32, 192, 28, 28),
         a="conv2d 192-64 k1", b1="conv2d 192-96 k1", b2="conv2d 96-128 k3 p1", c1="conv2d 192-16 k1",
         c2="conv2d 16-32 k5 p2", d="conv2d 192-32 k1"),
    _row(195, "", "q, k, v = qkv(x).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4); "
         "w = (q @ k.transpose(-2, -1)) * 0.125; "
         "w = relu(w.masked_fill(torch.ones(512, 512, device=x.device).tril() == 0, -torch.inf)); "
         "(w @ v).transpose(1, 2).flatten(2)", (16, 512, 768), qkv="linear 768-2304"),
    _row(196, "", "q, k, v = qkv(x).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4); "
         "w = (q @ k.transpose(-2, -1)) * 0.125; "
         "w = softmax(w.masked_fill(torch.ones(512, 512, device=x.device).tril() == 0, -torch.inf), -1); "
         "project((w @ v).transpose(1, 2).flatten(2))", (16, 512, 768), qkv="linear 768-2304",
         project="linear 768-768"),
    _row(197, "", "relu(norm(conv(torch.cat((up(x), interpolate(x, scale_factor=2)), 1))))", (16, 64, 64, 64),
         up="convT2d 64-32 k2 s2", conv="conv2d 96-32 k3 p1", norm="nn.BatchNorm2d(32)"),
    _row(198, "", "x + down(gelu(up(norm(x))))", (16, 512, 768), norm="nn.LayerNorm(768)", up="linear 768-3072",
         down="linear 3072-768"),
    _row(199, "", "y = normalize(x); y @ y.T", (4096, 512)),
    _row(200, "", "torch.cdist(x, t)", (4096, 64), given={"t": (4096, 64)}),
    _row(201, "", "max_pool2d(relu(norm(conv(x))), 3, 2, 1)", (64, 3, 224, 224), conv="conv2d 3-64 k7 s2 p3 nobias",
         norm="nn.BatchNorm2d(64)"),
    _row(202, "", "torch.cat((x.mean((2, 3)), x.amax((2, 3))), 1)", (64, 256, 56, 56)),
    _row(203, "", "local_response_norm(x, 5)", (64, 96, 56, 56)),
    _row(204, "", "softmax(x / 0.7 + t, -1)", (64, 16, 512, 512), t=(512,)),
    _row(205, "", "x.var((2, 3))", (64, 256, 56, 56)),
    _row(206, "", "hardswish(norm(depth(x)))", (64, 120, 56, 56),
         depth="nn.Conv2d(120, 120, 5, stride=2, padding=2, groups=120, bias=False)", norm="nn.BatchNorm2d(120)"),
    _row(207, "", "q, k, v = qkv(x).chunk(3, -1); (elu(q) + 1) @ ((elu(k) + 1).transpose(1, 2) @ v)", (16, 1024, 256),
         qkv="linear 256-768"),
    _row(208, "linear 768-768", "norm(x + drop(y))", (8192, 768), drop="nn.Dropout(0.1)", norm="nn.LayerNorm(768)"),
    _row(209, "", "conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True), padding=1)",
         (32, 64, 56, 56), w=(64, 64, 3, 3)),
    _row(210, "", "torch.cat((x, x.mean(1, keepdim=True).expand(-1, x.shape[1], -1)), -1)", (64, 1024, 64)),
    _row(211, "", "xy, wh = x[..., :2] * s + t, exp(x[..., 2:4]) * a; "
         "torch.cat((xy - wh / 2, xy + wh / 2, sigmoid(x[..., 4:])), -1)", (64, 8400, 85), s=(8400, 1), t=(8400, 2),
         a=(8400, 2)),
    _row(212, "", "z = x.mean((2, 3), keepdim=True); x * sigmoid(conv(z.squeeze(-1).transpose(1, 2)).transpose(1, 2)"
         ".unsqueeze(-1))", (64, 256, 56, 56), conv="nn.Conv1d(1, 1, 5, padding=2, bias=False)"),
    _row(213, "", "torch.cumsum(x.flip(1), 1).flip(1)", (4096, 8192)),
    _row(214, "", "(x.unsqueeze(2) - t).square().sum(-1).argmin(-1)", (32, 1024, 64), t=(64, 64)),
    _row(215, "", "norm(x.transpose(1, 2)).transpose(1, 2)", (64, 256, 4096), norm="nn.LayerNorm(256)"),
    _row(216, "", "pad(x, (1, 1, 1, 1), mode='reflect') * 0.5", (32, 64, 128, 128)),
    _row(217, "", "h = x + a(x); h + b(relu(norm(h)))", (32768, 768), a="linear 768-768", norm="nn.LayerNorm(768)",
         b="linear 768-768"),
    _row(218, "", "x = x * sigmoid(up(relu(down(x.mean((2, 3))))) + up(relu(down(x.amax((2, 3))))))[:, :, None, None]; "
         "x * sigmoid(conv(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)))", (64, 256, 56, 56),
         down="linear 256-16", up="linear 16-256", conv="conv2d 2-1 k7 p3"),
    _row(219, "", "i, f, g, o = gates(x).chunk(4, 1); c = sigmoid(f) * x + sigmoid(i) * tanh(g); "
         "a(c) + b(sigmoid(o) * tanh(c))", (16384, 512), gates="linear 512-2048", a="linear 512-512",
         b="linear 512-512"),
    _row(220, "", "x.mean(1) / (1 + x.norm(dim=1).mean()) + x.amax(1).mean()", (64, 512, 4096)),
    _row(221, "", "avg_pool2d(pad(x, (1, 1, 1, 1)), 3)", (64, 64, 128, 128)),
    _row(222, "", "max_pool2d(pad(relu(x), (0, 1, 0, 1)), 3, 2)", (64, 64, 112, 112)),
    _row(223, "", "(x + t).view(-1, 64, 4, 49, 49) * 0.5 + m", (2048, 4, 49, 49), t=(4, 49, 49), m=(64, 1, 49, 49)),
    _row(224, "", "norm(x.permute(0, 2, 3, 1))", (64, 96, 56, 56), norm="nn.LayerNorm(96)"),
    _row(225, "", "norm(x.flatten(2).transpose(1, 2) + t)", (128, 768, 14, 14), t=(196, 768), norm="nn.LayerNorm(768)"),
    _row(226, "", "norm(x.unflatten(-1, (16, 64)).transpose(1, 2)) * 0.125", (16, 1024, 1024), norm="nn.LayerNorm(64)"),
    _row(227, "", "u, v = x.chunk(2, -1); u * norm(v)", (64, 1024, 1024), norm="nn.LayerNorm(512)"),
    _row(228, "", "softmax(x, -1)", (2048, 65536)),
    _row(229, "", "relu(instance(x))", (16, 64, 512, 512), instance="nn.InstanceNorm2d(64)"),
    _row(230, "", "norm(x)", (1024, 131072), norm="nn.LayerNorm(131072)"),
    _row(231, "", "log_softmax(x * 0.5, -1)", (512, 393216)),
    _row(232, "", "shift, scale, gate = ada(silu(t)).chunk(3, -1); x + gate[:, None] * up(norm(x) * (1 + scale[:, "
         "None]) + shift[:, None])", (32, 256, 1152), ada="nn.Linear(1152, 3456)",
         norm="nn.LayerNorm(1152, elementwise_affine=False, eps=1e-6)", up="nn.Linear(1152, 1152)",
         given={"t": (32, 1152)}),
    _row(233, "", "w = weight[None] * (1 + a(s))[:, None, :, None, None]; w = w * torch.rsqrt(w.square().sum((2, 3, "
         "4), keepdim=True) + 1e-8); y = conv2d(x.reshape(1, -1, *x.shape[2:]), w.flatten(0, 1), padding=1, "
         "groups=x.shape[0]); leaky_relu(y.view(x.shape[0], -1, *x.shape[2:]), 0.2)", (16, 128, 64, 64),
         weight=(128, 128, 3, 3), a="nn.Linear(512, 128)", given={"s": (16, 512)}),
    _row(234, "", "m = x.mean(1, keepdim=True); s = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5); y = (x "
         "- m) / s * w + b; lin(y.transpose(1, 2)).transpose(1, 2) * s + m", (256, 512, 64), w=(64,), b=(64,),
         lin="nn.Linear(512, 96)"),
    _row(235, "", "relu(x + relu(c2(pad(relu(c1(pad(x, (8, 0)))), (8, 0)))))", (32, 64, 8192),
         c1="nn.Conv1d(64, 64, 3, dilation=4)", c2="nn.Conv1d(64, 64, 3, dilation=4)"),
    _row(236, "", "torch.cat([x] + [interpolate(adaptive_avg_pool2d(x, n), size=x.shape[2:], mode='bilinear') for n "
         "in (1, 2, 4)], 1)", (16, 128, 64, 64)),
    _row(237, "", "out(lateral(x) + interpolate(t, scale_factor=2.0, mode='nearest'))", (16, 256, 64, 64),
         lateral="nn.Conv2d(256, 128, 1)", out="nn.Conv2d(128, 128, 3, padding=1)", given={"t": (16, 128, 32, 32)}),
    _row(238, "", "p = pad(x, (0, 0, 1, -1)); sigmoid(rr(x * a + p * (1 - a))) * vv(relu(kk(x * b + p * (1 - "
         "b))).square())", (8, 1024, 768), a=(768,), b=(768,), rr="nn.Linear(768, 768)", kk="nn.Linear(768, 3072)",
         vv="nn.Linear(3072, 768)"),
    _row(239, "", "0.5 * (x.sum(1).square() - x.square().sum(1)).sum(-1)", (16384, 39, 64)),
    _row(240, "", "sigma, rgb = relu(x[..., 3]), sigmoid(x[..., :3]); a = 1 - exp(-sigma * d); t = "
         "torch.cumprod(torch.cat((torch.ones_like(a[:, :1]), 1 - a + 1e-10), 1), 1)[:, :-1]; ((a * t)[..., None] * "
         "rgb).sum(1)", (65536, 128, 4), d=(128,)),
    _row(241, "", "s = x.abs().amax(-1, keepdim=True) / 127; torch.clamp(torch.round(x / s), -128, 127) * s",
         (16384, 4096)),
    _row(242, "", "cross_entropy(x, arange(x.shape[0], device=x.device) % x.shape[1], label_smoothing=0.1)",
         (16384, 4096)),
    _row(243, "", "l = log_softmax(x, -1); -(0.9 * l.mean(-1) + 0.1 * l[:, 0]).mean()", (16384, 4096)),
    _row(244, "", "a, b = (x - x.mean(0)) / x.std(0), (t - t.mean(0)) / t.std(0); c = a.T @ b / x.shape[0]; (c - "
         "e).square().sum()", (4096, 2048), e=(2048, 2048), given={"t": (4096, 2048)}),
    _row(245, "", "a, b = x[:, None], t[None]; i = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., "
         ":2])).clamp(min=0).prod(-1); u = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - "
         "i; i / u", (8192, 4), t=(4096, 4)),
    _row(246, "", "(x.square().sum(1, keepdim=True) + w.square().sum(1) - 2 * x @ w.t())", (32768, 256), w=(1024, 256)),
    _row(247, "", "q, k, v = qkv(x).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4); "
         "o(scaled_dot_product_attention(qn(q), kn(k), v).transpose(1, 2).flatten(2))", (16, 512, 768),
         qkv="nn.Linear(768, 2304)", qn="nn.LayerNorm(64)", kn="nn.LayerNorm(64)", o="nn.Linear(768, 768)"),
    _row(248, "", "r, z, n = i(x).chunk(3, 1); hr, hz, hn = h(t).chunk(3, 1); r = sigmoid(r + hr); z = sigmoid(z + "
         "hz); n = tanh(n + r * hn); n + z * (t - n)", (8192, 512), i="nn.Linear(512, 1536)", h="nn.Linear(512, 1536)",
         given={"t": (8192, 512)}),
    _row(249, "", "x = x + t2(gelu(t1(n1(x).transpose(1, 2)))).transpose(1, 2); x + c2(gelu(c1(n2(x))))",
         (64, 196, 512), n1="nn.LayerNorm(512)", n2="nn.LayerNorm(512)", t1="nn.Linear(196, 256)",
         t2="nn.Linear(256, 196)", c1="nn.Linear(512, 2048)", c2="nn.Linear(2048, 512)"),
    _row(250, "", "q, k, v = qkv(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4); softmax(q @ k.transpose(-2, -1) "
         "* 0.125 - s[:, None, None] * (arange(x.shape[1], device=x.device)[None, :] - arange(x.shape[1], "
         "device=x.device)[:, None]).abs(), -1) @ v", (8, 1024, 512), qkv="nn.Linear(512, 1536)", s=(8,)),
    _row(251, "", "enc(x)", (16, 512, 768), enc="nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)"),
    _row(252, "", "block(x)", (16, 512, 768),
         block="nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True, activation='gelu')"),
    _row(253, "", "dec(x, t)", (16, 256, 512), dec="nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True)",
         given={"t": (16, 256, 512)}),
    _row(254, "", "mha(x, x, x)[0]", (16, 512, 768), mha="nn.MultiheadAttention(768, 12, batch_first=True)"),
    _row(255, "", "up(relu(n(c(interpolate(x, scale_factor=2, mode='bilinear', align_corners=True)))))",
         (16, 64, 64, 64), c="nn.Conv2d(64, 32, 3, padding=1)", n="nn.BatchNorm2d(32)", up="nn.Conv2d(32, 1, 1)"),
    _row(256, "", "torch.cat((t, interpolate(x, scale_factor=2, mode='bilinear', align_corners=True)), 1)",
         (16, 64, 64, 64), given={"t": (16, 64, 128, 128)}),
    _row(257, "", "y = torch.cat([interpolate(relu(c(x)), size=t.shape[2:], mode='bilinear'), t], 1); head(y)",
         (16, 256, 32, 32), c="nn.Conv2d(256, 128, 1)", head="nn.Conv2d(192, 21, 1)", given={"t": (16, 64, 128, 128)}),
    _row(258, "", "sigmoid(interpolate(c(x), scale_factor=8, mode='bilinear'))", (16, 256, 32, 32),
         c="nn.Conv2d(256, 1, 3, padding=1)"),
    _row(259, "", "interpolate(x, size=(112, 112), mode='bilinear', align_corners=False)", (64, 64, 128, 128)),
    _row(260, "", "relu(interpolate(x, size=(100, 100)))", (32, 64, 64, 64)),
    _row(261, "", "interpolate(x, scale_factor=2, mode='trilinear')", (8, 32, 32, 32, 32)),
    _row(262, "", "fold(unfold(x, 3, padding=1) * w, (64, 64), 3, padding=1)", (16, 64, 64, 64), w=(576, 1)),
    _row(263, "", "cosine_embedding_loss(x, t, torch.ones(x.shape[0], device=x.device))", (16384, 512),
         given={"t": (16384, 512)}),
    _row(264, "", "soft_margin_loss(x, torch.sign(t).detach().expand_as(x))", (16384, 4096), t=(4096,)),
    _row(265, "", "h = first(x); h = attention(h, h, h)[0] + x; h + down(gelu(up(second(h))))", (16, 512, 768),
         first="nn.LayerNorm(768)", attention="nn.MultiheadAttention(768, 12, batch_first=True)",
         second="nn.LayerNorm(768)", up="nn.Linear(768, 3072)", down="nn.Linear(3072, 768)"),
    _row(266, "", "torch.argmax(x, 1)", (64, 4096, 512)),
    _row(267, "", "torch.argmin(x, -1)", (16384, 4096)),
    _row(268, "", "torch.cumprod(x, 1)", (4096, 8192)),
    _row(269, "", "torch.cumsum(torch.cat((torch.zeros_like(x[:, :1]), x), 1)[:, :-1], 1)", (4096, 8192)),
    _row(270, "", "torch.cumsum(x * (t > 0), 1)", (4096, 8192), given={"t": (4096, 8192)}),
    _row(271, "", "head(rnn(x)[0][:, -1])", (64, 128, 128), rnn="nn.LSTM(128, 256, 2, batch_first=True)",
         head="linear 256-10"),
    _row(272, "", "rnn(x)[0]", (128, 64, 128), rnn="nn.GRU(128, 256, 2, batch_first=True)"),
    _row(273, "", "h2o(tanh(i2h(torch.cat((x, t), 1))))", (256, 4096), i2h="linear 8192-4096", h2o="linear 4096-1024",
         given={"t": (256, 4096)}),
    _row(274, "", "a = softmax(norm(x.reshape(-1, 512) @ c), 1)[:, :32].view(x.shape[0], -1, 32); "
         "v = (a.transpose(1, 2) @ x).transpose(1, 2) - a.sum(1, keepdim=True) * d; "
         "normalize(normalize(v).reshape(x.shape[0], -1))", (512, 100, 512), norm="nn.BatchNorm1d(48)", c=(512, 48),
         d=(1, 512, 32)),
    _row(275, "", "softmax(n2(c2(softmax(n1(c1(x)), -1))), -1)", (8, 32, 64, 512), c1="conv2d 32-64 k3 p1",
         n1="nn.BatchNorm2d(64)", c2="conv2d 64-64 k3 p1", n2="nn.BatchNorm2d(64)"),
    _row(276, "", "h = norm(x).unflatten(1, (8, 7)).unflatten(3, (8, 7)).transpose(2, 3).flatten(3, 4).flatten(0, 2); "
         "h = mix(h.unflatten(-1, (4, 24)).transpose(1, 2).flatten(1, 2)).unflatten(1, (4, 49)).transpose(1, 2)"
         ".flatten(2); h.view(-1, 8, 8, 7, 7, 96).transpose(2, 3).reshape(x.shape) + x", (32, 56, 56, 96),
         norm="nn.LayerNorm(96)", mix="nn.Conv1d(196, 196, 1, groups=4)"),
    _row(277, "", "f3(relu(f2(relu(f1(max_pool2d(relu(c2(max_pool2d(relu(c1(x)), 2))), 2).flatten(1))))))",
         (4096, 1, 32, 32), c1="conv2d 1-6 k5", c2="conv2d 6-16 k5", f1="linear 400-120", f2="linear 120-84",
         f3="linear 84-20"),
    _row(278, "", "x = c(relu(b(relu(a(x))))); f(relu(e(relu(d(relu(x))))))", (1024, 1024), a="linear 1024-1024",
         b="linear 1024-1024", c="linear 1024-1024", d="linear 1024-1024", e="linear 1024-1024", f="linear 1024-1024"),
    _row(279, "", "binary_cross_entropy(sigmoid(x), sigmoid(t).expand_as(x))", (16384, 4096), t=(4096,)),
    _row(280, "", "y = norm(x).transpose(1, 2); y = point(silu(batch(depth(glu(widen(y), 1))))); x + y.transpose(1, 2)",
         (16, 1024, 256), norm="nn.LayerNorm(256)", widen="conv1d 256-512 k1",
         depth="nn.Conv1d(256, 256, 31, padding=15, groups=256)", batch="nn.BatchNorm1d(256)",
         point="conv1d 256-256 k1"),
    _row(281, "", "h = x @ w; e = leaky_relu((h @ p) + (h @ q).transpose(1, 2), 0.2); "
         "elu(softmax(torch.where(t > 0, e, -9e15), -1) @ h)", (16, 512, 128), w=(128, 64), p=(64, 1), q=(64, 1),
         t=(512, 512)),
    _row(282, "", "relu(t @ (x @ w) + b)", (32, 1024, 128), t=(1024, 1024), w=(128, 128), b=(128,)),
    _row(283, "", "relu(n2(c2(relu(n1(c1(x)))))).max(-1)[0]", (16, 64, 1024, 32), c1="conv2d 64-64 k1",
         n1="nn.BatchNorm2d(64)", c2="conv2d 64-128 k1", n2="nn.BatchNorm2d(128)"),
    _row(284, "", "m, v = x.chunk(2, 1); -0.5 * (1 + v - m.square() - exp(v)).sum(1).mean()", (65536, 512)),
    _row(285, "", "m, v = x.chunk(2, 1); m + exp(0.5 * v) * t", (65536, 512), given={"t": (65536, 256)}),
    _row(286, "", "torch.sqrt(gx(x).square() + gy(x).square() + 1e-6)", (16, 1, 1024, 1024),
         gx="conv2d 1-1 k3 p1 nobias", gy="conv2d 1-1 k3 p1 nobias"),
    _row(287, "", "blur(pad(x, (1, 2, 1, 2), mode='reflect'))", (32, 64, 128, 128),
         blur="nn.Conv2d(64, 64, 4, stride=2, groups=64, bias=False)"),
    _row(288, "", "n = x.norm(dim=(1, 2), keepdim=True); x * (n / (n.mean(-1, keepdim=True) + 1e-6)) * g + b + x",
         (32, 56, 56, 384), g=(384,), b=(384,)),
    _row(289, "", "(softmax(s(x), 1) * x).sum(1)", (256, 512, 768), s="linear 768-1"),
    _row(290, "", "u, v = gelu(widen(norm(x))).chunk(2, -1); "
         "narrow(u * mix(gate(v).transpose(1, 2)).transpose(1, 2)) + x",
         (32, 256, 512), norm="nn.LayerNorm(512)", widen="linear 512-2048", gate="nn.LayerNorm(1024)",
         mix="linear 256-256", narrow="linear 1024-512"),
    _row(291, "", "torch.einsum('be,beo->bo', softmax(g(x), -1), torch.einsum('bi,eio->beo', x, w))", (4096, 512),
         g="linear 512-8", w=(8, 512, 512)),
    _row(292, "linear 2048-2048", "y + up(down(x)) * 2.0", (8192, 2048), down="linear 2048-16 nobias",
         up="linear 16-2048 nobias"),
    _row(293, "", "g, b = film(t).chunk(2, 1); relu(norm(x) * (1 + g[:, :, None, None]) + b[:, :, None, None])",
         (32, 128, 64, 64), film="linear 256-256", norm="nn.InstanceNorm2d(128)", given={"t": (32, 256)}),
    _row(294, "", "x = x - logsumexp(x, 2, keepdim=True); x = x - logsumexp(x, 1, keepdim=True); "
         "x = x - logsumexp(x, 2, keepdim=True); exp(x - logsumexp(x, 1, keepdim=True))", (64, 512, 512)),
    _row(295, "", "logsumexp(x.unsqueeze(2) + t, 1)", (4096, 64), t=(64, 64)),
    _row(296, "", "exp(-0.5 * ((x.unsqueeze(1) - t) ** 2).sum(-1)) @ v", (8192, 32), t=(1024, 32), v=(1024, 64)),
    _row(297, "", "q = qk(x).unflatten(-1, (16, 64)).transpose(1, 2); k, v = kv(x).unflatten(-1, (2, 4, 64))"
         ".permute(2, 0, 3, 1, 4); k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1); "
         "o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))", (8, 1024, 1024),
         qk="linear 1024-1024 nobias", kv="linear 1024-512 nobias", o="linear 1024-1024 nobias"),
    _row(298, "", "log(clamp(x.square() @ f, 1e-10)).transpose(1, 2)", (64, 1024, 257), f=(257, 80)),
    _row(299, "", "m = 0.9 * t + 0.1 * x; v = 0.999 * s + 0.001 * x.square(); p - 0.001 * m / (torch.sqrt(v) + 1e-8)",
         (4096, 4096), given={"t": (4096, 4096), "s": (4096, 4096), "p": (4096, 4096)}),
    _row(300, "", "hard = one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype); "
         "hard - softmax(x, -1).detach() + softmax(x, -1)", (16384, 1024)),
    _row(301, "", "x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] - x[:, :, ::2, 1::2] - x[:, :, 1::2, 1::2]",
         (32, 64, 128, 128)),
    _row(302, "", "p = sigmoid(x); q = p * t + (1 - p) * (1 - t); l = binary_cross_entropy_with_logits(x, t, "
         "reduction='none'); ((0.25 * t + 0.75 * (1 - t)) * l * (1 - q) ** 2).mean()", (16384, 1024),
         t="nn.Parameter((torch.rand(16384, 1024) > 0.9).float())"),
    _row(303, "", "a, b = normalize(f(x)), normalize(g(t)); l = s.exp() * a @ b.T; i = arange(x.shape[0], "
         "device=x.device); (cross_entropy(l, i) + cross_entropy(l.T, i)) / 2", (4096, 768), f="linear 768-512 nobias",
         g="linear 1024-512 nobias", s=NUMBER, given={"t": (4096, 1024)}),
    _row(304, "", "a, b = w12(x).chunk(2, -1); x + w3(silu(a) * b)", (8192, 1024), w12="linear 1024-5632 nobias",
         w3="linear 2816-1024 nobias"),
    _row(305, "linear 1024-1024", "y.unflatten(-1, (256, 4)).amax(-1)", (16384, 1024)),
    _row(306, "", "a = sigmoid(g(x)); a * relu(h(x)) + (1 - a) * x", (16384, 1024), g="linear 1024-1024",
         h="linear 1024-1024"),
    _row(307, "", "s = x.std(0).mean(); torch.cat((x, s.expand(x.shape[0], 1, 16, 16)), 1)", (256, 512, 16, 16)),
    _row(308, "", "x @ r.transpose(1, 2) + t", (64, 16384, 3), given={"r": (64, 3, 3), "t": (64, 1, 3)}),
    _row(309, "", "u = q[..., :3]; c = torch.cross(u, x, dim=-1) + q[..., 3:] * x; x + 2 * torch.cross(u, c, dim=-1)",
         (1048576, 3), given={"q": (1048576, 4)}),
    _row(310, "", "h = (x[..., None] * f).flatten(-2); torch.cat((x, sin(h), cos(h)), -1)", (262144, 3), f=(10,)),
    _row(311, "", "-10 * log10((x - t).square().mean((1, 2, 3)))", (64, 3, 512, 512), given={"t": (64, 3, 512, 512)}),
    _row(312, "", "x - interpolate(avg_pool2d(x, 2), scale_factor=2, mode='bilinear')", (32, 32, 128, 128)),
    _row(313, "", "m = avg_pool2d(x, 9, 1, 4); (x - m) / torch.sqrt(avg_pool2d(x * x, 9, 1, 4) - m * m + 1.0)",
         (16, 32, 256, 256)),
    _row(314, "", "a = softmax(s(x).flatten(2), -1); c = x.flatten(2) @ a.transpose(1, 2); x + "
         "e(relu(n(d(c.unsqueeze(-1)))))", (32, 256, 56, 56), s="conv2d 256-1 k1", d="conv2d 256-64 k1",
         n="nn.LayerNorm((64, 1, 1))", e="conv2d 64-256 k1"),
    _row(315, "", "h = pad(x[:, :, :16], (0, 0, 0, 0, 0, 0, 0, 1))[:, 1:]; k = pad(x[:, :, 16:32], (0, 0, 0, 0, 0, 0, "
         "1, 0))[:, :-1]; torch.cat((h, k, x[:, :, 32:]), 2)", (16, 8, 128, 56, 56)),
    _row(316, "", "p = log_softmax(pi(x), -1); z = (t[:, None] - mu(x)) * torch.exp(-s(x)); -logsumexp(p - 0.5 * z * "
         "z - s(x), -1).mean()", (65536, 128), pi="linear 128-32", mu="linear 128-32", s="linear 128-32",
         given={"t": (65536,)}),
    _row(317, "", "x + (t - x).detach()", (4096, 4096), given={"t": (4096, 4096)}),
    _row(318, "", "p = softmax(x, -1); -(p * log(p + 1e-8)).sum(-1).mean()", (16384, 4096)),
    _row(319, "", "p, q = softmax(x, -1), softmax(t, -1); m = 0.5 * (p + q); 0.5 * ((p * (p / m).log()).sum(-1) + (q "
         "* (q / m).log()).sum(-1)).mean()", (16384, 1024), given={"t": (16384, 1024)}),
    _row(320, "", "r = exp(x - t); a = (d - d.mean()) / (d.std() + 1e-8); -torch.min(r * a, r.clamp(0.8, 1.2) * "
         "a).mean()", (4194304,), given={"t": (4194304,), "d": (4194304,)}),
    _row(321, "", "m, s = x.chunk(2, -1); s = clamp(s, -20, 2); a = m + torch.exp(s) * e; (-0.5 * e * e - s - "
         "0.9189385).sum(-1) - (2 * (0.6931472 - a - softplus(-2 * a))).sum(-1)", (262144, 64),
         given={"e": (262144, 32)}),
    _row(322, "", "(torch.cumsum(f(k)[..., None] * x[..., None, :], 1) * f(q)[..., None]).sum(-2)", (8, 512, 64),
         f="nn.Softplus()", given={"k": (8, 512, 64), "q": (8, 512, 64)}),
    _row(323, "", "p = softmax(x.flatten(2), -1).view(x.shape); torch.stack(((p * gx).sum((2, 3)), (p * gy).sum((2, "
         "3))), -1)", (64, 17, 128, 128), gx=(128,), gy=(128, 1)),
    _row(324, "", "exp(-((gx - x[..., :1, None]) ** 2 + (gy - x[..., 1:, None]) ** 2) / 8.0)", (256, 17, 2), gx=(128,),
         gy=(128, 1)),
    _row(325, "", "q = t.expand(-1, 50, -1); h = relu(a(torch.cat((q, x, q - x, q * x), -1))); w = b(h); (w * "
         "x).sum(1)", (2048, 50, 64), a="linear 256-36", b="linear 36-1", given={"t": (2048, 1, 64)}),
    _row(326, "", "t * (x @ w + b) + x", (65536, 256), w=(256, 256), b=(256,), given={"t": (65536, 256)}),
    _row(327, "", "m, n = x.mean((2, 3), keepdim=True), t.mean((2, 3), keepdim=True); s, u = x.std((2, 3), "
         "keepdim=True), t.std((2, 3), keepdim=True); (x - m) / (s + 1e-5) * u + n", (32, 128, 64, 64),
         given={"t": (32, 128, 64, 64)}),
    _row(328, "", "c = normalize(x) @ normalize(w).T; h = one_hot(arange(x.shape[0], device=x.device) % 8192, "
         "8192).to(x.dtype); 64.0 * (c - 0.35 * h)", (2048, 512), w=(8192, 512)),
    _row(329, "", "h = clamp(sigmoid(x), 1e-4, 1 - 1e-4); h * (max_pool2d(h, 3, 1, 1) == h).float()",
         (64, 80, 128, 128)),
    _row(330, "", "(softmax(x.view(x.shape[0], 4, 16, -1), 2) * p[:, None]).sum(2)", (32, 64, 8400), p=(16,)),
    _row(331, "", "m = avg_pool1d(pad(x.transpose(1, 2), (12, 12), mode='replicate'), 25, 1).transpose(1, 2); s((x - "
         "m).transpose(1, 2)).transpose(1, 2) + r(m.transpose(1, 2)).transpose(1, 2)", (256, 336, 64),
         s="linear 336-96", r="linear 336-96"),
    _row(332, "", "avg_pool2d(clamp(x, min=1e-6).pow(p), x.shape[-2:]).pow(1.0 / p)", (64, 512, 32, 32),
         p="nn.Parameter(torch.ones(1) * 3)"),
    _row(333, "", "a = max_pool2d(x, 5, 1, 2); b = max_pool2d(a, 5, 1, 2); torch.cat((x, a, b, max_pool2d(b, 5, 1, "
         "2)), 1)", (32, 128, 40, 40)),
    _row(334, "", "silu(n(c(torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), "
         "1))))", (32, 3, 320, 320), c="conv2d 12-32 k3 p1 nobias", n="nn.BatchNorm2d(32)"),
    _row(335, "", "y = relu(n(c(x))); torch.cat((y, relu(m(d(y)))), 1)", (64, 32, 56, 56), c="conv2d 32-32 k1",
         n="nn.BatchNorm2d(32)", d="nn.Conv2d(32, 32, 3, 1, 1, groups=32)", m="nn.BatchNorm2d(32)"),
    _row(336, "", "h, w = x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3); y = "
         "hardswish(n(c(torch.cat((h, w), 2)))); h, w = y.split([56, 56], 2); x * sigmoid(a(h)) * "
         "sigmoid(b(w.transpose(2, 3)))", (32, 128, 56, 56), c="conv2d 128-16 k1", n="nn.BatchNorm2d(16)",
         a="conv2d 16-128 k1", b="conv2d 16-128 k1"),
    _row(337, "", "x * sigmoid(p(relu(a(x) + b(t))))", (32, 64, 64, 64), p="conv2d 32-1 k1", a="conv2d 64-32 k1",
         b="conv2d 128-32 k1", given={"t": (32, 128, 64, 64)}),
    _row(338, "", "a, b = x.chunk(2, -1); s, m = f(a).chunk(2, -1); s = tanh(s); torch.cat((a, b * torch.exp(s) + m), "
         "-1)", (65536, 256), f="linear 128-256"),
    _row(339, "", "((normalize(x) - normalize(t)).square() * w).sum(1).mean((1, 2))", (16, 256, 64, 64), w=(256, 1, 1),
         given={"t": (16, 256, 64, 64)}),
    _row(340, "", "z = x - x.mean(0); s = torch.sqrt(z.var(0) + 1e-4); c = z.T @ z / (x.shape[0] - 1); relu(1 - "
         "s).mean() + (c.square().sum() - c.diagonal().square().sum()) / x.shape[1]", (4096, 1024)),
    _row(341, "", "-(softmax((t - c) / 0.04, -1) * log_softmax(x / 0.1, -1)).sum(-1).mean()", (4096, 16384), c=(16384,),
         given={"t": (4096, 16384)}),
    _row(342, "", "i, f, o, g = c(torch.cat((x, h), 1)).chunk(4, 1); k = sigmoid(f) * m + sigmoid(i) * tanh(g); "
         "sigmoid(o) * tanh(k)", (16, 32, 64, 64), c="conv2d 96-256 k3 p1",
         given={"h": (16, 64, 64, 64), "m": (16, 64, 64, 64)}),
    _row(343, "", "f(x, t)", (16384, 128), f="nn.Bilinear(128, 128, 64)", given={"t": (16384, 128)}),
    _row(344, "", "f = x.flatten(2); y = (f @ f.transpose(1, 2) / f.shape[-1]).flatten(1); normalize(torch.sign(y) * "
         "torch.sqrt(y.abs() + 1e-10))", (64, 256, 28, 28)),
    _row(345, "", "i = torch.min(x[:, 2:], t[:, 2:]) - torch.max(x[:, :2], t[:, :2]); c = torch.max(x[:, 2:], t[:, "
         "2:]) - torch.min(x[:, :2], t[:, :2]); i = i.clamp(min=0).prod(1); a = c.prod(1); u = (x[:, 2:] - x[:, "
         ":2]).prod(1) + (t[:, 2:] - t[:, :2]).prod(1) - i; (1 - i / u + (a - u) / a).mean()", (1048576, 4),
         given={"t": (1048576, 4)}),
    _row(346, "convT2d 48-24 k4 s2 p1", "y * hardsigmoid(y).mean(1, keepdim=True)", (32, 48, 64, 64)),
    _row(347, "conv3d 8-32 k3 p1", "gelu(y.amax(2)).mean((2, 3))", (16, 8, 16, 64, 64)),
    _row(348, "conv2d 16-96 k5 s2 p2", "avg_pool2d(y * sigmoid(1.702 * y), 3, 2, 1)", (64, 16, 128, 128)),
    _row(349, "conv1d 64-128 k9 p4", "max_pool1d(y, 4).std(-1)", (32, 64, 8192)),
    _row(350, "linear 1024-4096", "logsumexp(y.unflatten(1, (64, 64)), -1).amax(1)", (4096, 1024)),
    _row(351, "conv2d 32-64 k3 s2 p1", "torch.cat((y.amax((2, 3)), y.mean((2, 3)), y.std((2, 3))), 1)",
         (64, 32, 128, 128)),
    _row(352, "convT3d 16-8 k3 s2 p1 o1", "softmax(y, 1).amax(1)", (8, 16, 24, 32, 32)),
    _row(353, "conv2d 3-64 k7 s2 p3", "lp_pool2d(relu(y), 2.0, 2)", (64, 3, 224, 224)),
    _row(354, "conv2d 32-32 k3 p1", "y / (1e-5 + y.abs().amax((2, 3), keepdim=True))", (32, 32, 128, 128)),
    _row(355, "conv2d 16-32 k3 p1", "y[:, :, 1:-1, 1:-1].mean((2, 3))", (32, 16, 256, 256)),
    _row(356, "", "m, n = conv2d(x, w, padding=5, groups=3), conv2d(t, w, padding=5, groups=3); a = conv2d(x * "
         "x, w, padding=5, groups=3) - m * m; b = conv2d(t * t, w, padding=5, groups=3) - n * n; c = conv2d(x * t, w, "
         "padding=5, groups=3) - m * n; ((2 * m * n + 1e-4) * (2 * c + 9e-4) / ((m * m + n * n + 1e-4) * (a + b + "
         "9e-4))).mean()", (16, 3, 256, 256),
         w="nn.Parameter(torch.full((3, 1, 11, 11), 1 / 121))", given={"t": (16, 3, 256, 256)}),
    _row(357, "", "torch.sqrt((x - t).square() + 1e-6).mean() + 0.1 * ((x[..., 1:] - x[..., :-1]) - (t[..., 1:] - "
         "t[..., :-1])).abs().mean()", (32, 3, 512, 512), given={"t": (32, 3, 512, 512)}),
    _row(358, "", "2 * x - t + 0.1 * (torch.roll(x, 1, 2) + torch.roll(x, -1, 2) + torch.roll(x, 1, 3) + torch.roll(x, "
         "-1, 3) - 4 * x)", (64, 1, 512, 512), given={"t": (64, 1, 512, 512)}),
    _row(359, "", "d = (x[:, :, None] - x[:, None]).square().sum(-1) + 0.1; s = 1 / d ** 3; (s * s - s).sum((1, 2))",
         (64, 512, 3)),
    _row(360, "", "exp(-torch.cdist(x, x).square()).mean() + exp(-torch.cdist(t, t).square()).mean() - 2 * "
         "exp(-torch.cdist(x, t).square()).mean()", (4096, 64), given={"t": (4096, 64)}),
    _row(361, "", "e = t[:, None] - x; torch.maximum(q * e, (q - 1) * e).mean()", (262144, 9), q=(9,),
         given={"t": (262144,)}),
    _row(362, "", "m, s = x.chunk(2, -1); (0.5 * (s + (t - m).square() * exp(-s))).mean()", (262144, 128),
         given={"t": (262144, 64)}),
    _row(363, "", "g = softmax(x, -1); (g.mean(0) * (g > 0.015625).float().mean(0)).sum() * 64", (262144, 64)),
    _row(364, "", "a = sigmoid(c)[arange(x.shape[0], device=x.device) % 1000][:, None, None, None]; torch.sqrt(a) * x "
         "+ torch.sqrt(1 - a) * t", (64, 3, 256, 256), c=(1000,), given={"t": (64, 3, 256, 256)}),
    _row(365, "", "torch.addcdiv(torch.lerp(x, t, 0.1), t, s.square() + 1.0, value=-0.01)", (4096, 4096),
         given={"t": (4096, 4096), "s": (4096, 4096)}),
    _row(366, "", "r(n(torch.cat((x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), -1)))",
         (32, 56, 56, 96), n="nn.LayerNorm(384)", r="linear 384-192 nobias"),
    _row(367, "", "n(x + g * tanh(t))", (16384, 1024), n="nn.LayerNorm(1024)", g=(1024,), given={"t": (16384, 1024)}),
    _row(368, "", "a = softmax(torch.einsum('bhij,hg->bgij', x, w), -1); torch.einsum('bhij,hg->bgij', a, v)",
         (16, 8, 512, 512), w=(8, 8), v=(8, 8)),
    _row(369, "", "(x - c[arange(x.shape[0], device=x.device) % 100]).square().sum(-1).mean()", (65536, 256),
         c=(100, 256)),
    _row(370, "", "d = x.square().sum(-1, keepdim=True) - 2 * x @ e.T + e.square().sum(-1); q = e[d.argmin(-1)]; x + "
         "(q - x).detach()", (65536, 64), e=(512, 64)),
    _row(371, "", "p = softmax(x, 1); 1 - ((2 * (p * t).sum((2, 3)) + 1) / ((p + t).sum((2, 3)) + 1)).mean()",
         (16, 8, 256, 256), given={"t": (16, 8, 256, 256)}),
    _row(372, "", "w = softmax(a(tanh(b(x))), 2); m = (w * x).sum(2); s = torch.sqrt(((w * x * x).sum(2) - m * "
         "m).clamp(min=1e-6)); torch.cat((m, s), 1)", (64, 512, 400), b="conv1d 512-128 k1", a="conv1d 128-512 k1"),
    _row(373, "", "d = (x - x.mean((2, 3), keepdim=True)).square(); v = d.sum((2, 3), keepdim=True) / 3135; x * "
         "sigmoid(d / (4 * (v + 1e-4)) + 0.5)", (32, 128, 56, 56)),
    _row(374, "", "y = x.view(4, -1, 1, 512, 8, 8); y = (y - y.mean(0)).square().mean(0); y = torch.sqrt(y + "
         "1e-8).mean((2, 3, 4), keepdim=True).mean(2).repeat(4, 1, 8, 8); torch.cat((x, y), 1)", (256, 512, 8, 8)),
    _row(375, "", "conv2d(torch.sign(x), torch.sign(w) * w.abs().mean((1, 2, 3), keepdim=True), padding=1)",
         (32, 64, 56, 56), w=(64, 64, 3, 3)),
    _row(376, "", "torch.fft.irfft(torch.fft.rfft(x, n=2048) * torch.fft.rfft(k, n=2048), n=2048)[..., :1024]",
         (32, 256, 1024), k=(256, 1024)),
    _row(377, "", "a, b, c = x.unbind(-1); torch.stack((a * b, b * c, 3 * c * c - 1, a * c, a * a - b * b), -1)",
         (1048576, 3)),
    _row(378, "", "r, i, j, k = normalize(x, dim=-1).unbind(-1); torch.stack((1 - 2 * (j * j + k * k), 2 * (i * j - "
         "k * r), 2 * (i * k + j * r), 2 * (i * j + k * r), 1 - 2 * (i * i + k * k), 2 * (j * k - i * r), 2 * (i * k - "
         "j * r), 2 * (j * k + i * r), 1 - 2 * (i * i + j * j)), -1).view(-1, 3, 3)", (524288, 4)),
    _row(379, "", "u = t.abs() / (1 + t.abs()); softmax((x - log(-log(u + 1e-9) + 1e-9)) / 0.5, -1)", (16384, 1024),
         given={"t": (16384, 1024)}),
    _row(380, "", "interpolate(x, scale_factor=0.5, mode='bilinear') - max_pool2d(x, 2)", (32, 64, 128, 128)),
    _row(381, "", "clamp(interpolate(x, scale_factor=2, mode='bicubic'), 0, 1)", (16, 3, 256, 256)),
    _row(382, "", "(x * t[..., None]).sum(1) / t.sum(1, keepdim=True).clamp(min=1)", (64, 512, 768),
         given={"t": (64, 512)}),
    _row(383, "", "q, k, v = x.unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 4, 1); softmax(normalize(q, dim=-1) @ "
         "normalize(k, dim=-1).transpose(-2, -1) * s, -1) @ v", (16, 784, 1536), s=(8, 1, 1)),
    _row(384, "", "head(n(x)[:, 0])", (64, 197, 768), n="nn.LayerNorm(768)", head="linear 768-1000"),
    _row(385, "conv2d 32-64 k3 p1", "adaptive_avg_pool2d(relu(y), 7).flatten(1) @ w", (32, 32, 112, 112), w=(3136, 10)),
    _row(386, "conv2d 16-64 k3 p1", "pixel_unshuffle(y, 2).mean(1)", (32, 16, 128, 128)),
    _row(387, "conv1d 64-128 k7 s2 p3", "max_pool1d(softplus(norm(y)), 3, 2, 1)", (64, 64, 16384),
         norm="nn.BatchNorm1d(128)"),
    _row(388, "", "adaptive_avg_pool2d(logsigmoid(conv(x)), (3, 5)) * s", (64, 64, 127, 129), s=(128, 1, 1),
         conv="nn.Conv2d(64, 128, 3, padding=2, dilation=2, groups=4)"),
    _row(389, "convT2d 64-32 k3 s2 p1 o1", "y = selu(y); y - y.amax(1, keepdim=True)", (32, 64, 127, 129)),
    _row(390, "", "tanhshrink(glu(conv(x), 1)).mean(2)", (8, 16, 16, 127, 127),
         conv="nn.Conv3d(16, 32, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2))"),
    _row(391, "linear 2048-8192", "y = softsign(y); (y - y.amin(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-5)",
         (8192, 2048)),
    _row(392, "conv2d 48-96 k3 p1", "hardsigmoid(pixel_shuffle(relu6(norm(y)), 2) + t)", (64, 48, 96, 96),
         norm="nn.GroupNorm(12, 96)", t=(24, 1, 1)),
    _row(393, "conv2d 32-32 k3 p1", "r = y.clone(); selu(norm(y) + r).sum(1, keepdim=True)", (64, 32, 160, 160),
         norm="nn.InstanceNorm2d(32, affine=True)"),
    _row(394, "convT3d 24-48 k3 s2 p1 o1", "adaptive_max_pool3d(threshold(norm(y), 0.1, 0.0), 1).flatten(1)",
         (16, 24, 20, 48, 48), norm="nn.GroupNorm(6, 48)"),
    _row(395, "", "y = depth(x); hardswish(y * sigmoid(y.mean(2, keepdim=True))) + x", (32, 256, 8192),
         depth="nn.Conv1d(256, 256, 15, padding=7, groups=256)"),
    _row(396, "convT1d 128-64 k4 s2 p1", "norm(leaky_relu(y, 0.2)).cumsum(2)", (16, 128, 16384),
         norm="nn.GroupNorm(8, 64)"),
    _row(397, "", "avg_pool2d(gelu(conv(x)), (2, 3)).amax(1)", (64, 3, 384, 384),
         conv="nn.Conv2d(3, 32, (7, 3), stride=(2, 1), padding=(3, 1))"),
    _row(398, "conv2d 64-48 k1", "y = elu(y); (softmax(y, 1) * y).sum(1, keepdim=True)", (32, 64, 192, 192)),
    _row(399, "linear 1024-1024", "y = norm(selu(y)); y + drop(celu(y, 0.5)) + x", (32768, 1024),
         norm="nn.LayerNorm(1024)", drop="nn.Dropout(0.1)"),
    _row(400, "conv2d 16-32 k5 p2", "max_pool2d(softsign(norm(y)), 3, 2, 1) + b", (64, 16, 192, 192), training=True,
         norm="nn.BatchNorm2d(32)"),
    _row(401, "convT2d 32-16 k5 s3 p1", "y = clamp(y, -2, 2); y / y.norm(dim=1, keepdim=True).clamp(min=1e-6)",
         (32, 32, 130, 126)),
    _row(402, "conv3d 8-24 k3 p1", "hardsigmoid(y.amin(1) * y.amax(1)) + y.mean(1)", (16, 8, 16, 96, 96)),
    _row(403, "conv2d 24-64 k3 s2 p1", "gelu(norm(y.flatten(2).transpose(1, 2))).mean(1)", (32, 24, 224, 224),
         norm="nn.LayerNorm(64)"),
    _row(404, "linear 2048-4096", "logsigmoid(avg_pool1d(glu(y).unsqueeze(1), 8)).sum(2)", (8192, 2048)),
    _row(405, "", "h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * g; a, b = h.chunk(2, -1); "
         "torch.cat((a * c - b * s, b * c + a * s), -1)", (8, 16, 2048, 128), g=(128,), c=(2048, 64), s=(2048, 64)),
    _row(406, "", "grid_sample(x, t, align_corners=False) * m", (16, 64, 128, 128), m=(64, 1, 1),
         given={"t": (16, 128, 128, 2)}),
    _row(407, "", "softmax(torch.where(x < x.topk(4, -1)[0][..., -1:], -torch.inf, x), -1)", (16384, 1024)),
    _row(408, "", "torch.cat((relu(a(x)), relu(b(x)), relu(c(x)), relu(p(x.mean((2, 3), keepdim=True)))"
         ".expand(-1, -1, 64, 64)), 1)", (32, 128, 64, 64), a="conv2d 128-64 k1", p="conv2d 128-64 k1",
         b="nn.Conv2d(128, 64, 3, padding=6, dilation=6)", c="nn.Conv2d(128, 64, 3, padding=12, dilation=12)"),
    _row(409, "", "r, u = sigmoid(n(g(torch.cat((x, t), 1)))).chunk(2, 1); c = tanh(i(x) + r * h(t)); "
         "u * t + (1 - u) * c", (32768, 512), g="linear 1024-1024", n="nn.LayerNorm(1024)", i="linear 512-512",
         h="linear 512-512", given={"t": (32768, 512)}),
    _row(410, "", "d = (x - t).abs(); torch.where(d < 0.5, 14 * log1p(d.pow(2.1 - t)), 3 * d - 1).mean()",
         (64, 16, 192, 192), given={"t": (64, 16, 192, 192)}),
    _row(411, "", "q, k, v, g = p(x).chunk(4, -1); softmax(q, -1) @ (softmax(k, 1).transpose(1, 2) @ v) * silu(g)",
         (16, 4096, 256), p="linear 256-1024"),
    _row(412, "", "y = n(c(x)); relu(y * sigmoid(b(relu(a(y.mean((2, 3), keepdim=True))))) + x)", (64, 128, 56, 56),
         c="conv2d 128-128 k3 p1 nobias", n="nn.BatchNorm2d(128)", a="conv2d 128-16 k1", b="conv2d 16-128 k1"),
    _row(413, "", "h = x * torch.rsqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5) * g; "
         "a, b = d(p(h)).chunk(2, 1); x + q(gelu(a) * b)", (16, 48, 128, 128), g=(48, 1, 1), p="conv2d 48-256 k1",
         d="nn.Conv2d(256, 256, 3, padding=1, groups=256)", q="conv2d 128-48 k1"),
    _row(414, "", "a = torch.cumsum(-softplus(x), 1); exp(a) * torch.cumsum(t * exp(-a), 1)", (8, 512, 4096),
         given={"t": (8, 512, 4096)}),
    _row(415, "", "x * sigmoid(l(x))", (4096, 64, 512), l="linear 512-1"),
    _row(416, "", "(softmax(l(tanh(x)), 1) * x).sum(1)", (128, 1024, 256), l="linear 256-1"),
    _row(417, "", "l(gelu(h(x))).squeeze(-1)", (65536, 512), h="linear 512-1024", l="linear 1024-1"),
    _row(418, "", "relu(torch.baddbmm(b, x, t))", (64, 512, 256), b=(512,), given={"t": (64, 256, 512)}),
    _row(419, "", "silu(torch.addmm(b, x, w, beta=0.5, alpha=2.0))", (8192, 1024), w=(1024, 2048), b=(2048,)),
    _row(420, "", "torch.tril(x @ t.transpose(1, 2)) @ u", (64, 512, 64),
         given={"t": (64, 512, 64), "u": (64, 512, 64)}),
    _row(421, "", "embedding_bag((x.abs() * 20000).long() % 50000, w)", (8192, 32), w=(50000, 256)),
    _row(422, "", "huber_loss(x, t, delta=0.5)", (64, 16, 192, 192), given={"t": (64, 16, 192, 192)}),
    _row(423, "", "torch.logaddexp(x, t).mean(-1)", (16384, 4096), given={"t": (16384, 4096)}),
    _row(424, "", "c = binary_cross_entropy_with_logits(x, sigmoid(t), reduction='none'); "
         "((1 - exp(-c)) ** 2 * c).mean()", (256, 65536), given={"t": (256, 65536)}),
    _row(425, "", "p, g = sigmoid(x).flatten(1), t.flatten(1); "
         "1 - (2 * (p * g).sum(1) + 1) / (p.sum(1) + g.sum(1) + 1)", (256, 1, 512, 512),
         given={"t": (256, 1, 512, 512)}),
    _row(426, "", "x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) / 32 + 1e-6) * w", (32768, 1024), w=(1024,)),
    _row(427, "", "x * sigmoid(c(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)))",
         (64, 128, 64, 64), c="nn.Conv2d(2, 1, 7, padding=3)"),
    _row(428, "", "a, b = d(relu(c(x.mean((2, 3))))), d(relu(c(x.amax((2, 3))))); x * sigmoid(a + b)[:, :, None, None]",
         (64, 256, 56, 56), c="linear 256-16", d="linear 16-256"),
    _row(429, "", "a = softmax(d(tanh(c(x))), 2); m = (a * x).sum(2); "
         "torch.cat((m, ((a * x * x).sum(2) - m * m).clamp(min=1e-9).sqrt()), 1)", (64, 512, 1000),
         c="conv1d 512-128 k1", d="conv1d 128-512 k1"),
    _row(430, "", "a = softmax(c(x).flatten(2), 1); "
         "v = a @ x.flatten(2).transpose(1, 2) - a.sum(-1, keepdim=True) * w; "
         "normalize(normalize(v, dim=2).flatten(1), dim=1)", (64, 128, 32, 32), c="conv2d 128-64 k1", w=(64, 128)),
    _row(431, "", "p = softmax(x, -1).mean(0); exp(-(p * log(p + 1e-10)).sum())", (32768, 1024)),
    _row(432, "", "-torch.logsumexp(log_softmax(x, -1) - 0.5 * ((t - u) / exp(s)).square() - s, -1).mean()",
         (262144, 32), given={"t": (262144, 1), "u": (262144, 32), "s": (262144, 32)}),
    _row(433, "", "relu(torch.kron(x, t))", (128, 128), given={"t": (128, 64)}),
    _row(434, "", "v = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5); "
         "conv2d(x, v, padding=1)", (64, 64, 64, 64), w=(128, 64, 3, 3)),
    _row(435, "", "1 - (2 * (x * t).sum(1) + 1) / (x.sum(1) + t.sum(1) + 1)", (4096, 12000),
         given={"t": (4096, 12000)}),
    _row(436, "", "p, q = softmax(x, 1), softmax(t, 1); m = (p + q) / 2; "
         "0.5 * ((p * (log(p) - log(m))).sum(1) + (q * (log(q) - log(m))).sum(1))", (4096, 12000),
         given={"t": (4096, 12000)}),
    _row(437, "", "a, b = x - x.mean(1, keepdim=True), t - t.mean(1, keepdim=True); "
         "(a * b).sum(1) / ((a * a).sum(1) * (b * b).sum(1)).sqrt()", (4096, 12000), given={"t": (4096, 12000)}),
    _row(438, "", "1 - (x * t).sum(1) / (torch.linalg.vector_norm(x, dim=1) * torch.linalg.vector_norm(t, dim=1))",
         (4096, 12000), given={"t": (4096, 12000)}),
    _row(439, "", "torch.cat((x.mean(1), x.std(1), x.amax(1), x.abs().mean(1)))", (4096, 12000)),
    _row(440, "", "x.std(1) * t.std(1) - ((x - x.mean(1, keepdim=True)) * (t - t.mean(1, keepdim=True))).mean(1)",
         (8192, 4096), given={"t": (8192, 4096)}),
    _row(441, "", "layer_norm(x, (20000,)) * w + t", (4096, 20000), w=(20000,), given={"t": (4096, 20000)}),
    _row(442, "", "(softmax(x, 1) * (log_softmax(x, 1) - log_softmax(t, 1))).sum(1)", (4096, 12000),
         given={"t": (4096, 12000)}),
    _row(443, "", "((x - x.mean(1, keepdim=True)) * (t - t.mean(1, keepdim=True))).sum(1)", (4096, 20000),
         given={"t": (4096, 20000)}),
    _row(444, "", "-(softmax(x, -1) * log_softmax(x, -1)).sum(-1)", (2048, 50257)),
    _row(445, "", "h = x / 0.7; h = h - h.mean(1, keepdim=True); h / (h.abs().amax(1, keepdim=True) + 1e-6)",
         (2048, 50257)),
    _row(446, "", "(softmax(t, 1) * (log_softmax(t, 1) - log_softmax(x, 1))).sum(1).mean()", (4096, 28000),
         given={"t": (4096, 28000)}),
    _row(447, "", "cross_entropy(x / 0.7, (t.abs() * 20000).long() % 50257)", (4096, 50257), given={"t": (4096,)}),
    _row(448, "conv2d 32-64 k3 p1", "softshrink(y) + hardshrink(y * 0.5)", (64, 32, 128, 128)),
    _row(449, "conv3d 8-32 k3 p1", "lp_pool3d(mish(y), 2.0, 2)", (16, 8, 16, 64, 64)),
    _row(450, "conv2d 3-96 k11 s4 p2", "local_response_norm(max_pool2d(relu(y), 3, 2), 5)", (128, 3, 224, 224)),
    _row(451, "linear 1024-4096", "h = tanh(y); h.masked_fill(h.abs() < 0.3, 0.0).sum(1)", (16384, 1024)),
    _row(452, "convT2d 64-32 k4 s2 p1 nobias", "hardtanh(silu(norm(y)) + t)", (32, 64, 64, 64),
         norm="nn.BatchNorm2d(32)", given={"t": (32, 32, 128, 128)}),
    _row(453, "conv1d 64-128 k5 p2", "adaptive_max_pool1d(logsigmoid(norm(y)), 50)", (64, 64, 4100),
         norm="nn.GroupNorm(8, 128)"),
    _row(454, "conv2d 3-96 k4 s4", "norm(y.flatten(2).transpose(1, 2) + p)", (64, 3, 256, 256), p=(4096, 96),
         norm="nn.LayerNorm(96)"),
    _row(455, "", "relu6(p(relu6(d(x)))).amax((2, 3))", (8, 32, 32, 56, 56), p="conv3d 32-64 k1",
         d="nn.Conv3d(32, 32, 3, padding=1, groups=32)"),
    _row(456, "", "log_softmax(torch.bmm(x, t.transpose(1, 2)) * 0.125, -1).amax(-1)", (64, 512, 64),
         given={"t": (64, 512, 64)}),
    _row(457, "linear 512-2048", "a, b = y.chunk(2, -1); norm(a * softplus(b))", (16384, 512),
         norm="nn.RMSNorm(1024)"),
    _row(458, "linear 512-1000", "cross_entropy(y, (t.abs() * 1000).long() % 1000, label_smoothing=0.1)",
         (16384, 512), given={"t": (16384,)}),
    _row(459, "conv2d 32-21 k1", "nll_loss(log_softmax(y, 1), (t.abs() * 100).long() % 21)", (32, 32, 256, 256),
         given={"t": (32, 256, 256)}),
    _row(460, "", "i = (t.abs() * 1000).long() % 1000; (clamp(x - x.gather(1, i) + 1, min=0).sum(1) - 1).mean()",
         (32768, 1000), given={"t": (32768, 1)}),
    _row(461, "", "s = clamp(softplus(v), min=1e-6); (0.5 * (log(s) + (x - t).square() / s)).mean()", (8192, 4096),
         given={"t": (8192, 4096), "v": (8192, 4096)}),
    _row(462, "", "poisson_nll_loss(x, t.abs(), log_input=True)", (8192, 4096), given={"t": (8192, 4096)}),
    _row(463, "", "l = log_softmax(x, 1); i = (t.abs() * 100).long() % 8; l = l.gather(1, i).squeeze(1); "
         "-((1 - exp(l)) ** 2 * l).mean()", (16, 8, 512, 512), given={"t": (16, 1, 512, 512)}),
    _row(464, "", "margin_ranking_loss(pairwise_distance(x, t), pairwise_distance(x, u), -torch.ones(x.shape[0], "
         "device=x.device), margin=0.5)", (32768, 512), given={"t": (32768, 512), "u": (32768, 512)}),
    _row(465, "conv2d 64-32 k1", "interpolate(relu(norm(y)), size=(150, 200))", (32, 64, 64, 64),
         norm="nn.BatchNorm2d(32)"),
    _row(466, "convT3d 16-16 k3 s2 p1 o1", "hardswish(y).mean(4).amax(3)", (16, 16, 16, 32, 32)),
    _row(467, "", "q(channel_shuffle(relu(g(x)), 8)) + x", (64, 64, 56, 56), q="conv2d 64-64 k1",
         g="nn.Conv2d(64, 64, 3, padding=1, groups=8)"),
    _row(468, "conv2d 16-32 k3 p1", "torch.roll(y.flip(3), 3, 2) * m", (64, 16, 128, 128)),
    _row(469, "conv2d 64-64 k3 p1 nobias", "celu(norm(y) + x) * 0.5", (64, 64, 56, 56), training=True,
         norm="nn.BatchNorm2d(64)"),
    _row(470, "", "gelu(torch.einsum('bchw,ck->bkhw', x, w) + b)", (32, 64, 128, 128), w=(64, 128), b=(128, 1, 1)),
    _row(471, "conv2d 16-32 k3", "avg_pool2d(pad(relu(y), (1, 1, 1, 1), mode='reflect'), 3, 1)", (32, 16, 194, 194)),
    _row(472, "", "1 - cosine_similarity(relu(a(x)), relu(b(t))).mean()", (32768, 256), a="linear 256-256",
         b="linear 256-256", given={"t": (32768, 256)}),
    _row(473, "conv2d 16-32 k3 p1", "softmax(adaptive_avg_pool2d(gelu(y), (7, 9)), 1)", (64, 16, 96, 160)),
    _row(474, "", "norm(e((x.abs() * 10000).long() % 30000) * 8 + p)", (64, 512), e="nn.Embedding(30000, 512)",
         p=(512, 512), norm="nn.LayerNorm(512)"),
    _row(475, "", "q, k, v = f(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4); "
         "softmax(q @ k.transpose(-2, -1) * 0.177 + r, -1) @ v + v", (2048, 49, 128), f="linear 128-384",
         r=(4, 49, 49)),
    _row(476, "conv3d 8-16 k3 p1", "y = norm(y); logsumexp(y.masked_fill(y > 1, 1.0), (1, 2))", (16, 8, 16, 96, 96),
         norm="nn.InstanceNorm3d(16)"),
    _row(477, "linear 1024-1024", "y = norm(y.unsqueeze(1)).squeeze(1); softmin(y.unflatten(1, (8, 128)), -1)"
         ".flatten(1)", (16384, 1024), norm="nn.InstanceNorm1d(1)"),
    _row(478, "conv2d 32-32 k3 p1", "relu(y * sigmoid(t) + x)", (64, 32, 112, 112), given={"t": (64, 1, 112, 112)}),
    _row(479, "conv1d 32-64 k3 p1", "a, b = y.chunk(2, 1); rnn = a * hardsigmoid(b); "
         "torch.cat((rnn.amax(2), rnn.mean(2)), 1)", (64, 32, 8192)),
    _row(480, "linear 2048-2048", "(normalize(y, p=1.0) * 100).round().clamp(0, 100)", (16384, 2048)),
    _row(481, "convT1d 64-32 k8 s4 p2", "tanh(y[..., 3:-3]) * s + t", (32, 64, 4096), s=(32, 1),
         given={"t": (32, 32, 16378)}),
    _row(482, "", "multilabel_soft_margin_loss(l(x), (t > 0.5).float())", (32768, 256), l="linear 256-80",
         given={"t": (32768, 80)}),
    _row(483, "conv2d 8-64 k5 s2 p2", "norm(rrelu(y)).flatten(1).std(1)", (64, 8, 192, 192),
         norm="nn.GroupNorm(1, 64)"),
    _row(484, "", "y = a(x).relu().square(); b(norm(y)) * 0.5 + x", (32768, 256), a="linear 256-512",
         b="linear 512-256", norm="nn.RMSNorm(512)"),
    _row(485, "conv3d 16-16 k3 p1 nobias", "max_pool3d(prelu(norm(y), w), (1, 2, 2))", (16, 16, 16, 64, 64),
         training=True, norm="nn.BatchNorm3d(16)", w=(16,)),
)
# fmt: on
