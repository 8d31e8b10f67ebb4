"""Trains a small regressor through `fusewright.optimize`: the replacement shares its parameters with the original.

Run it with `python examples/training_loop.py`.
"""

import torch
from torch import nn

import fusewright


class Brightness(nn.Module):
    """Predicts one number per image from pooled convolution responses."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AvgPool2d(4), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean(dim=(2, 3))).squeeze(1)


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images whose overall brightness varies, and that brightness as the target."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for _ in range(count):
        brightness = torch.rand(size, generator=generator)
        noise = torch.randn(size, 3, 34, 34, generator=generator)
        result.append((brightness[:, None, None, None] + 0.3 * noise, brightness))
    return result


def main() -> None:
    """Trains the replacement, then checks that the original learned the same thing."""
    torch.manual_seed(0)
    model = Brightness().train()
    data = batches(count=60, size=32)
    fast = fusewright.optimize(model, (data[0][0],), training=True)

    optimizer = torch.optim.Adam(fast.parameters(), lr=1e-2)
    for step, (images, target) in enumerate(data):
        loss = nn.functional.mse_loss(fast(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.5f}")

    images, target = data[0]
    with torch.no_grad():
        difference = (model(images) - fast(images)).abs().max().item()
    print(f"the original, which shares the trained parameters, agrees to {difference:.1e}")


if __name__ == "__main__":
    main()
