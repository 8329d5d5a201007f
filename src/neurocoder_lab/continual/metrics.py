"""Accuracy on every task of a stream, and what the matrix of them says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from neurocoder.walk import evaluating
from neurocoder_lab.continual.stream import Stream
from neurocoder_lab.errors import LabError

ROWS = 1000  # at once


@torch.no_grad()
def accuracies(stream: Stream, model: nn.Module, learned: int) -> Tensor:
    """Accuracy on the test data of each task in percent, (T,), after `learned` tasks: a row of the matrix."""
    if not 0 <= learned <= len(stream):
        raise ValueError(f"of {len(stream)} tasks {learned} cannot be learned")
    shares, device = [], next(model.parameters()).device
    with evaluating(model):
        for task, (x, y) in enumerate(stream.test):
            parts = [stream.logits(model, some.to(device), task, learned) for some in x.split(ROWS)]
            logits = torch.cat(parts).cpu()
            if not logits.isfinite().all():
                raise LabError(
                    f"the network's outputs for task {task} are not finite: NaN in its inputs, or training diverged"
                )
            right = logits.argmax(-1) == y.cpu()
            shares.append(100 * right.float().mean())
    return torch.stack(shares)


def summary(matrix: Tensor | Sequence[Tensor]) -> dict[str, float]:
    """Average accuracy at the end and when each task was just learned, forgetting, transfer; in the matrix's unit.

    Args:
        matrix: (T + 1, T), or its rows: row 0 before any training, row t after learning task t; a column a task.

    Forgetting (Chaudhry et al. 2018) is how far each task but the last fell from the best it ever had; transfer is
    that of Lopez-Paz and Ranzato (2017): backward from when a task was learned to the end, forward from the untrained
    network to just before a task is learned. In the class scenario an output that was not trained yet is never chosen,
    so forward transfer says nothing there: it is 0.
    """
    matrix = torch.stack([*matrix])
    tasks = matrix.shape[-1]
    if matrix.shape != (tasks + 1, tasks):
        raise ValueError(f"the matrix must be (tasks + 1, tasks), got {tuple(matrix.shape)}")
    numbers = {"accuracy": matrix[-1].mean().item(), "learned": matrix.diagonal(-1).mean().item()}
    if tasks > 1:
        learned, last = matrix.diagonal(-1), matrix[-1]
        numbers["forgetting"] = (matrix[1:-1].amax(0) - last)[:-1].mean().item()
        numbers["backward_transfer"] = (last - learned)[:-1].mean().item()
        numbers["forward_transfer"] = (matrix.diagonal() - matrix[0])[1:].mean().item()
    return numbers
