"""Mixture of Experts: N. Shazeer et al., Outrageously Large Neural Networks, ICLR 2017. Equation numbers are theirs.

Shapes: Y rows, I in, O out, E experts, k experts a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder import dispatch as dispatching
from neurocoder.conditional import Mixture, check_sizes
from neurocoder.dispatch import Dispatch
from neurocoder.functional import full_precision
from neurocoder.peers.peer import Peer
from neurocoder.trace import conditional_layers

SMALLEST_NOISE = 0.01


class Balance(NamedTuple):
    """The balance losses of one layer: squared coefficients of variation over its experts, 0 for an even load.

    Attributes:
        importance: of the sum of gate values (Eq. 6, 7).
        load: of the smooth number of rows, which alone has a gradient where one expert is chosen (Eq. 10, 11).
    """

    importance: Tensor
    load: Tensor


class MixtureOfExperts(Peer):
    """y = sum_i G(x)_i E_i(x), the k experts of the largest noisy gate (Eq. 1), each a linear map.

    H(x)_i = (x W_g)_i + noise * (softplus((x W_noise)_i) + 0.01), noise in training only (Eq. 4; the 0.01 keeps the
    load loss finite where the noise would vanish); G = softmax of the k largest (Eq. 3, 5). Both maps start at zero: no
    preference, and some noise. With `top_k=1` every gate is 1, and only the load loss trains the gates: add
    `nc.peers.balance`.

    Args:
        experts: linear maps to choose from.
        top_k: experts a row uses.
        dispatch: "sparse" computes the chosen experts alone; "dense" computes all and weighs them, which
            `torch.compile`, `torch.export` and `torch.func.vmap` can follow (the first two switch to it by themselves).
    """

    size = "experts"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        experts: int,
        top_k: int = 1,
        dispatch: Dispatch = "sparse",
        device=None,
        dtype=None,
    ):
        check_sizes(experts=experts, top_k=top_k)
        if top_k > experts:
            raise ValueError(f"top_k is at most the number of experts, {experts}; got {top_k}")
        dispatching.check(dispatch)
        super().__init__(in_features, out_features)
        factory = {"device": device, "dtype": dtype}
        self.top_k, self.dispatch = top_k, dispatch
        self.experts = nn.ModuleList(nn.Linear(in_features, out_features, bias, **factory) for _ in range(experts))
        self.gate = nn.Parameter(torch.empty(experts, in_features, **factory))
        self.noise = nn.Parameter(torch.empty(experts, in_features, **factory))
        self._last: Balance | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for expert in self.experts:
            expert.reset_parameters()
        nn.init.zeros_(self.gate)
        nn.init.zeros_(self.noise)

    def options(self) -> dict[str, Any]:
        return {"experts": len(self.experts), "top_k": self.top_k, "dispatch": self.dispatch}

    def rows(self, x_YI: Tensor, lead: tuple[int, ...]) -> Tensor:
        chosen_Yk, weight_Yk = self._gates(x_YI)
        if self._calls is not None:
            weight_YE = weight_Yk.new_zeros(len(x_YI), len(self.experts)).scatter(1, chosen_Yk, weight_Yk)
            chosen = chosen_Yk.reshape(*lead, self.top_k)
            self._record(Mixture(weight_YE.reshape(*lead, len(self.experts)), chosen))
        made_YkO = dispatching.apply(self.experts, x_YI, chosen_Yk, self.dispatch)
        if self.top_k == 1:
            return made_YkO.squeeze(1) * weight_Yk.to(made_YkO.dtype)
        return torch.bmm(weight_Yk.to(made_YkO.dtype)[:, None], made_YkO).squeeze(1)

    def _gates(self, x_YI: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each row and their weights; in training, the balance losses are kept for `balance`."""
        self._last = None
        raw = F.linear(x_YI, torch.cat((self.gate, self.noise)) if self.training else self.gate)
        with full_precision(x_YI):
            raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
            if not self.training:
                values_Yk, chosen_Yk = raw.topk(self.top_k)
                return chosen_Yk, values_Yk.softmax(-1)
            clean_YE, std_YE = raw.tensor_split(2, -1)
            std_YE = F.softplus(std_YE) + SMALLEST_NOISE
            noisy_YE = clean_YE + std_YE * torch.randn_like(clean_YE)
            values, chosen = noisy_YE.topk(min(self.top_k + 1, len(self.experts)))
            weight_Yk, chosen_Yk = values[:, : self.top_k].softmax(-1), chosen[:, : self.top_k]
            if torch.is_grad_enabled():
                self._last = self._balance(clean_YE, std_YE, noisy_YE, values, chosen_Yk, weight_Yk)
            return chosen_Yk, weight_Yk

    def _balance(self, clean, std, noisy, values, chosen_Yk, weight_Yk) -> Balance:
        importance_E = clean.new_zeros(len(self.experts)).index_add(0, chosen_Yk.flatten(), weight_Yk.flatten())
        if self.top_k == len(self.experts):
            return Balance(_cv_squared(importance_E), torch.zeros_like(importance_E[0]))
        kth, next_one = values[:, self.top_k - 1, None], values[:, self.top_k, None]
        threshold_YE = torch.where(noisy > next_one, next_one, kth)  # the k-th largest of the others (Eq. 8)
        load_E = torch.special.ndtr((clean - threshold_YE) / std).sum(0)  # Eq. 9, 10
        return Balance(_cv_squared(importance_E), _cv_squared(load_E))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}  # a copy has had no forward


def _cv_squared(amount_E: Tensor) -> Tensor:
    return amount_E.var(correction=0) / amount_E.mean().square().clamp_min(1e-10)


def balance(model: nn.Module) -> dict[str, Balance]:
    """The balance losses of every mixture of experts, by name, of its last forward in training mode.

    loss = task_loss + 0.1 * sum(b.importance + b.load for b in nc.peers.balance(model).values())

    They are taken: ask once a forward. A mixture without a forward since is left out; if none had one, it is an error.
    """
    layers = {name: layer for name, layer in conditional_layers(model) if isinstance(layer, MixtureOfExperts)}
    found = {name: layer._last for name, layer in layers.items() if layer._last is not None}
    if layers and not found:
        raise ValueError(f"no forward in training mode since the last time: {', '.join(layers)}")
    for layer in layers.values():
        layer._last = None
    return found
