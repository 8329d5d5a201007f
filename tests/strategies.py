"""Random layers and inputs for hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import neurocoder as nc


@st.composite
def rules(draw, steps: int, recurrent: bool) -> nc.Rules:
    state_too = ["input", "state"] if recurrent else ["input"]
    lstm_too = ["linear", "lstm"] if recurrent else ["linear"]
    return nc.Rules(
        first_step=draw(st.sampled_from(["zero", "first-slots"])),
        usage=draw(st.sampled_from(["head", "all"])),
        least_used=draw(st.sampled_from(["max", "one"])),
        content=draw(st.sampled_from(["softmax", "peak"])),
        gate=draw(st.sampled_from(state_too)),
        order=draw(st.sampled_from(["descending", "first", "ascending"])),
        integration=draw(st.sampled_from(lstm_too)),
        initial_state=draw(st.sampled_from(["zero", "learned"])),
        free_keys=draw(st.sampled_from([(), ("values",), ("left", "right")])),
        key_columns=draw(st.booleans()),
        initialisation=draw(st.sampled_from(["calibrated", "xavier"])),
    )


@st.composite
def options(draw) -> dict[str, Any]:
    """Constructor options of a small layer: half of them by the paper's rules, half by any."""
    slots, steps = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    kinds = [None, "linear", "lstm", draw(st.integers(1, 5))]
    controller = draw(st.sampled_from(kinds))
    recurrent = controller not in (None, "linear") or (controller is None and steps > 1)
    chosen = {
        "slots": slots,
        "steps": steps,
        "heads": draw(st.integers(1, 3)),
        "key_dim": draw(st.integers(1, 4)),
        "least_used": draw(st.integers(0, slots)),
        "residual": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "controller": controller,
        "controller_sees": draw(st.sampled_from(["input", "read"])),
        "sharpness": draw(st.sampled_from([None, 0.5, 10.0, 50.0])),
        "rules": draw(st.one_of(st.none(), rules(steps, recurrent))),
        "dtype": torch.float64,
    }
    return chosen


@st.composite
def reading(draw, may_be_sparse: bool = True) -> dict[str, Any]:
    """Options of a small layer that reads a few of its slots."""
    chosen, products = draw(options()), draw(st.booleans())
    chosen |= {"slots": draw(st.sampled_from([4, 9, 16]))} if products else {"slots": chosen["slots"] + 2}
    chosen |= {"key_dim": draw(st.sampled_from([4, 6]))} if products else {"key_dim": chosen["key_dim"] + 1}
    chosen |= {"least_used": 0, "product_keys": products, "one_choice": draw(st.booleans())}
    chosen |= {"top_k": draw(st.integers(1, min(chosen["slots"], 4)))}
    if may_be_sparse and chosen["controller_sees"] != "read":
        chosen["sparse"] = draw(st.booleans())
    return chosen | {"addresses": draw(st.sampled_from(["learned", "fixed"]))}


def shake(layer: torch.nn.Module) -> Any:
    """Move every parameter off its initial value, so that no term of an equation is zero by construction."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer
