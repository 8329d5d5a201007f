"""Program-memory layers: drop-in replacements for `nn.Linear` and `nn.Conv2d`.

Shapes: see `neurocoder.functional`; Y rows of x, of which X share each of the N programs; G groups of a convolution.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder import functional, fused, lean
from neurocoder.conditional import check_sizes, register
from neurocoder.functional import Rules
from neurocoder.memory import ProgramMemory
from neurocoder.program import Composition, ProgramLayer

_SMALL_KERNEL = 65536  # numbers: as many kernels as a batch has images need to fit into memory
_POSITIONS = 96  # a whole kernel is worth making where it has fewer numbers than so many times the positions it serves


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


@register("Conv2d")
class Conv2d(ProgramLayer):
    """A convolution whose kernel is composed for each image.

    The controller sees the global average of the input channels, with controller_sees="read" that of the left programs'
    responses, or `control` (B, control_features). A module in
    `before` is applied to the input first: `recode` keeps there what a replaced layer did, such as padding of its own.

    Args:
        in_channels ... padding_mode: as in `nn.Conv2d`.
        slots ... rules: as in `Linear`.
    """

    replaces = nn.Conv2d
    spatial = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
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
        check_sizes(in_channels=in_channels, out_channels=out_channels)
        # nn.Conv2d checks its arguments and knows its padding; this one on the meta device holds no memory.
        shape = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            False,
            padding_mode,
            device="meta",
        )
        super().__init__(
            prod(shape.weight.shape[1:]),
            out_channels,
            tuple(shape.weight.shape),
            (control_features, in_channels),
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
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, shape.kernel_size
        self.stride, self.padding, self.dilation, self.groups = shape.stride, shape.padding, shape.dilation, groups
        self.padding_mode, self._sides = padding_mode, shape._reversed_padding_repeated_twice
        self.before: nn.Module | None = None
        self._whole = self._better_whole()

    def _better_whole(self) -> bool:
        """Whether kernels of whole images are small, and take fewer multiplications a position than their factors."""
        inputs, outputs, slots = self.memory.in_features, self.out_channels, self.slots
        factored = slots * (inputs * self.groups + slots * self.groups + outputs)
        if self.residual is not None:
            factored += inputs * outputs
        return inputs * outputs <= min(_SMALL_KERNEL, factored)

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        padded = self._padded(x)
        whole = self._whole and not torch.compiler.is_compiling() and self._serves_many(padded)
        read = None if whole else self._read(padded)
        composition = self._composition(x, control, padded, read)
        self._note(composition, x.shape[:-3])
        y = self._by_kernel(padded, composition) if read is None else self._by_factor(padded, read, composition)
        y = y if self.base is None else y + self.base(x)
        return y[0] if x.dim() == 3 else y

    def _serves_many(self, padded: Tensor) -> bool:
        """Whether there are images, with enough positions to pay for a kernel of their own."""
        positions = padded.shape[2] * padded.shape[3] / (self.stride[0] * self.stride[1])
        return padded.shape[0] > 0 and self.memory.in_features * self.out_channels <= _POSITIONS * positions

    def _padded(self, x: Tensor) -> Tensor:
        """What is convolved: with all padding but that of zeros."""
        self.check(x, -3, self.in_channels)
        padded = x[None] if x.dim() == 3 else x
        padded = padded if self.before is None else self.before(padded)
        return padded if self.padding_mode == "zeros" else F.pad(padded, self._sides, mode=self.padding_mode)

    def _read(self, padded: Tensor) -> Tensor:
        """The left responses (B * groups, slots, height, width)."""
        left = self.memory.left.unflatten(1, (self.in_channels // self.groups, *self.kernel_size))
        return F.conv2d(padded.unflatten(1, (self.groups, -1)).flatten(0, 1), left, None, *self._window())

    def _window(self) -> tuple:
        """Stride, padding and dilation of what is padded already, unless with zeros."""
        return self.stride, self.padding if self.padding_mode == "zeros" else 0, self.dilation

    def _by_factor(self, padded: Tensor, read: Tensor, composition: Composition) -> Tensor:
        """A convolution with the left programs, a mix for each image, a 1x1 convolution with the right programs."""
        groups = self.groups
        core = (composition.core() * self.gain).to(read.dtype).transpose(1, 2).repeat_interleave(groups, 0)
        part = torch.bmm(core, read.flatten(2)).unflatten(2, read.shape[2:]).unflatten(0, (-1, groups)).flatten(1, 2)
        y = F.conv2d(part, self.memory.right.t()[:, :, None, None], self.bias, groups=groups)
        if self.residual is not None:
            rest = F.conv2d(padded, self.residual, None, *self._window(), groups)
            y = torch.addcmul(y, rest, composition.residual_N.to(y.dtype)[:, None, None, None])
        return y

    def _by_kernel(self, padded: Tensor, composition: Composition) -> Tensor:
        """One convolution, in which every image is a group with a kernel of its own: faster where kernels are small."""
        kernel_NIO = self._programs(composition, based=False).to(padded.dtype)
        kernel = kernel_NIO.transpose(1, 2).reshape(-1, self.in_channels // self.groups, *self.kernel_size)
        images = padded.shape[0]
        y = F.conv2d(padded.flatten(0, 1)[None], kernel, None, *self._window(), self.groups * images)
        y = y.unflatten(1, (images, self.out_channels)).squeeze(0)
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]

    def program(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        """The dense kernel of each image, (B, in_channels / groups * kernel height * width, out_channels).

        `program[b].t().view(out_channels, -1, *kernel_size)` is the weight of an `nn.Conv2d`.
        """
        return self._programs(self.composition(x, control)).reshape(*x.shape[:-3], -1, self.out_channels)

    def composition(self, x: Tensor, control: Tensor | None = None) -> Composition:
        """The programs of the images in factored form."""
        return self._composition(x, control, self._padded(x), None)

    def _composition(self, x: Tensor, control: Tensor | None, padded: Tensor, read: Tensor | None) -> Composition:
        control = self.given(control)
        if control is None:
            control = self._average(padded, read) if self.controller_sees == "read" else x.mean((-2, -1))
            control = control.reshape(*x.shape[:-3], self.control_features)
        self.check(control, -1, self.control_features, "control")
        if control.shape[:-1] != x.shape[:-3]:
            raise ValueError(f"control gives {tuple(control.shape[:-1])} programs for a batch of {tuple(x.shape[:-3])}")
        return self.compose(control.reshape(-1, self.control_features))

    def _average(self, padded: Tensor, read: Tensor | None) -> Tensor:
        """The average of the left responses over positions and groups, (B, slots)."""
        if read is not None:
            return read.unflatten(0, (-1, self.groups)).mean((1, 3, 4))
        if self.padding_mode == "zeros":
            padded = F.pad(padded, self._sides)
        patch = functional.average_patch(padded, self.kernel_size, self.stride, self.dilation)
        return F.linear(patch.unflatten(1, (self.groups, -1)).mean(1).flatten(1), self.memory.left)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, {super().extra_repr()}"
        )


Linear.convolution = Conv2d
