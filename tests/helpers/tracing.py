"""Tools of the tracing tests: a backend of ``torch.compile`` that keeps its graphs, and limits of PyTorch releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError

BROKEN_GATHER = pytest.mark.xfail(
    torch.__version__ < "2.12",
    raises=InductorError,
    reason="Inductor's C++ for AVX-512 uses the index of a transposed gather before it declares it",
)


class GraphRecorder:
    """Pass it as ``backend`` of ``torch.compile``: it runs the graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    @property
    def ops(self) -> list[str]:
        """The ops of this library in the only graph, in order."""
        (graph,) = self.graphs
        targets = (str(node.target) for node in graph.graph.nodes)
        return [t.removeprefix("attn.") for t in targets if t.startswith("attn.")]


class CallModule(nn.Module):
    """A function as a module, for ``torch.export``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)
