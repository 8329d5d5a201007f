"""A program-memory layer for `nn.Linear`: weights composed for each input.

Shapes: see `neurocoder.functional`; Y rows of x, of which X share each of the N programs.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.conditional import check_sizes, register
from neurocoder.functional import attend, sharpen, singular_values, transform
from neurocoder.precision import BITS, autocasting, full_precision
from neurocoder.program import gather
from neurocoder.program.composition import Composition
from neurocoder.program.controller import LinearController
from neurocoder.program.conv import Conv2d
from neurocoder.program.gates import residual_scale
from neurocoder.program.kept import plainly
from neurocoder.program.kernel import fused, lean
from neurocoder.program.layer import ProgramLayer, by_input
from neurocoder.program.options import Options, spelled_out
from neurocoder.program.search import choose
from neurocoder.program.weigh import Weighing, weigh

_GATHERED = 8  # rows are gathered where a memory has so many slots for each that an input reads


@register("Linear")
class Linear(ProgramLayer):
    """y_t = x_t W_t + b with W_t = sum_n sigma_tn u_tn v_tn^T [+ w^r_t sigma_tr R], composed for each x_t (Eq. 3, 15).

    Args:
        in_features, out_features, bias: as in `nn.Linear`.
        slots: singular programs in memory (P in the paper); those of `memory` where that is given.
        heads: components retrieved in parallel (H).
        steps: recurrent attention steps (J). A program has steps * heads components.
        key_dim: length of a key (K).
        least_used: how many slots usage-based attention considers (l_I). It acts from the second step on, since usage
            is empty in the first; 0 turns it off, and the gates with it.
        residual: add the residual program R and its gate.
        sharpness: factor on the cosine similarities of content attention; by default 3 for keys of length 5, growing
            with the root of key_dim; with compat="authors" 10 / key_dim, for one step 1 / key_dim.
        controller: "linear" (default for one step); "lstm" (default for several), with 3 * heads * key_dim + 1 units
            whose output is the queries; or a number of units of an LSTM whose state is mapped to the queries.
        controller_sees: "input", or "read": then controller and gates look at x M_U^T, which is as wide as the memory
            has slots. It takes fewer parameters and less time where slots are fewer than in_features.
        control_features: width of `control`, where the controller looks at something other than x.
        top_k: slots that each component reads of each bank, those whose keys fit its query best: its attention is a
            softmax over them alone. None: all. What it costs to read hardly depends on how many slots there are. Of
            one slot the attention is 1 whatever the query: learned addresses stay as they are then.
        one_choice: with `top_k`, slots and weights are chosen once for the three banks instead of once for each.
        addresses: "learned", or "fixed": queries and keys stay as they are drawn. They are buffers, and no optimiser
            moves them, so that what a slot is read for does not change.
        product_keys: with `top_k`, keys in two halves: n first and n second ones name slots = n * n, and the best are
            found without a score for each. For large memories. `key_dim` must be even.
        sparse: with `top_k`, gradients of what has one row a slot are sparse, as those of `nn.Embedding(sparse=True)`:
            they have the rows that were read. `nc.split_parameters` tells them from the others, for
            `neurocoder.SparseAdam`; there is no orthogonal loss, which would move every row.
        memory: a `ProgramMemory` to share with another layer of the same shape.
        compat: "authors" takes all the choices of the authors' published code.
        rules: those choices one by one.

    Shape:
        x (..., in_features) to (..., out_features). The leading shape of a control begins that of x: with
        x (B, T, in_features) and control (B, control_features) each of the B sequences gets one program.
    """

    convolution = Conv2d

    @spelled_out
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device=None,
        dtype=None,
        **options: Unpack[Options],
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        factory = {"device": device, "dtype": dtype}
        super().__init__((out_features, in_features), in_features, bias, options, factory)
        self.in_features, self.out_features = in_features, out_features
        self._setting = fused.Setting(self.heads, self.least_used, self.sharpness)
        some, ungated = self.addressing.top_k, self.memory.gate_weight is None
        every = some is None
        plain = every and ungated and self.residual is None and not self.controlled
        linear = isinstance(self.controller, LinearController) and self.rules.order == "descending"
        self._lean = plain and linear  # whether `lean` knows how to do it
        self._masks = not every  # whether all slots are scored, and some left out
        few = not every and self.slots >= _GATHERED * some * self.heads * self.steps
        self.gathers = few or self.addressing.sparse
        self._weighing = Weighing(self.sharpness, self.addressing, self.slots)
        self._gathering = gather.Gathering(self.rules.order, self.addressing.sparse)

    def forward(self, x: Tensor, control: Tensor | None = None, reads: Tensor | None = None) -> Tensor:
        if (
            self._lean
            and control is None
            and reads is None
            and self._calls is None
            and lean.possible(x, self.in_features, self.gain.dtype)
        ):
            y = lean.run(x, self._once("all", self._fixed))
            return y if self.base is None else y + self.base(x)
        lead, x_YI, control_NC = self._arrange(x, control) if reads is None else self._arrange_reads(x, control, reads)
        if self.gathers:
            y, residual_Y = self._by_slot(x_YI, control_NC, lead)
        else:
            if lead == x.shape[:-1] and self._calls is None:
                part_YP, residual_Y = self._by_row(x_YI, control_NC)
            else:
                part_YP, residual_Y = self._by_group(x_YI, control_NC, lead)
            part_YP, right = (part_YP * self.gain).to(x_YI.dtype), self.memory.right
            y = part_YP @ right if self.bias is None else torch.addmm(self.bias, part_YP, right)
        if self.residual is not None:
            # Scaled behind the product: before it, an input that needs no gradient would cost that of one.
            y = torch.addcmul(y, F.linear(x_YI, self.residual), residual_Y[:, None].to(y.dtype))
        if self.base is not None:
            y = y + self.base(x_YI)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _fixed(self) -> lean.Fixed:
        """What a call on few rows needs that does not depend on them."""
        memory, controller = self.memory, self.controller
        return lean.Fixed(
            weight_XC=controller.weight,
            bias_X1=controller.bias[:, None],
            left_PI=memory.left,
            sharp_MPK=sharpen(memory.keys(), self.sharpness * BITS),
            values_P=memory.values,
            right_PO=memory.right * self.gain,
            bias_O=self.bias,
            sharpness=self.sharpness,
            reads=self.controller_sees == "read",
        )

    def _by_row(self, x_YI: Tensor, control_YC: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Each row has its own program: the fast path. Before the right programs (Y, P), and the residual's scale."""
        read_PY = self.memory.left @ x_YI.t()
        if control_YC is not None:
            control_CY = control_YC.t()
        else:
            control_CY = x_YI.t() if self.controller_sees == "input" else read_PY
        query, gate, opening_Y = self._signals(control_CY)
        dtype = query.dtype
        with full_precision(x_YI):
            values_P = self.memory.values.to(dtype)
            if self._masks:
                left, right, values = attend(self._scores(query)[0], gate, self.heads, self.least_used, self.rules)
                sigma_RY = singular_values(values_P, values, self.rules.order)
                part_PY = transform(read_PY.to(dtype), left, sigma_RY, right)
            else:
                part_PY, sigma_RY = fused.compose_rows(
                    query, self._sharp_keys(dtype), gate, read_PY.to(dtype), values_P, self._setting, self.rules
                )
            return part_PY.t(), residual_scale(opening_Y, sigma_RY, self.rules.order)

    def _by_group(self, x_YI: Tensor, control_NC: Tensor | None, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Rows share programs, or somebody wants to see them."""
        read_YP = F.linear(x_YI, self.memory.left)
        if control_NC is None:
            control_NC = read_YP if self.controller_sees == "read" else x_YI
        composition = self.compose(control_NC)
        self._note(composition, lead)
        core_NPP, groups = composition.core(), control_NC.shape[0]
        read_NXP = read_YP.reshape(groups, -1 if groups else 0, self.slots)
        part_YP = torch.bmm(read_NXP, core_NPP.to(read_NXP.dtype)).flatten(0, 1)
        residual_N = composition.residual_N
        return part_YP, None if residual_N is None else residual_N[:, None].expand(read_NXP.shape[:2]).flatten()

    def _by_slot(self, x_YI: Tensor, control_NC: Tensor | None, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The rows of the memory that are read, and no others: the output (Y, O), and the residual's scale."""
        memory = self.memory
        control_NC = self.looked_at(x_YI, control_NC)
        if self.watched:
            self._note(self.compose(control_NC), lead)
        weight_MkRN, slots, opening_N = self.weigh_slots(control_NC)
        with full_precision(x_YI):
            x = x_YI.to(weight_MkRN.dtype)
            rows, programs = x.shape[0], control_NC.shape[0]  # len() would fix the size of an exported batch
            if rows != programs:
                share = rows // max(1, programs)
                weight_MkRN = weight_MkRN.repeat_interleave(share, 3)
                slots = [gather.Slots(own.slot_kRN.repeat_interleave(share, 2)) for own in slots]
                opening_N = None if opening_N is None else self.spread(opening_N, x)
            banks = memory.left, memory.right, memory.column
            y, sigma_RN = gather.compose_rows(x, weight_MkRN, banks, self.gain, slots, self._gathering)
            residual_N = residual_scale(opening_N, sigma_RN, self.rules.order)
            y = y if self.bias is None else y + self.bias
        y = y.to(torch.get_autocast_dtype(x_YI.device.type) if autocasting(x_YI) else x_YI.dtype)
        return y, residual_N

    def weigh_slots(self, control_NC: Tensor) -> tuple[Tensor, list[gather.Slots], Tensor | None]:
        """With `top_k`, the weights of the slots that are read (M, k, R, N), these, and what opens the residual; from
        what the controller sees, or from what `reads` found, (N, 3, R, 1)."""
        if not control_NC.is_floating_point():
            slot_MkRN = control_NC[:, : len(self.addressing.banks)].permute(1, 3, 2, 0)
            one = self.gain.new_ones((), dtype=torch.promote_types(self.gain.dtype, torch.float32))
            return one.expand(slot_MkRN.shape), [gather.Slots(own) for own in slot_MkRN], None
        query_MKRN, _, opening_N = self._signals(control_NC.t())
        with full_precision(control_NC):
            with torch.no_grad():  # keys of slots that are not read need no gradient
                sharp = self._sharp_keys(query_MKRN.dtype)
            chosen = choose(query_MKRN, sharp, self.addressing)
            slots = [gather.Slots(own) for own in chosen.slot_MkRN]
            keys = [self.memory.bank_keys(bank) for bank in self.addressing.banks]
            return weigh(query_MKRN, keys, sharp, chosen, slots, self._weighing), slots, opening_N

    def composition(self, x: Tensor, control: Tensor | None = None) -> Composition:
        """The programs of the inputs in factored form."""
        _, x_YI, control_NC = self._arrange(x, control)
        return self.compose(self.looked_at(x_YI, control_NC))

    @property
    def looks_once(self) -> bool:
        """Whether `reads` can stand for the control: the slots of an input never change, and are all that counts."""
        how = self.addressing
        still = how.fixed and self.controller_sees == "input"
        return still and how.top_k == 1 and self.gathers and self.residual is None

    @torch.no_grad()
    def reads(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        """With `top_k`, the slots that each component reads of each bank, (..., 3, components, top_k).

        As `nc.trace` tells, but without the attention to every slot, for which a large memory leaves no room. Where
        addresses are fixed and `top_k` is 1 they stand for the control: `layer(x, reads=layer.reads(x))` is
        `layer(x)`, and need not search again what it has found once.
        """
        if self.addressing.top_k is None:
            raise ValueError("without top_k every slot is read: nc.trace tells how much")
        lead, x_YI, control_NC = self._arrange(x, control)
        query_MKRN = self._signals(self.looked_at(x_YI, control_NC).t()).query_MKRN
        with full_precision(x_YI):
            return by_input(choose(query_MKRN, self._sharp_keys(query_MKRN.dtype), self.addressing).slot_MkRN, lead)

    def looked_at(self, x_YI: Tensor, control_NC: Tensor | None) -> Tensor:
        """What the controller sees."""
        if control_NC is not None:
            return control_NC
        return F.linear(x_YI, self.memory.left) if self.controller_sees == "read" else x_YI

    def program(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        """The dense working program of each input, (..., in_features, out_features): y = x @ program + bias.

        It is the transpose of an `nn.Linear.weight`, and it is large: for looking and testing.
        """
        lead = self._arrange(x, control)[0]
        composition = self.composition(x, control)
        core, banks = self.coordinates(composition)
        dense = self.dense(core, composition.residual_N, banks)
        return dense.reshape(*lead, self.in_features, self.out_features)

    def _arrange(self, x: Tensor, control: Tensor | None) -> tuple[tuple[int, ...], Tensor, Tensor | None]:
        """The leading shape of the programs, the rows of x, and the rows of the control, where it is given."""
        control = self.given(control)
        lead, x_YI, control_NC = self.arrange(x, control)
        return lead, x_YI, None if control is None else control_NC

    def _arrange_reads(
        self, x: Tensor, control: Tensor | None, reads: Tensor
    ) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """The same, with what `reads` found in place of the control."""
        if not self.looks_once:
            raise ValueError(
                "reads= stands for the control of a layer with addresses='fixed' and top_k=1, of many slots, without a "
                "residual program or controller_sees='read': others look at their input at every call"
            )
        if control is not None:
            raise ValueError("reads= stands for the control: give one of them")
        if not isinstance(reads, Tensor):
            raise TypeError(f"reads must be a tensor, as layer.reads gives it, got {type(reads).__name__}")
        if self.watched:
            raise ValueError("a trace tells the attention to every slot: call the layer without reads=")
        self.check(x, -1, self.in_features)
        shape, lead = (3, self.heads * self.steps, 1), reads.shape[:-3]
        if reads.dtype != torch.int64 or reads.shape[-3:] != shape or x.shape[:-1][: len(lead)] != lead:
            raise ValueError(
                f"reads must be as layer.reads gives them for x, int64 of (..., {', '.join(map(str, shape))}); "
                f"got {reads.dtype} of {tuple(reads.shape)} for x of {tuple(x.shape)}"
            )
        if type(reads) is Tensor and reads.is_cpu and not plainly() and reads.numel():
            least, most = (end.item() for end in torch.aminmax(reads))
            if least < 0 or most >= self.slots:
                raise ValueError(
                    f"there are slots 0 to {self.slots - 1}, reads has {least} to {most}: another layer's?"
                )
        return lead, x.reshape(-1, self.in_features), reads.reshape(-1, *shape)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {super().extra_repr()}"
