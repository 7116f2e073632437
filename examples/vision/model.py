"""A small residual network with BatchNorm that tells the digit of a clip of any length."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


class Block(nn.Module):
    """Two convolutions, each with a BatchNorm, around which the input goes on (He et al., 2015)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        around = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.around = nn.Sequential(around, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.inner(x) + self.around(x))


class ClipNet(nn.Module):
    """A residual network for each frame, then the mean over a clip's own frames."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.frame = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width, width, 2),
            Block(width, 2 * width, 2),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Logits [n, classes] of clips whose frames [Σ lengths, 1, side, side] are in a row."""
        whose = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        seen = self.frame(frames)
        sums = seen.new_zeros(len(lengths), seen.shape[1]).index_add(0, whose, seen)
        return self.head(sums / lengths[:, None])


@torch.no_grad()
def accuracy(model: nn.Module, loader: torch.utils.data.DataLoader) -> float:
    """Share of a loader's clips that the model classifies rightly."""
    model.eval()
    right = total = 0
    for frames, lengths, digits in loader:
        right += int((model(frames, lengths).argmax(1) == digits).sum())
        total += len(digits)
    model.train()
    return right / total
