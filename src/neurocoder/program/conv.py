"""A program-memory layer for `nn.Conv2d`: a kernel composed for each image.

Shapes: see `neurocoder.functional`; G groups of a convolution.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import check_sizes, register
from neurocoder.functional import average_patch
from neurocoder.program.composition import Composition
from neurocoder.program.layer import ProgramLayer
from neurocoder.program.options import Options, spelled_out

_SMALL_KERNEL = 65536  # numbers: as many kernels as a batch has images need to fit into memory
_POSITIONS = 96  # a whole kernel is worth making where it has fewer numbers than so many times the positions it serves


@register("Conv2d")
class Conv2d(ProgramLayer):
    """A convolution whose kernel is composed for each image.

    The controller sees the global average of the input channels, with controller_sees="read" that of the left programs'
    responses, or `control` (B, control_features). A module in `before` is applied to the input first: `recode` keeps
    there what a replaced layer did, such as padding of its own.

    Args:
        in_channels ... padding_mode: as in `nn.Conv2d`.
        slots ... rules: as in `Linear`.
    """

    replaces = nn.Conv2d
    spatial = True

    @spelled_out
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
        device=None,
        dtype=None,
        **options: Unpack[Options],
    ):
        check_sizes(in_channels=in_channels, out_channels=out_channels)
        if options.get("sparse"):
            raise ValueError("a convolution reads every slot at every position: leave out sparse=True")
        # nn.Conv2d checks its arguments and knows its padding; this one on the meta device holds no memory.
        window = (kernel_size, stride, padding, dilation, groups)
        shape = nn.Conv2d(in_channels, out_channels, *window, False, padding_mode, device="meta")
        factory = {"device": device, "dtype": dtype}
        super().__init__(tuple(shape.weight.shape), in_channels, bias, options, factory)
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
        kernel_NIO = self.dense(composition.core(), composition.residual_N, based=False).to(padded.dtype)
        kernel = kernel_NIO.transpose(1, 2).reshape(-1, self.in_channels // self.groups, *self.kernel_size)
        images = padded.shape[0]
        y = F.conv2d(padded.flatten(0, 1)[None], kernel, None, *self._window(), self.groups * images)
        y = y.unflatten(1, (images, self.out_channels)).squeeze(0)
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]

    def program(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        """The dense kernel of each image, (B, in_channels / groups * kernel height * width, out_channels).

        `program[b].t().view(out_channels, -1, *kernel_size)` is the weight of an `nn.Conv2d`.
        """
        composition = self.composition(x, control)
        dense = self.dense(composition.core(), composition.residual_N)
        return dense.reshape(*x.shape[:-3], -1, self.out_channels)

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
        patch = average_patch(padded, self.kernel_size, self.stride, self.dilation)
        return F.linear(patch.unflatten(1, (self.groups, -1)).mean(1).flatten(1), self.memory.left)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, {super().extra_repr()}"
        )
