"""Convolutions and a GRU that tell the language of a recording of any length."""

import torch
from torch import nn


class SpeechNet(nn.Module):
    """Convolutions and a GRU, then the mean and the maximum over a recording's own frames.

    Outputs do not depend on padding: each layer's outputs beyond a recording's end are zeroed, and
    the GRU runs forwards only.
    """

    def __init__(self, bands: int, languages: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv1d(bands, width, 9, stride=4, padding=4),
                nn.Conv1d(width, width, 5, stride=2, padding=2),
            ]
        )
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(2 * width, languages)

    def forward(self, spectrograms: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits [n, languages] of padded spectrograms [n, frames, bands]."""
        inside = torch.arange(spectrograms.shape[1]) < lengths[:, None]
        x = spectrograms.transpose(1, 2)
        for layer in self.layers:
            inside = inside[:, :: layer.stride[0]]
            x = torch.relu(layer(x)) * inside[:, None]
        x, _ = self.gru(x.transpose(1, 2))
        x = x * inside[:, :, None]
        mean = x.sum(1) / inside.sum(1, keepdim=True)
        peak = x.masked_fill(~inside[:, :, None], -1.0).amax(1)  # a GRU's outputs are above -1
        return self.head(torch.cat([mean, peak], 1))


@torch.no_grad()
def accuracy(model: nn.Module, loader: torch.utils.data.DataLoader) -> float:
    """Share of a loader's samples that the model classifies rightly."""
    model.eval()
    right = total = 0
    for spectrograms, lengths, languages in loader:
        right += int((model(spectrograms, lengths).argmax(1) == languages).sum())
        total += len(languages)
    model.train()
    return right / total
