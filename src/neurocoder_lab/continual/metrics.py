"""What a stream's accuracy matrix says."""

from __future__ import annotations

from torch import Tensor


def summary(matrix: Tensor) -> dict[str, float]:
    """Average accuracy at the end and when each task was just learned, forgetting, transfer; in the matrix's unit.

    Args:
        matrix: (T + 1, T): row 0 before any training, row t after learning task t; a column a task.

    Forgetting (Chaudhry et al. 2018) is how far each task but the last fell from the best it ever had; transfer is
    that of Lopez-Paz and Ranzato (2017): backward from when a task was learned to the end, forward from the untrained
    network to just before a task is learned.
    """
    tasks = matrix.shape[1]
    if matrix.shape != (tasks + 1, tasks):
        raise ValueError(f"the matrix must be (tasks + 1, tasks), got {tuple(matrix.shape)}")
    found = {"accuracy": matrix[-1].mean().item(), "learned": matrix.diagonal(-1).mean().item()}
    if tasks > 1:
        learned, last = matrix.diagonal(-1), matrix[-1]
        found["forgetting"] = (matrix[1:-1].amax(0) - last)[:-1].mean().item()
        found["backward_transfer"] = (last - learned)[:-1].mean().item()
        found["forward_transfer"] = (matrix.diagonal() - matrix[0])[1:].mean().item()
    return found
