"""The parameters of a model by the optimiser that they need."""

from __future__ import annotations

from torch import nn


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters whose gradients are ordinary, and those whose gradients are sparse: of program memories with
    `sparse=True`, and of `nn.Embedding(sparse=True)`. Each is listed once; what is frozen is left out::

        rest, rows = nc.split_parameters(model)
        optimisers = [torch.optim.Adam(rest), nc.SparseAdam(rows)]

    `SparseAdam` moves the rows that were read, and no others; `torch.optim.SGD` and `Adagrad`, without
    weight decay, take both kinds.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"split_parameters takes an nn.Module, got {type(model).__name__}")
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    sparse = {table.weight: None for table in tables if table.sparse}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in learning if p not in sparse], [p for p in learning if p in sparse]
