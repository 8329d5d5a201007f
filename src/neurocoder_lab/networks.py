"""The plain networks of the papers, and what is re-coded in each."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between."""
    layers = [layer for widths in pairwise(sizes) for layer in (nn.Linear(*widths, bias=bias), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def lenet(classes: int) -> nn.Sequential:
    """Five layers for 32 x 32 colour images: two 5 x 5 convolutions of 64 and 128, then the widths of the MLP.

    The largest of four is rectified, not the four: the same, for a quarter of the work.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(64, 128, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        mlp(3200, 512, 256, classes),
    )


class Dense(nn.Module):
    """One layer of a DenseNet: its output is appended to its input."""

    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(F.relu(self.norm(x)))), 1)


def densenet(classes: int, depth: int = 100, growth: int = 12) -> nn.Sequential:
    """DenseNet for CIFAR (Huang et al. 2017), without bottlenecks: three blocks, two transitions."""
    channels, layers = 16, [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for block in range(3):
        for _ in range((depth - 4) // 3):
            layers.append(Dense(channels, growth))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if block < 2:
            layers += [nn.Conv2d(channels, channels, 1, bias=False), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Peer(nn.Module):
    """A layer of rank-one experts by product keys (He 2024, of the package PEER-pytorch) on rows: the peer of a large
    program memory.

    Args:
        experts: a square.
        reads: experts that each head adds up, by a softmax of their scores.
        key_dim: length of a half of a key.
        sparse: gradients of the experts that were read, and no others.
    """

    def __init__(
        self, width: int, experts: int, heads: int, reads: int, key_dim: int | None = None, sparse: bool = False
    ):
        super().__init__()
        kind = import_module("PEER_pytorch").PEER
        self.layer = kind(
            width, heads=heads, num_experts=experts, num_experts_per_head=reads, dim_key=key_dim,
            non_competing_scores=False,
        )  # fmt: skip
        self.layer.weight_down_embed.sparse = self.layer.weight_up_embed.sparse = sparse

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]


class Recurrent(nn.Module):
    """A GRU and a head on its states at every step."""

    def __init__(self, inputs: int, hidden: int, outputs: int = 1):
        super().__init__()
        self.gru = nn.GRU(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.shortcut = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Sequential:
    """ResNet-18 for ImageNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [BasicBlock(channels, width, 1 if width == 64 else 2), BasicBlock(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


State = tuple[Tensor, Tensor]  # of an LSTM


class ActorCritic(nn.Module):
    """A3C with an LSTM: features of what is seen, their memory, and on it two layers, policy and value.

    Shapes: T steps, N environments, F features, H hidden, A actions.

    Args:
        torso: from what is seen (T * N, ...) to features (T * N, F).
        features: how many.
        actions: to choose from.
        hidden: units of the LSTM.
    """

    def __init__(self, torso: nn.Module, features: int, actions: int, hidden: int = 512):
        super().__init__()
        self.torso, self.lstm = torso, nn.LSTM(features, hidden)
        self.policy, self.value = nn.Linear(hidden, actions), nn.Linear(hidden, 1)

    def forward(self, seen_TN: Tensor, state: State | None, fresh_TN: Tensor) -> tuple[Tensor, Tensor, State]:
        """The policy's logits (T, N, A), the values (T, N), and the state after the last step.

        Args:
            state: after the step before; None where all environments begin.
            fresh_TN: in which an episode begins with this step: what was before is forgotten.
        """
        features = self.torso(pixels(seen_TN.flatten(0, 1)))
        hidden, state = remember(self.lstm, features.unflatten(0, fresh_TN.shape), state, fresh_TN)
        return self.policy(hidden), self.value(hidden).squeeze(-1), state


def pixels(seen: Tensor) -> Tensor:
    """Bytes as numbers from 0 to 1; other things as they are. Channels last: convolutions learn faster from them."""
    if seen.dtype != torch.uint8:
        return seen
    return seen.to(torch.float32, memory_format=torch.channels_last).div_(255)


def remember(lstm: nn.LSTM, x_TNF: Tensor, state: State | None, fresh_TN: Tensor) -> tuple[Tensor, State]:
    """The LSTM over all steps; it is called once for as many as pass without a new episode in any environment."""
    parts, starts = [], [0, *(fresh_TN[1:].any(1).nonzero().flatten() + 1).tolist()]
    none = x_TNF.new_zeros(1, x_TNF.shape[1], lstm.hidden_size)
    hidden, cell = (none, none) if state is None else state
    for start, end in zip(starts, [*starts[1:], len(x_TNF)], strict=True):
        kept_N1 = ~fresh_TN[start, :, None]
        hidden, cell = hidden * kept_N1, cell * kept_N1
        if end - start == 1:  # by the cell, which does not pack its weights anew
            after = torch.lstm_cell(x_TNF[start], (hidden[0], cell[0]), *lstm.all_weights[0])
            out_TNH, hidden, cell = after[0][None], after[0][None], after[1][None]
        else:
            out_TNH, (hidden, cell) = lstm(x_TNF[start:end], (hidden, cell))
        parts.append(out_TNH)
    return torch.cat(parts), (hidden, cell)


def small_torso(frames: int) -> nn.Sequential:
    """256 features of 84 x 84 pixels: the network of Mnih et al. 2016 (supplementary, section 8)."""
    return nn.Sequential(
        nn.Conv2d(frames, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(2592, 256), nn.ReLU(),
    )  # fmt: skip


def wide_torso(frames: int) -> nn.Sequential:
    """1,024 features of 84 x 84 pixels: what the 3.2M parameters of Neurocoder's Table 7 need before an LSTM of 512."""
    layers: list[nn.Module] = []
    for channels, width, size, padding in ((frames, 32, 5, 2), (32, 32, 5, 1), (32, 64, 4, 1), (64, 64, 3, 1)):
        layers += [nn.Conv2d(channels, width, size, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())
