"""A surface: a public callable with the arguments of a base call, and values of its parameters that have an effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_ops.policy import FLASHINFER
from helpers.wrapper_requests import DEVICE, Requests

D = Requests(kv_layout="NHD")
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
BF16 = torch.bfloat16
HALF = torch.tensor(0.5, device=DEVICE)


@dataclass
class Raises:
    """A value that raises an error with the other arguments of the base call. The parameter is not ignored."""

    value: Any


@dataclass
class Surface:
    """A public callable with valid arguments, and arguments that change its result.

    ``stages`` maps each call to its arguments: ``call`` of a function; ``init``, ``plan``, ``run`` ... of a wrapper.

    The last stage gives the result. Each value in ``effects`` must change it, or raise if it is :class:`Raises`.
    ``methods`` maps a stage to the method that it calls, where that has another name.
    """

    name: str
    make: Callable[..., Any]
    stages: dict[str, dict[str, Any]]
    effects: dict[str, dict[str, Any]] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)

    def function(self, stage: str) -> Callable[..., Any]:
        if stage in ("call", "init"):
            return self.make
        return getattr(self.make, self.methods.get(stage, stage))

    def has_no_effect(self, stage: str, name: str) -> bool:
        """Whether the policy lists the argument of this function or method without an effect."""
        method = "" if stage in ("call", "init") else f".{self.methods.get(stage, stage)}"
        return name in FLASHINFER.no_effect_in.get(f"{self.make.__name__}{method}", {})

    def outcome(self, changed: str = "", **changes: Any) -> Any:
        arguments = {stage: {**base, **(changes if stage == changed else {})} for stage, base in self.stages.items()}
        if "call" in arguments:
            return self.make(**arguments["call"])
        wrapper = self.make(**arguments["init"])
        result = None
        for stage in list(arguments)[1:]:
            result = getattr(wrapper, self.methods.get(stage, stage))(**arguments[stage])
        return result


OPTIONS: dict[str, Any] = {
    "pos_encoding_mode": "ALIBI",
    "window_left": 3,
    "logits_soft_cap": 0.5,
    "sm_scale": 0.9,
}
ROPE: dict[str, Any] = {"rope_scale": 4.0, "rope_theta": 100.0}
SCALES: dict[str, Any] = {"q_scale": 2.0, "k_scale": 2.0, "v_scale": 2.0}
LSE: dict[str, Any] = {"return_lse": True}


def buffers(r: Requests) -> dict[str, Any]:
    out = torch.zeros(*r.q.shape[:2], r.head_dims[1], dtype=r.dtype, device=DEVICE)
    return {"out": out, "lse": torch.zeros(r.q.shape[:2], device=DEVICE)}
