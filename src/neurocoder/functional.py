"""Every equation of the Neurocoder paper, once, as a pure function of tensors.

Shapes (a name's suffix spells them; rows come last, so that every reduction runs over whole vectors):
    N rows (inputs, or sequences that share a program), I in, O out, P slots, K key, C control features,
    M the three memories in the order left, right, values (U, V, S in the paper),
    J steps, H heads, R = J * H components in step-major order: n = j * H + h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.cross_entropy import linear_cross_entropy as linear_cross_entropy

BANKS = ("left", "right", "values")
EPSILON = 1e-6  # added to squared norms: a zero query has a zero cosine, and a gradient of ordinary size


@dataclass(frozen=True)
class Rules:
    """What the paper leaves open, or states and its authors' code does otherwise. Defaults follow the paper.

    Attributes:
        first_step: what the empty usage of the first step gives. "zero": no least-used attention (Eq. 13 read
            literally); "first-slots": the first `least_used` slots get 1.
        usage: which attentions count as use of a slot. "head": those of the same head (Eq. 12); "all": every head's.
        least_used: the attention a least-used slot gets. "max": max(m) - m (Eq. 13); "one": 1 - m.
        content: content attention where it is gated. "softmax": as it is (Eq. 14); "peak": divided by its maximum.
        gate: the interpolation gates. "input": one a slot and memory, linear in the control, shared by heads and
            steps; "state": one a slot, memory, head and step, linear in the controller's state (Eq. 9, 14).
        order: "descending": sigma_n sums the terms n to R (Eq. 8); "first": sigma_n sums the first R - n + 1 terms;
            "ascending": sigma_n sums the first n terms.
        integration: where the residual gate comes from. "linear": a map of its own of the control (Eq. 15);
            "lstm": the last unit of the recurrent controller.
        initial_state: of the recurrent controller: "zero" (Eq. 9) or "learned".
        free_keys: memories whose keys are free parameters instead of a network of the slot (Eq. 10).
        key_columns: left and right slots carry key columns that only the orthogonal loss sees.
        initialisation: "calibrated" (docs/paper.md) or "xavier", as the authors do.
    """

    first_step: Literal["zero", "first-slots"] = "zero"
    usage: Literal["head", "all"] = "head"
    least_used: Literal["max", "one"] = "max"
    content: Literal["softmax", "peak"] = "softmax"
    gate: Literal["input", "state"] = "input"
    order: Literal["descending", "first", "ascending"] = "descending"
    integration: Literal["linear", "lstm"] = "linear"
    initial_state: Literal["zero", "learned"] = "zero"
    free_keys: tuple[str, ...] = ()
    key_columns: bool = False
    initialisation: Literal["calibrated", "xavier"] = "calibrated"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            allowed, value = get_args(kind), getattr(self, name)
            if get_origin(kind) is Literal and value not in allowed:
                raise ValueError(f"Rules.{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        unknown = set(self.free_keys) - set(BANKS)
        if unknown:
            raise ValueError(f"Rules.free_keys names {', '.join(sorted(unknown))}; the banks are {', '.join(BANKS)}")
        object.__setattr__(self, "free_keys", tuple(bank for bank in BANKS if bank in self.free_keys))

    @classmethod
    def authors(cls, steps: int) -> Rules:
        """The choices of the authors' published code, all together (docs/paper.md)."""
        several = steps > 1
        return cls(
            first_step="first-slots",
            usage="all",
            least_used="one",
            content="peak",
            order="first" if several else "ascending",
            integration="lstm" if several else "linear",
            initial_state="learned",
            free_keys=("values",),
            key_columns=True,
            initialisation="xavier",
        )


PAPER = Rules()


def sharpen(key_MPK: Tensor, sharpness: float) -> Tensor:
    """Keys of unit length times the sharpness: all that `score` needs of them, and the same for every input."""
    return key_MPK * key_MPK.square().sum(-1, keepdim=True).add(EPSILON).rsqrt().mul(sharpness)


def score(query_MKRN: Tensor, sharp_MPK: Tensor) -> Tensor:
    """Sharpened cosine of every query with every key, the inside of Eq. 11: (M, P, R, N)."""
    query_MKRN = query_MKRN * query_MKRN.square().sum(1, keepdim=True).add(EPSILON).rsqrt()
    return torch.bmm(sharp_MPK, query_MKRN.flatten(2)).unflatten(2, query_MKRN.shape[2:])


def half_scores(query_MKRN: Tensor, sharp_M2QK: Tensor) -> Tensor:
    """Of product keys, the scores of the Q first and of the Q second halves, (M, 2, Q, R, N): the score of slot
    i * Q + j is the sum of the i-th and the j-th."""
    half_XKRN = query_MKRN.unflatten(1, (2, -1)).flatten(0, 1)
    return score(half_XKRN, sharp_M2QK.flatten(0, 1)).unflatten(0, (-1, 2))


def product_score(half_M2QRN: Tensor) -> Tensor:
    """The scores of all Q * Q slots: (M, P, R, N)."""
    first, second = half_M2QRN.unbind(1)
    return (first[:, :, None] + second[:, None]).flatten(1, 2)


def best(score_MPRN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores, (M, count, R, N), and their slots."""
    return torch.topk(score_MPRN.detach(), count, 1)


def best_products(half_M2QRN: Tensor, count: int, largest: Callable = torch.topk) -> tuple[Tensor, Tensor]:
    """`best(product_score(half), count)` from 2 Q scores: a slot among the best has both halves among the best.

    `largest` finds the largest along a dimension, as `torch.topk`.
    """
    side = half_M2QRN.shape[2]
    halves, places = largest(half_M2QRN.detach(), min(count, side), 2)
    sums = (halves[:, 0, :, None] + halves[:, 1, None]).flatten(1, 2)
    names = (places[:, 0, :, None] * side + places[:, 1, None]).flatten(1, 2)
    scores, at = largest(sums, count, 1)
    return scores, names.gather(1, at)


def only(score_MPRN: Tensor, slots_MkRN: Tensor) -> Tensor:
    """The scores of these slots, and minus infinity elsewhere: a softmax then is one over those alone."""
    return torch.full_like(score_MPRN, -torch.inf).scatter(1, slots_MkRN, score_MPRN.gather(1, slots_MkRN))


def attend(
    score_MPRN: Tensor, gate: Tensor | None, heads: int, least_used: int, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to the left, right and value memories (Eq. 11 to 14), each (P, R, N).

    Without a gate this is the content attention alone. With one, (M, P, 1, N) or (M, P, R, N), each step mixes
    content attention with attention to the slots that the earlier steps used least. One score for all memories, M = 1,
    is the score of each.
    """
    content_MPRN = score_MPRN.softmax(1).expand(3, -1, -1, -1)
    if gate is None:
        left, right, values = content_MPRN.unbind(0)
        return left, right, values
    if rules.content == "peak":
        content_MPRN = content_MPRN / content_MPRN.amax(1, keepdim=True)
    open_ = gate.sigmoid().expand_as(content_MPRN)
    least, usage, attention = _first_least(content_MPRN[:, :, :heads], least_used, rules), None, []
    for c, g in zip(content_MPRN.split(heads, 2), open_.split(heads, 2), strict=True):
        if usage is not None:
            least = least_used_attention(usage, least_used, rules)
        w = c * g if least is None else torch.lerp(least, c, g)
        used = w if rules.usage == "head" else w.amax(2, keepdim=True).expand_as(w)
        usage = used if usage is None else torch.maximum(usage, used)
        attention.append(w)
    left, right, values = torch.cat(attention, 2).unbind(0)
    return left, right, values


def least_used_attention(usage_MPHN: Tensor, least_used: int, rules: Rules) -> Tensor:
    """Eq. 13: attention to the `least_used` slots of the smallest usage, zero elsewhere."""
    threshold = usage_MPHN.detach().topk(least_used, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
    top = usage_MPHN.amax(1, keepdim=True) if rules.least_used == "max" else 1.0
    return (top - usage_MPHN) * (usage_MPHN <= threshold)


def _first_least(like_MPHN: Tensor, least_used: int, rules: Rules) -> Tensor | None:
    if rules.first_step == "zero":
        return None
    slot = torch.arange(like_MPHN.shape[1], device=like_MPHN.device)
    return (slot < least_used).to(like_MPHN.dtype)[None, :, None, None].expand_as(like_MPHN)


def singular_values(values_P: Tensor, attention_PRN: Tensor, order: str = "descending") -> Tensor:
    """Eq. 8: positive singular values (R, N), strictly decreasing unless `order` says otherwise."""
    return add_up((values_P @ attention_PRN.flatten(1)).unflatten(0, attention_PRN.shape[1:]), order)


def add_up(attended_RN: Tensor, order: str = "descending") -> Tensor:
    """The singular values of Eq. 8 from what was attended to."""
    terms_RN = F.softplus(attended_RN)
    if order == "descending":
        return terms_RN.flip(0).cumsum(0).flip(0)
    sums_RN = terms_RN.cumsum(0)
    return sums_RN.flip(0) if order == "first" else sums_RN


def transform(read_PN: Tensor, left_PRN: Tensor, sigma_RN: Tensor, right_PRN: Tensor) -> Tensor:
    """The composed program between the two memories, one program a row: (P, N) to (P, N).

    With read = M_U x, the product M_V^T transform(read) is x P_t of Eq. 3 to 7, and no P_t is ever formed.
    """
    part_RN = (read_PN[:, None] * left_PRN).sum(0) * sigma_RN
    return (part_RN * right_PRN).sum(1)


def compose_rows(
    query_MKRN: Tensor,
    sharp_MPK: Tensor,
    gate: Tensor | None,
    read_PN: Tensor,
    values_P: Tensor,
    heads: int,
    least_used: int,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    """From queries and sharp keys to the transformed read (P, N) and the singular values (R, N), one program a row."""
    left, right, values = attend(score(query_MKRN, sharp_MPK), gate, heads, least_used, rules)
    sigma_RN = singular_values(values_P, values, rules.order)
    return transform(read_PN, left, sigma_RN, right), sigma_RN


def coordinates(left_PRN: Tensor, sigma_RN: Tensor, right_PRN: Tensor) -> Tensor:
    """The composed program in the coordinates of the memories: (N, P, P), with P_t = M_U^T coordinates M_V."""
    return torch.bmm(left_PRN.permute(2, 0, 1) * sigma_RN.t()[:, None], right_PRN.permute(2, 1, 0))


def program(core: Tensor, left_PI: Tensor, right_PO: Tensor) -> Tensor:
    """The dense program of such coordinates, (..., P, P) to (..., I, O): for looking, freezing and small kernels."""
    return left_PI.t() @ core @ right_PO


def squared_norms(core_NPP: Tensor, left_PI: Tensor, right_PO: Tensor) -> Tensor:
    """The squared Frobenius norms of the dense programs of such coordinates, without forming them: (N,)."""
    return ((left_PI @ left_PI.t() @ core_NPP) * (core_NPP @ (right_PO @ right_PO.t()))).sum((1, 2))


def lstm(signal_XN: Tensor, recurrent_XU: Tensor | None, steps: int, start_2UN: Tensor | None = None) -> Tensor:
    """The states (U, J, N) of an LSTM (Eq. 9) that sees the same input at each of J steps; X = 4U.

    The signal's rows are the input, forget and output gates, then the candidate. Since the input does not change, its
    signal is computed once. The LSTM starts at zero, or at the state and cell in `start_2UN`.
    """
    units, states = len(signal_XN) // 4, []
    state, cell = (None, None) if start_2UN is None else start_2UN
    for _ in range(steps):
        total = signal_XN if state is None else torch.addmm(signal_XN, recurrent_XU, state)
        gates, candidate = total.split((3 * units, units))
        i, f, o = gates.sigmoid().chunk(3)
        fresh = i * candidate.tanh()
        cell = fresh if cell is None else torch.addcmul(fresh, f, cell)
        state = o * cell.tanh()
        states.append(state)
    return torch.stack(states, 1)


def queries(state_UJN: Tensor, key_dim: int, heads: int, banks: int = 3) -> Tensor:
    """The queries (M, K, R, N) that the first rows of a controller's output are."""
    query_MKHJN = state_UJN[: banks * key_dim * heads].unflatten(0, (banks, key_dim, heads))
    return query_MKHJN.transpose(2, 3).flatten(2, 3)


def average_patch(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """What a convolution's kernel meets on the average of its positions: (B, C, height, width) to (B, C, `*kernel`).

    The average of a kernel's responses is its product with this, so that they need not be computed.
    """
    for axis, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        positions = (x.shape[axis] - apart * (size - 1) - 1) // step
        cuts = [
            (slice(None),) * axis + (slice(k * apart, k * apart + positions * step + 1, step),) for k in range(size)
        ]
        x = torch.stack([x[cut].mean(axis) for cut in cuts], axis)
    return x


def similarity(vectors_NRI: Tensor) -> Tensor:
    """Mean cosine over the pairs of vectors of one program, near 1 in program collapse; 1 where there is only one."""
    components = vectors_NRI.shape[1]
    if components == 1:
        return vectors_NRI.new_ones(())
    together_NI = F.normalize(vectors_NRI, dim=-1).sum(1)
    return (together_NI.square().sum(-1).mean() - components) / (components * (components - 1))


def orthogonality_loss(bank_PI: Tensor) -> Tensor:
    """One term of Eq. 5, the Frobenius norm of M M^T - I; it cannot vanish where slots outnumber columns."""
    gram_PP = bank_PI @ bank_PI.t()
    return torch.linalg.matrix_norm(gram_PP - torch.eye(len(gram_PP), device=gram_PP.device, dtype=gram_PP.dtype))
