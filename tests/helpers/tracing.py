"""A backend of ``torch.compile`` that keeps the graphs it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorder:
    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    @property
    def ops(self) -> list[str]:
        """The attention ops of the only graph."""
        (graph,) = self.graphs
        targets = (str(node.target) for node in graph.graph.nodes)
        return [t.removeprefix("attn.") for t in targets if t.startswith("attn.")]
