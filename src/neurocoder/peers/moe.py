"""Mixture of Experts: N. Shazeer et al., Outrageously Large Neural Networks, ICLR 2017. Equation numbers are theirs.

Shapes: Y rows, I in, O out, N rows of what the gate looks at, C features of it, E experts, k experts a row.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import check_sizes, register
from neurocoder.dispatch import Dispatch, check_dispatch, send
from neurocoder.peers.peer import Peer
from neurocoder.precision import full_precision
from neurocoder.records import Mixture
from neurocoder.walk import conditional_layers

SMALLEST_NOISE = 0.01


class Balance(NamedTuple):
    """The balance losses of one layer: squared coefficients of variation over its experts, 0 for an even load.

    Attributes:
        importance: of the sum of gate values (Eq. 6, 7).
        load: of the smooth number of rows, which alone has a gradient where one expert is chosen (Eq. 10, 11).
    """

    importance: Tensor
    load: Tensor


@register("peers.MixtureOfExperts")
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
        control_features: width of `control`, where the gate looks at something other than x.
    """

    wants: ClassVar = {"balance": 0.1}
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
        control_features: int | None = None,
        device=None,
        dtype=None,
    ):
        check_sizes(experts=experts, top_k=top_k)
        if top_k > experts:
            raise ValueError(f"top_k is at most the number of experts, {experts}; got {top_k}")
        check_dispatch(dispatch)
        super().__init__(in_features, out_features, control_features)
        factory = {"device": device, "dtype": dtype}
        self.top_k, self.dispatch = top_k, dispatch
        self.experts = nn.ModuleList(nn.Linear(in_features, out_features, bias, **factory) for _ in range(experts))
        self.gate = nn.Parameter(torch.empty(experts, self.control_features, **factory))
        self.noise = nn.Parameter(torch.empty(experts, self.control_features, **factory))
        self._last: Balance | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for expert in self.experts:
            expert.reset_parameters()
        nn.init.zeros_(self.gate)
        nn.init.zeros_(self.noise)

    def options(self) -> dict[str, Any]:
        options = {"experts": len(self.experts), "top_k": self.top_k, "dispatch": self.dispatch}
        return options | self.control_option()

    def auxiliary(self) -> dict[str, Tensor]:
        """The balance losses of the last forward in training mode. They are taken, as by `balance`."""
        last, self._last = self._last, None
        return {} if last is None else {"balance": last.importance + last.load}

    def rows(self, x_YI: Tensor, control_NC: Tensor, lead: tuple[int, ...]) -> Tensor:
        chosen_Nk, weight_Nk = self._gates(control_NC)
        if self.watched:
            weight_NE = weight_Nk.new_zeros(len(control_NC), len(self.experts)).scatter(1, chosen_Nk, weight_Nk)
            chosen = chosen_Nk.reshape(*lead, self.top_k)
            self.record(Mixture(weight_NE.reshape(*lead, len(self.experts)), chosen))
        chosen_Yk, weight_Yk = self.spread(chosen_Nk, x_YI), self.spread(weight_Nk, x_YI)
        made_YkO = send(self.experts, x_YI, chosen_Yk, self.dispatch)
        if self.top_k == 1:
            return made_YkO.squeeze(1) * weight_Yk.to(made_YkO.dtype)
        return torch.bmm(weight_Yk.to(made_YkO.dtype)[:, None], made_YkO).squeeze(1)

    def _gates(self, control_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each row and their weights; in training, the balance losses are kept for `balance`."""
        self._last = None
        raw = F.linear(control_NC, torch.cat((self.gate, self.noise)) if self.training else self.gate)
        with full_precision(control_NC):
            raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
            if not self.training:
                values_Nk, chosen_Nk = raw.topk(self.top_k)
                return chosen_Nk, values_Nk.softmax(-1)
            clean_NE, std_NE = raw.tensor_split(2, -1)
            std_NE = F.softplus(std_NE) + SMALLEST_NOISE
            noisy_NE = clean_NE + std_NE * torch.randn_like(clean_NE)
            values, chosen = noisy_NE.topk(min(self.top_k + 1, len(self.experts)))
            weight_Nk, chosen_Nk = values[:, : self.top_k].softmax(-1), chosen[:, : self.top_k]
            if torch.is_grad_enabled():
                self._last = self._balance(clean_NE, std_NE, noisy_NE, values, chosen_Nk, weight_Nk)
            return chosen_Nk, weight_Nk

    def _balance(self, clean, std, noisy, values, chosen_Nk, weight_Nk) -> Balance:
        importance_E = clean.new_zeros(len(self.experts)).index_add(0, chosen_Nk.flatten(), weight_Nk.flatten())
        if self.top_k == len(self.experts):
            return Balance(_cv_squared(importance_E), torch.zeros_like(importance_E[0]))
        kth, next_one = values[:, self.top_k - 1, None], values[:, self.top_k, None]
        threshold_NE = torch.where(noisy > next_one, next_one, kth)  # the k-th largest of the others (Eq. 8)
        load_E = torch.special.ndtr((clean - threshold_NE) / std).sum(0)  # Eq. 9, 10
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
    losses = {name: layer._last for name, layer in layers.items() if layer._last is not None}
    if layers and not losses:
        raise ValueError(f"no forward in training mode since the last time: {', '.join(layers)}")
    for layer in layers.values():
        layer._last = None
    return losses
