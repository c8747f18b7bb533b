"""What a surface is: a public callable, with a base call and values that change what it gives; and shared inputs.

A surface has stages: a function has ``call``; a wrapper ``init``, ``plan``, ``run`` and so on. ``inputs`` are the
arguments of the base call, ``effects`` the values, each of which must change the result of ``outcome``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers.wrapper_requests import DEVICE, Requests

D = Requests(kv_layout="NHD")
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
BF16 = torch.bfloat16
HALF = torch.tensor(0.5, device=DEVICE)


@dataclass
class Raises:
    """A value that is looked at: it is an error beside the base call."""

    value: Any


@dataclass
class Surface:
    """``stages``: name -> (callable, arguments of the base call); called in order, the last one gives the result."""

    name: str
    make: Callable[..., Any]
    stages: dict[str, dict[str, Any]]
    effects: dict[str, dict[str, Any]] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)

    def function(self, stage: str) -> Callable[..., Any]:
        if stage in ("call", "init"):
            return self.make
        return getattr(self.make, self.methods.get(stage, stage))

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
