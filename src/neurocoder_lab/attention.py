"""What the attention of a Neurocoder tells about labelled inputs: distinct patterns, and the binary tree they make.

A pattern is the most-attended slot of each component. For the tree (Fig 4d of the paper, which does not say how it was
made) the attentions to a component over all inputs are parted into two, by 2-means that starts with the two sides of
their first principal axis. Which of the two an input has at the first component is its first branch, and so on: three
components make eight leaves.

Shapes: N inputs, R components, P slots, C classes, L leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COMMON = 0.01  # a pattern counts if so many of the inputs hold it
ROUNDS = 50  # of 2-means, at most


def look(attention_NRP: Tensor, label_N: Tensor) -> dict[str, Any]:
    """Numbers, and what the figures need."""
    attention_NRP = attention_NRP / attention_NRP.sum(-1, keepdim=True)
    classes = int(label_N.max()) + 1
    sides, centres = zip(*map(two_means, attention_NRP.unbind(1)), strict=True)
    leaf_N = leaves(torch.stack(sides, 1))
    counts_LC = table(leaf_N, label_N, 2 ** len(sides), classes)
    shuffled = torch.randperm(len(leaf_N), generator=torch.Generator().manual_seed(0))
    mean_CRP = torch.stack([attention_NRP[label_N == which].mean(0) for which in range(classes)])
    return {
        **patterns(attention_NRP),
        "tree_separation": information(counts_LC),
        "tree_separation_shuffled": information(table(leaf_N[shuffled], label_N, *counts_LC.shape)),
        "tree_purity": counts_LC.amax(1).sum().item() / len(leaf_N),
        "attention": rounded(mean_CRP),
        "two_patterns": rounded(torch.stack(centres)),
        "leaves": [[int(count) for count in row] for row in counts_LC.tolist()],
    }


def patterns(attention_NRP: Tensor) -> dict[str, float]:
    """How many patterns are common: at least one in a hundred inputs holds them.

    Where inputs differ most there may be none, so also: the share of inputs that hold a common one, how many distinct
    patterns there are, and how many equally frequent ones would be as diverse (the exponential of their entropy).
    """
    _, held = attention_NRP.argmax(-1).unique(dim=0, return_counts=True)
    share = held.double() / len(attention_NRP)
    common = held >= COMMON * len(attention_NRP)
    return {
        "patterns": int(common.sum()),
        "pattern_coverage": share[common].sum().item(),
        "patterns_distinct": len(held),
        "patterns_effective": entropy(share).exp().item(),
    }


def two_means(x_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Which of two groups each row is in (N,), the larger group being 0, and their centres (2, P)."""
    centred = x_NP - x_NP.mean(0)
    axis_P = torch.linalg.eigh(centred.t().double() @ centred.double())[1][:, -1].to(x_NP.dtype)
    side_N = (centred @ axis_P > 0).long()
    centre_2P = x_NP.mean(0).expand(2, -1)
    for _ in range(ROUNDS):
        if side_N.min() == side_N.max():  # all rows are alike
            break
        centre_2P = torch.stack([x_NP[side_N == side].mean(0) for side in (0, 1)])
        before, side_N = side_N, torch.cdist(x_NP, centre_2P).argmin(1)
        if torch.equal(before, side_N):
            break
    if side_N.float().mean() > 0.5:
        return 1 - side_N, centre_2P.flip(0)
    return side_N, centre_2P


def leaves(side_NR: Tensor) -> Tensor:
    """The leaf of each input: the sides of its components as a binary number, the first component first."""
    return (side_NR * 2 ** torch.arange(side_NR.shape[1]).flip(0)).sum(1)


def table(leaf_N: Tensor, label_N: Tensor, number: int, classes: int) -> Tensor:
    """How many inputs of each class end in each leaf, (L, C)."""
    return torch.bincount(leaf_N * classes + label_N, minlength=number * classes).view(number, classes)


def information(counts_LC: Tensor) -> float:
    """Mutual information of leaf and class as a share of the entropy of the class: 0 nothing, 1 all is told."""
    joint = counts_LC.double() / counts_LC.sum()
    of_leaf, of_class = joint.sum(1), joint.sum(0)
    told = entropy(of_leaf) + entropy(of_class) - entropy(joint.flatten())
    return (told / entropy(of_class)).item()


def entropy(share: Tensor) -> Tensor:
    return -torch.xlogy(share, share).sum()


def rounded(values: Tensor) -> list[Any]:
    return (values.double() * 1000).round().div(1000).tolist()
