"""Three ways to train one modular network: generalised Viterbi EM, REINFORCE, and noisy top-k mixtures.

Each is given the model and a log-likelihood, and has a `loss` whose gradient trains modules and controllers together::

    em = ViterbiEM(model, classification, size=len(x))
    for _ in range(rounds):
        em.expect(*batch())                 # inputs, targets, and their indices in the data set
        for _ in range(15):
            optimiser.zero_grad()
            em.loss(*batch()).backward()
            optimiser.step()

Shapes: B data points, T choices of one data point in all layers and calls, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.diagnosis import selection_entropy
from neurocoder.modular.route import Given, GivenThenSampled, NoisyMixture, Route, Sampled, routed
from neurocoder.records import Choice
from neurocoder.trace import Trace
from neurocoder.walk import call, evaluating, unwrap

LogLikelihood = Callable[[Any, Any], Tensor]


def classification(logits: Tensor, target: Tensor) -> Tensor:
    """log p(y | x, a) for logits (B, ..., C) and labels (B, ...), summed over what follows B, such as time: (B,)."""
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"expected labels of shape {tuple(logits.shape[:-1])}, got {tuple(target.shape)}")
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return -_total(losses.view_as(target))


def gaussian(variance: float = 1.0) -> LogLikelihood:
    """Regression: log N(y | output, variance), summed over all but the data points."""
    if not variance > 0:
        raise ValueError(f"variance must be positive, got {variance}")

    def log_likelihood(output: Tensor, target: Tensor) -> Tensor:
        if output.shape != target.shape:
            raise ValueError(f"expected targets of shape {tuple(output.shape)}, got {tuple(target.shape)}")
        each = (output - target).square() / variance + log(2 * pi * variance)
        return -0.5 * _total(each)

    return log_likelihood


def _total(each: Tensor) -> Tensor:
    """One number a data point."""
    return each.flatten(1).sum(1) if each.dim() > 1 else each


class Training:
    """A way to train a modular network.

    Args:
        model: with modular layers, each of which sees the data points along its first dimension.
        log_likelihood: a function of output and target that gives log p(y | x, a), one number a data point.
    """

    def __init__(self, model: nn.Module, log_likelihood: LogLikelihood):
        with routed(model, Route()):  # raises where there is nothing to train
            self.model, self.log_likelihood = model, log_likelihood

    def loss(self, inputs: Any, target: Any, index: Tensor | None = None) -> Tensor:
        """The number to minimise on a batch: inputs are what the model takes (a tensor, or a tuple or dict of
        arguments), index their places in the data set, which only EM needs."""
        raise NotImplementedError

    def _run(self, model: nn.Module, inputs: Any, target: Any, route: Route) -> Tensor:
        with routed(model, route):
            score_B = self.log_likelihood(call(model, inputs), target)
        if score_B.dim() != 1:
            raise ValueError(f"log_likelihood must give one number a data point, got shape {tuple(score_B.shape)}")
        if route.log_prob is not None and route.log_prob.shape != score_B.shape:
            raise ValueError(
                f"{len(score_B)} likelihoods for {len(route.log_prob)} data points: the first dimension of what every "
                "modular layer sees, and of what log_likelihood gives, are the data points"
            )
        if not route.finished():
            raise ValueError(
                "the model made fewer choices than are stored: it, or the length of its input, has changed"
            )
        return score_B

    def state_dict(self) -> dict[str, Tensor]:
        """All that a resumed run needs, as tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        _check_state(state, set())


class ViterbiEM(Training):
    """Generalised Viterbi EM (algorithm 1): a stored composition a*_n for every data point, improved and then learned.

    Args:
        size: data points in the data set (N).
        samples: compositions drawn in an E-step (S).
    """

    def __init__(self, model: nn.Module, log_likelihood: LogLikelihood, size: int, samples: int = 10):
        super().__init__(model, log_likelihood)
        if size < 1 or samples < 1:
            raise ValueError(f"size and samples must be at least 1, got {size} and {samples}")
        self.size, self.samples = size, samples
        self.choices: Tensor | None = None  # (N, T) on the CPU, drawn uniformly at the first batch
        self.modules: Tensor | None = None  # (T,), how many there are to choose from

    @torch.no_grad()
    def expect(self, inputs: Any, target: Any, index: Tensor) -> Tensor:
        """Partial E-step: the best of S samples and the stored choice, by p(y | x, a) p(a | x) (Eq. 11), is stored.

        The model is in evaluation mode meanwhile. All samples are one batch, 1 + S times as large, where every tensor
        of inputs and target has the data points along its first dimension; else they are scored one after the other.
        In data-parallel training the processes exchange what they found.
        Returns the logarithm of Eq. 11 for each data point, after the step.
        """
        choices, modules = self._stored(inputs, index)
        with evaluating(unwrap(self.model)):
            joint_SB, paths_SBT = self._tried(inputs, target, choices[index.cpu()], modules)
        best_B = joint_SB.nan_to_num(nan=-inf, posinf=inf, neginf=-inf).argmax(0)  # of equal ones the first, the stored
        best_BT = paths_SBT[best_B, torch.arange(len(best_B), device=best_B.device)]
        best_B = joint_SB.gather(0, best_B[None])[0]
        self.choices, self.modules = choices, modules
        for places, best in _exchange(index.to(best_BT.device), best_BT):
            choices[places.cpu()] = best.to(choices)
        return best_B

    def _tried(self, inputs: Any, target: Any, stored_BT: Tensor, modules: Tensor) -> tuple[Tensor, Tensor]:
        """The stored compositions and then S samples: their joint log-probabilities (1 + S, B), and what they are.

        They are one batch, unless a tensor has its data points elsewhere than along its first dimension.
        """
        model, count, times = unwrap(self.model), len(stored_BT), 1 + self.samples
        try:
            many = _copies(inputs, count, times), _copies(target, count, times)
        except _NotFirst:
            routes: list[Route] = [Given(stored_BT, modules), *(Sampled() for _ in range(self.samples))]
            joint = [self._joint(model, inputs, target, route) for route in routes]
            return torch.stack(joint), torch.stack([route.choices for route in routes])
        route = GivenThenSampled(stored_BT, modules)
        joint = self._joint(model, *many, route)
        return joint.unflatten(0, (times, count)), route.choices.unflatten(0, (times, count))

    def loss(self, inputs: Any, target: Any, index: Tensor | None = None) -> Tensor:
        """- mean of log p(y | x, a*) + log p(a* | x), for the M-step (Eq. 8)."""
        if index is None:
            raise ValueError("EM stores a choice for every data point: give the indices of this batch in the data set")
        choices, modules = self._stored(inputs, index)
        loss = -self._joint(self.model, inputs, target, Given(choices[index.cpu()], modules)).mean()
        self.choices, self.modules = choices, modules
        return loss

    def _joint(self, model: nn.Module, inputs: Any, target: Any, route: Route) -> Tensor:
        score_B = self._run(model, inputs, target, route)
        assert route.log_prob is not None
        return score_B + route.log_prob

    def _stored(self, inputs: Any, index: Tensor) -> tuple[Tensor, Tensor]:
        """The stored choices; before there are any, see which ones the model makes and draw them for all data."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
            raise TypeError("index must be a tensor of whole numbers (int64), one a data point")
        if len(index) and (index.min() < 0 or index.max() >= self.size):
            raise IndexError(f"index runs from {index.min()} to {index.max()}; there are {self.size} data points")
        if self.choices is not None and self.modules is not None:
            return self.choices, self.modules
        model = unwrap(self.model)
        route = Sampled()
        with torch.no_grad(), evaluating(model), routed(model, route), torch.random.fork_rng():
            call(model, inputs)
        kind = torch.uint8 if int(route.modules.max()) <= 256 else torch.int32
        drawn = (torch.rand(self.size, len(route.modules), dtype=torch.float64) * route.modules).to(kind)
        return _same_everywhere(drawn, route.choices.device), route.modules

    def state_dict(self) -> dict[str, Tensor]:
        if self.choices is None or self.modules is None:
            return {}
        return {"choices": self.choices.clone(), "modules": self.modules.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if not state and self.choices is None:
            return
        _check_state(state, {"choices", "modules"})
        choices, modules = state["choices"], state["modules"]
        if choices.dim() != 2 or modules.shape != choices.shape[1:]:
            raise ValueError(f"stored choices of shape {tuple(choices.shape)} for {len(modules)} choices a data point")
        if len(choices) != self.size:
            raise ValueError(f"choices are stored for {len(choices)} data points; this data set has {self.size}")
        if (choices >= modules.to(choices.device)).any() or (choices < 0).any():
            raise ValueError("a stored choice names a module that does not exist")
        self.choices, self.modules = choices.cpu().clone(), modules.cpu().clone()


class Reinforce(Training):
    """REINFORCE with an exponential moving average of the log-likelihood as control variate (Eq. 12 to 14).

    Args:
        decay: of the moving average.
    """

    def __init__(self, model: nn.Module, log_likelihood: LogLikelihood, decay: float = 0.99):
        super().__init__(model, log_likelihood)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self.average: Tensor | None = None

    def loss(self, inputs: Any, target: Any, index: Tensor | None = None) -> Tensor:
        route = Sampled()
        score_B = self._run(self.model, inputs, target, route)
        assert route.log_prob is not None
        loss = self.surrogate(score_B, route.log_prob)
        if len(score_B):
            mean = score_B.detach().mean()
            self.average = mean if self.average is None else torch.lerp(mean, self.average, self.decay)
        return loss

    def surrogate(self, score_B: Tensor, log_prob_B: Tensor) -> Tensor:
        """A number whose gradient is, on average, that of - sum_a p(a | x) log p(y | x, a)."""
        known = score_B.detach()
        advantage_B = known - (known.mean() if self.average is None else self.average)
        return -(score_B + advantage_B * log_prob_B).mean()

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.average is None else {"average": self.average.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        _check_state(state, {"average"} & state.keys())
        self.average = state["average"].clone() if state else None


class NoisyTopK(Training):
    """Noisy top-k mixture (section 2.2): for every choice, the k modules of the largest noisy logits are mixed.

    Args:
        mixed: modules in a mixture (k); all of them where there are fewer.
        noise: standard deviation of the noise on the logits.
    """

    def __init__(self, model: nn.Module, log_likelihood: LogLikelihood, mixed: int = 4, noise: float = 1.0):
        super().__init__(model, log_likelihood)
        if mixed < 2 or noise < 0:  # the weight of a single module is 1: nothing would train the controller
            raise ValueError(f"mixed must be at least 2 and noise not negative, got {mixed} and {noise}")
        self.mixed, self.noise = mixed, noise

    def loss(self, inputs: Any, target: Any, index: Tensor | None = None) -> Tensor:
        return -self._run(self.model, inputs, target, NoisyMixture(self.mixed, self.noise)).mean()


def entropies(seen: Trace) -> tuple[float, float]:
    """Module selection entropy H_a and batch module selection entropy H_b (Eq. 15, 16), averaged over modular layers.

    A layer's calls, and its time steps, are so many more data points.
    """
    layers = [[c.probability.detach() for c in seen.calls(name) if isinstance(c, Choice)] for name in seen]
    pairs = [selection_entropy(torch.cat([p.reshape(-1, *p.shape[-2:]) for p in layer])) for layer in layers if layer]
    if not pairs:
        raise ValueError("no modular layer was called: run the model inside of `with nc.trace(model) as seen`")
    return sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)


class _NotFirst(Exception):
    """A tensor has no data points along its first dimension."""


def _copies(given: Any, count: int, times: int) -> Any:
    """The data points of every tensor, so often one batch after the other."""
    if isinstance(given, Tensor):
        if not given.dim() or len(given) != count:
            raise _NotFirst
        return given.repeat(times, *[1] * (given.dim() - 1))
    if isinstance(given, dict):
        return {name: _copies(value, count, times) for name, value in given.items()}
    if isinstance(given, (tuple, list)):
        return type(given)(_copies(value, count, times) for value in given)
    return given


def _check_state(state: dict[str, Tensor], expected: set[str]) -> None:
    if state.keys() != expected:
        raise ValueError(f"this state holds {sorted(state)}, expected {sorted(expected)}: it is of another training")


def _processes() -> int:
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if available else 1


def _same_everywhere(drawn: Tensor, device: torch.device) -> Tensor:
    """What the first process drew; the devices of the model are those that can exchange it."""
    if _processes() == 1:
        return drawn
    drawn = drawn.to(device)
    torch.distributed.broadcast(drawn, 0)
    return drawn.cpu()


def _exchange(index: Tensor, best: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The (index, best) of every process, whose batches may differ in size."""
    if _processes() == 1:
        return [(index, best)]
    size = index.new_tensor([len(index)])
    sizes = [torch.empty_like(size) for _ in range(_processes())]
    torch.distributed.all_gather(sizes, size)
    most = max(int(size) for size in sizes)
    packed = F.pad(torch.cat((index[:, None], best.long()), 1), (0, 0, 0, most - len(index)))
    gathered = [torch.empty_like(packed) for _ in sizes]
    torch.distributed.all_gather(gathered, packed)
    whole = [rows[: int(size)] for rows, size in zip(gathered, sizes, strict=True)]
    return [(rows[:, 0], rows[:, 1:].to(best.dtype)) for rows in whole]
