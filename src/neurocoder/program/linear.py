"""A program-memory layer for `nn.Linear`: weights composed for each input.

Shapes: see `neurocoder.functional`; Y rows of x, of which X share each of the N programs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder import functional
from neurocoder.conditional import check_sizes, register
from neurocoder.functional import Rules
from neurocoder.program.conv import Conv2d
from neurocoder.program.kernel import fused, lean
from neurocoder.program.layer import Composition, ProgramLayer
from neurocoder.program.memory import ProgramMemory


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
        memory: a `ProgramMemory` to share with another layer of the same shape.
        compat: "authors" takes all the choices of the authors' published code.
        rules: those choices one by one.

    Shape:
        x (..., in_features) to (..., out_features). The leading shape of a control begins that of x: with
        x (B, T, in_features) and control (B, control_features) each of the B sequences gets one program.
    """

    convolution = Conv2d

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        slots: int | None = None,
        heads: int = 1,
        steps: int = 1,
        key_dim: int = 5,
        least_used: int = 0,
        residual: bool = False,
        sharpness: float | None = None,
        controller: Literal["linear", "lstm"] | int | None = None,
        controller_sees: Literal["input", "read"] = "input",
        control_features: int | None = None,
        memory: ProgramMemory | None = None,
        compat: Literal["authors"] | None = None,
        rules: Rules | None = None,
        device=None,
        dtype=None,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        super().__init__(
            in_features,
            out_features,
            (out_features, in_features),
            (control_features, in_features),
            bias,
            slots=slots,
            heads=heads,
            steps=steps,
            key_dim=key_dim,
            least_used=least_used,
            residual=residual,
            sharpness=sharpness,
            controller=controller,
            controller_sees=controller_sees,
            memory=memory,
            compat=compat,
            rules=rules,
            device=device,
            dtype=dtype,
        )
        self.in_features, self.out_features = in_features, out_features
        self._setting = fused.Setting(steps, heads, least_used, self.sharpness)
        self._lean = lean.simple(self)

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        if control is None and self._lean and lean.possible(self, x):
            return lean.run(self, x)
        lead, x_YI, control_NC = self._arrange(x, control)
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

    def _by_row(self, x_YI: Tensor, control_YC: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Each row has its own program: the fast path. Before the right programs (Y, P), and the residual's scale."""
        memory, read_PN = self.memory, None
        if control_YC is None and self.controller_sees == "input":
            signals = self._signals(x_YI, memory.left, unrolled=False)
            read_PN = signals.read_PN
        else:
            read_PN = memory.left @ x_YI.t()
            signals = self._signals(read_PN.t() if control_YC is None else control_YC, unrolled=False)
        dtype = signals.query.dtype
        with functional.full_precision(x_YI):
            part_PN, sigma_RN = fused.compose_rows(
                signals.query, signals.recurrent, self._sharp_keys(dtype), signals.gate, read_PN.to(dtype),
                memory.values.to(dtype), self._setting, self.rules,
            )  # fmt: skip
            return part_PN.t(), self._residual_scale(signals.opening_N, sigma_RN)

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

    def composition(self, x: Tensor, control: Tensor | None = None) -> Composition:
        """The programs of the inputs in factored form."""
        _, x_YI, control_NC = self._arrange(x, control)
        if control_NC is None:
            control_NC = F.linear(x_YI, self.memory.left) if self.controller_sees == "read" else x_YI
        return self.compose(control_NC)

    def program(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        """The dense working program of each input, (..., in_features, out_features): y = x @ program + bias.

        It is the transpose of an `nn.Linear.weight`, and it is large: for looking and testing.
        """
        lead = self._arrange(x, control)[0]
        return self._programs(self.composition(x, control)).reshape(*lead, self.in_features, self.out_features)

    def _arrange(self, x: Tensor, control: Tensor | None) -> tuple[tuple[int, ...], Tensor, Tensor | None]:
        """The leading shape of the programs, the rows of x, and the rows of the control, where it is given."""
        control = self.given(control)
        lead, x_YI, control_NC = self.arrange(x, control)
        return lead, x_YI, None if control is None else control_NC

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {super().extra_repr()}"
