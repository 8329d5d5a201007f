"""Modular layers: L. Kirsch, J. Kunze and D. Barber, Modular Networks, NeurIPS 2018. Equation numbers are theirs.

Shapes: Y rows or images, K choices, M modules, k modules mixed for one choice (1 but in noisy top-k training), O output
of a module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import Conditional, check_sizes, register
from neurocoder.dispatch import Dispatch, check_dispatch, send
from neurocoder.modular.route import Route
from neurocoder.precision import full_precision
from neurocoder.records import Choice

Combine = Literal["sum", "concatenate"]
_CHANNELS = 8  # of a convolutional controller


def check_activation(activation: str | None) -> None:
    if activation not in (None, "relu"):
        raise ValueError(f"activation must be None or 'relu', got {activation!r}")


class Modular(Conditional):
    """A layer that applies K of the M modules of its pool to each input. Use `Linear` or `Conv2d`."""

    home = "nc.modular"
    store = "pool"
    size = "modules"
    _route: Route | None = None
    _told = False  # that nothing trains the controller
    controller: nn.Module

    def __init__(
        self,
        width: int,
        make: Callable[[int], nn.Module],
        *,
        modules: int,
        choices: int,
        combine: Combine,
        activation: str | None,
        pool: nn.ModuleList | None,
        dispatch: Dispatch,
    ):
        check_sizes(modules=modules, choices=choices)
        if choices > modules:
            raise ValueError(f"choices is at most the number of modules, {modules}; got {choices}")
        if combine not in ("sum", "concatenate"):
            raise ValueError(f"combine must be 'sum' or 'concatenate', got {combine!r}")
        check_activation(activation)
        if combine == "concatenate" and width % choices:
            raise ValueError(
                f"{choices} modules cannot share {width} outputs evenly: choose a multiple, or combine='sum'"
            )
        check_dispatch(dispatch)
        super().__init__()
        self.choices, self.combine, self.activation, self.dispatch = choices, combine, activation, dispatch
        each = width // choices if combine == "concatenate" else width
        if pool is None:
            pool = nn.ModuleList(make(each) for _ in range(modules))
        else:
            _check_pool(pool, modules, make(each))
        self.pool = pool

    def options(self) -> dict[str, Any]:
        return {
            "modules": len(self.pool),
            "choices": self.choices,
            "combine": self.combine,
            "activation": self.activation,
            "dispatch": self.dispatch,
            **self.control_option(),
        }

    def plain_size(self) -> int:
        each = sum(p.numel() for p in self.pool[0].parameters())
        return each * self.choices if self.combine == "concatenate" else each

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Modules (..., K, k) for logits (..., K * M), and their weights where they are mixed (Eq. 2)."""
        self._tell()
        with full_precision(logits):
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_p = logits.unflatten(-1, (self.choices, len(self.pool))).log_softmax(-1)
            if self._route is None:
                chosen, weights = log_p.argmax(-1, keepdim=True), None
            else:
                chosen, weights = self._route.choose(log_p)
            if self.watched:
                self.record(Choice(log_p.exp(), chosen))
        return chosen, weights

    def _tell(self) -> None:
        """Warn, once, where a loss of the output would train the modules and never the controller."""
        if torch.compiler.is_compiling() or self._told or self._route is not None or self.watched or not self.training:
            return
        learns = any(parameter.requires_grad for parameter in self.controller.parameters())
        if learns and torch.is_grad_enabled() and len(self.pool) > 1:
            self._told = True
            warnings.warn(
                "a modular layer runs in training mode without one of its trainings: the loss of its output trains the "
                "chosen modules but never the controller that chooses. Use ViterbiEM, Reinforce or NoisyTopK of "
                "nc.modular.training, or freeze the controller, layer.controller.requires_grad_(False)",
                stacklevel=4,
            )

    def _execute(self, x_Y: Tensor, chosen_YKk: Tensor, weights_YKk: Tensor | None) -> Tensor:
        """The outputs of the chosen modules, summed or concatenated (Eq. 1)."""
        return self.combined(send(self.pool, x_Y, chosen_YKk.flatten(1), self.dispatch), chosen_YKk, weights_YKk)

    def combined(self, made: Tensor, chosen_YKk: Tensor, weights_YKk: Tensor | None) -> Tensor:
        """What the chosen modules made, (Y, K * k, O), summed or concatenated: (Y, ...)."""
        if self.activation is not None:
            made = F.relu(made)
        made = made.unflatten(1, chosen_YKk.shape[1:])
        if weights_YKk is not None:
            made = made * weights_YKk.to(made.dtype).reshape(*weights_YKk.shape, *[1] * (made.dim() - 3))
        made = made.sum(2) if made.shape[2] > 1 else made.squeeze(2)
        if self.choices == 1:
            return made.squeeze(1)
        return made.sum(1) if self.combine == "sum" else made.flatten(1, 2)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def _check_pool(pool: nn.ModuleList, modules: int, module: nn.Module) -> None:
    if not isinstance(pool, nn.ModuleList):
        raise TypeError(f"pool is that of another modular layer, an nn.ModuleList; got {type(pool).__name__}")
    if len(pool) != modules:
        raise ValueError(f"the given pool has {len(pool)} modules, not {modules}")
    for other in pool:
        if str(other) != str(module) or next(other.parameters()).dtype != next(module.parameters()).dtype:
            raise ValueError(f"the given pool holds {other}; this layer needs {module} of its own type")


@register("modular.Linear")
class Linear(Modular):
    """y = sum_i f_{a_i}(x), the K modules a chosen by p(a | x) = prod_i softmax(x W_i + c_i) (Eq. 1, 2); f_m is linear.

    A forward takes the most likely modules. `nc.modular.training` has what trains the choice.

    Args:
        in_features, out_features, bias: as in `nn.Linear`, bias that of the modules.
        modules: modules in the pool (M).
        choices: modules chosen for each input (K); the same one may be chosen twice.
        combine: "sum" the outputs, or "concatenate" them: then each module makes out_features / choices of them.
        activation: "relu" is applied to what a module makes, before the sum.
        control_features: width of `control`, where the controller looks at something other than x.
        pool: the `pool` of another layer of the same shape, to share it.
        dispatch: "sparse" computes the chosen modules alone; "dense" all of them, which `torch.compile`,
            `torch.export` and `torch.func.vmap` can follow (the first two switch to it by themselves).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        modules: int,
        choices: int = 1,
        combine: Combine = "sum",
        activation: Literal["relu"] | None = None,
        control_features: int | None = None,
        pool: nn.ModuleList | None = None,
        dispatch: Dispatch = "sparse",
        device=None,
        dtype=None,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            out_features,
            lambda width: nn.Linear(in_features, width, bias, **factory),
            modules=modules,
            choices=choices,
            combine=combine,
            activation=activation,
            pool=pool,
            dispatch=dispatch,
        )
        self.in_features, self.out_features = in_features, out_features
        self.controller = nn.Linear(self.look_at(control_features, in_features), choices * modules, **factory)

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        lead, x_YI, control_NC = self.arrange(x, control)
        logits_NX = self.controller(control_NC)
        decided = self.choose(logits_NX.reshape(*lead, logits_NX.shape[-1]))

        def of_rows(value: Tensor) -> Tensor:
            return self.spread(value.reshape(-1, *value.shape[-2:]), x_YI)

        chosen_YKk, weights_YKk = (None if value is None else of_rows(value) for value in decided)
        return self._execute(x_YI, chosen_YKk, weights_YKk).reshape(*x.shape[:-1], self.out_features)


class ConvolutionController(nn.Sequential):
    """Logits of the choices from an image of any size: 3 x 3 filters, ReLU, average, linear."""

    def __init__(self, in_channels: int, logits: int, **factory: Any):
        super().__init__(
            nn.Conv2d(in_channels, _CHANNELS, 3, padding=1, **factory),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(_CHANNELS, logits, **factory),
        )


@register("modular.Conv2d")
class Conv2d(Modular):
    """A convolution that chooses K of M kernels for each image; see `Linear`.

    Args:
        in_channels ... padding_mode: as in `nn.Conv2d`.
        modules, choices, combine, activation, pool, dispatch: as in `Linear`; concatenated are the channels.
        controller: "convolution" looks at the image through small filters, averaged; "linear" at all its pixels.
        input_size: (height, width) of the images, which a linear controller needs.
        control_features: width of `control` (batch, control_features), of which the controller is a linear map where
            it looks at something other than the images; `controller` and `input_size` say nothing then.
    """

    replaces = nn.Conv2d

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
        modules: int,
        choices: int = 1,
        combine: Combine = "sum",
        activation: Literal["relu"] | None = None,
        controller: Literal["convolution", "linear"] = "convolution",
        input_size: tuple[int, int] | None = None,
        control_features: int | None = None,
        pool: nn.ModuleList | None = None,
        dispatch: Dispatch = "sparse",
        device=None,
        dtype=None,
    ):
        check_sizes(in_channels=in_channels, out_channels=out_channels)
        if controller not in ("convolution", "linear"):
            raise ValueError(f"controller must be 'convolution' or 'linear', got {controller!r}")
        if (controller == "linear") != (input_size is not None):
            raise ValueError("a linear controller needs input_size=(height, width) of the images, and no other does")
        factory = {"device": device, "dtype": dtype}
        window = (kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(
            out_channels,
            lambda width: nn.Conv2d(in_channels, width, *window, **factory),
            modules=modules,
            choices=choices,
            combine=combine,
            activation=activation,
            pool=pool,
            dispatch=dispatch,
        )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.input_size = None if input_size is None else (int(input_size[0]), int(input_size[1]))
        width = self.look_at(control_features, in_channels)
        if self.controlled:
            if input_size is not None:
                raise ValueError("a controller that looks at a control needs no input_size: leave it out")
            self.controller = nn.Linear(width, choices * modules, **factory)
        elif self.input_size is None:
            self.controller = ConvolutionController(in_channels, choices * modules, **factory)
        else:
            pixels = in_channels * self.input_size[0] * self.input_size[1]
            self.controller = nn.Sequential(nn.Flatten(), nn.Linear(pixels, choices * modules, **factory))

    def options(self) -> dict[str, Any]:
        controller = "convolution" if self.input_size is None else "linear"
        return super().options() | {"controller": controller, "input_size": self.input_size}

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        self.check(x, -3, self.in_channels)
        if x.dim() not in (3, 4):
            raise ValueError(f"expected (batch, {self.in_channels}, height, width), got {tuple(x.shape)}")
        images = x if x.dim() == 4 else x[None]
        if self.input_size is not None and x.shape[-2:] != self.input_size:
            raise ValueError(f"built for images of {self.input_size}, got {tuple(x.shape[-2:])}")
        y = self._execute(images, *self.choose(self.controller(self._seen(x, images, control))))
        return y if x.dim() == 4 else y[0]

    def _seen(self, x: Tensor, images: Tensor, control: Tensor | None) -> Tensor:
        """What the controller looks at: the images, or the control of each."""
        control = self.given(control)
        if control is None:
            return images
        if not self.controlled:
            raise ValueError("this layer was built without control_features: its controller looks at the images")
        self.check(control, -1, self.control_features, "control")
        if control.shape[:-1] != x.shape[:-3]:
            raise ValueError(f"control is {tuple(control.shape)} for images of {tuple(x.shape)}: give one row each")
        return control.reshape(-1, self.control_features)


Linear.convolution = Conv2d
