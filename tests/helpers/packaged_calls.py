"""Launches of CUDA kernels in packages, compared with eager ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attn_ops.kernels.cuda import launch
from attn_ops.native import packaged_launch
from attn_ops.native.images import Image, ImageSet, collect


def packaged_image(call: Callable[[Tensor], Tensor], counts: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Image:
    """The image of the one launch of ``call``, traced with a bfloat16 vector of ``counts[0]`` elements.

    The integers of the traced launch are those of eager launches with vectors of all ``counts``.
    """
    eager: list[tuple[int, ...]] = []
    packaged: list[tuple[Any, ...]] = []
    symbols: list[Any] = []
    monkeypatch.setattr(packaged_launch, "launch_image", lambda *args: packaged.append(args))
    monkeypatch.setattr(launch.launches, "run", lambda one, device: eager.append(one.integers))

    def traced(rows: Tensor) -> Tensor:
        sizes: Sequence[Any] = rows.shape
        symbols.extend(n.node for n in sizes if isinstance(n, torch.SymInt))
        return call(rows)

    images = ImageSet()
    with collect(images):
        trace = make_fx(traced, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        trace(torch.zeros(counts[0], dtype=torch.bfloat16))
    ((outs, ins, integers, _, name),) = packaged
    hints = {node.expr: node.hint for node in symbols}
    sizes = 2 * sum(t.dim() for t in (*outs, *ins))
    for count in counts:
        call(torch.zeros(count, dtype=torch.bfloat16))
        hints[symbols[0].expr] = count  # of dimension 0
        values = [int(i.node.expr.subs(hints)) if isinstance(i, torch.SymInt) else i for i in integers]
        assert (*values[:3], *values[3 + sizes :]) == eager[-1]
    return images.images[name]
