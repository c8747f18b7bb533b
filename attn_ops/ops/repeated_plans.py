"""One plan for layers with equal planning: Inductor lowers the planning of equal lengths in a graph once.

Every layer of a model may call a function that plans. The graph then has a planning op per layer, and PyTorch does not
merge them, since it merges nothing in graphs for inference and nothing that mutates. Here the nodes are compared before
they are lowered. A node is *repeated* if an earlier node has the same target and arguments of equal value, and no node
before it writes to the memory of its arguments. A repeated node is not lowered: later nodes read the result of the
earlier one. Outputs of the graph are not shared, since the caller may write to one of two outputs.

Values are compared by value numbering: two nodes have the same number if they call the same pure op with arguments of
the same numbers. Memory is compared by the storages of the fake tensors in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

SHARED_OPS = (
    "plan_decode",
    "plan_prefill",
    "page_table",
    "shard_page_table",
    "block_sparse_table",
    "batch_indices_positions",
    "seq_lens",
)
"""Ops whose repeated nodes share a result: integer work on lengths, the same in every layer."""

_SYMBOLIC = ("_operator", "math", "torch")
"""Modules of functions that compute with symbolic sizes in graphs."""


class Made(NamedTuple):
    """The results of a node's lowering: the fields of the plan that it wrote, in order, and what it returned."""

    fields: Sequence[Any]
    result: Any


class RepeatedPlans:
    """The nodes of one graph that share a result."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._values: dict[Node, int] = {}
        self._writers: dict[int, list[Node]] = {}
        numbers: dict[Hashable, int] = {}
        for node in graph.nodes:
            self._values[node] = numbers.setdefault(self._expression(node), len(numbers))
            for t in _written(node):
                for storage in _storages(t):
                    self._writers.setdefault(storage, []).append(node)
        outputs = graph.output_node().all_input_nodes
        self._returned = {storage for x in outputs for storage in _storages(x)}
        self._made: dict[Hashable, Made] = {}

    def key(self, node: Node) -> Hashable | None:
        """Equal for nodes that may share a result; None for a node that must be lowered."""
        fields = _written(node)
        reads = [x for x in _nodes((node.args, node.kwargs)) if x not in fields]
        if any(self._is_written_before(node, x) for x in self._cone(reads)):
            return None
        outputs = fields or [node]
        storages = [storage for x in outputs for storage in _storages(x)]
        if any(set(self._writers.get(storage, ())) - {node} for storage in storages):
            return None
        if not self._returned.isdisjoint(storages):
            return None
        if not all(self._is_fresh(x, node) for x in fields):
            return None
        return self._expression(node, fields)

    def find(self, node: Node) -> Made | None:
        """The results of an earlier node that ``node`` repeats, None if there is no such node."""
        key = self.key(node)
        return None if key is None else self._made.get(key)

    def keep(self, node: Node, made: Made) -> None:
        """Record the results of ``node``."""
        key = self.key(node)
        if key is not None:
            self._made[key] = made

    def _expression(self, node: Node, fields: Sequence[Node] = ()) -> Hashable:
        """The target and the value numbers of the arguments, for ``fields`` their form; for an impure node the node."""
        if not fields and not _is_pure(node):
            return node

        def of(x: Any) -> Hashable:
            if isinstance(x, Node):
                return _form(x) if x in fields else ("node", self._values[x])
            return type(x), x

        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        expression = node.target, str(spec), *map(of, leaves)
        try:
            hash(expression)
        except TypeError:
            return node
        return expression

    def _cone(self, nodes: Sequence[Node]) -> Iterator[Node]:
        """``nodes`` and all nodes that they are computed from."""
        pending, seen = list(nodes), set(nodes)
        while pending:
            node = pending.pop()
            yield node
            more = [x for x in node.all_input_nodes if x not in seen] if _is_pure(node) else []
            seen.update(more)
            pending += more

    def _is_written_before(self, node: Node, read: Node) -> bool:
        """Whether a node before ``node`` writes, or may write, to the memory of ``read``."""
        storages = _storages(read)
        writers = [writer for storage in storages for writer in self._writers.get(storage, ())]
        return any(self._order[writer] < self._order[node] and writer is not read for writer in writers)

    def _is_fresh(self, field: Node, node: Node) -> bool:
        """Whether a field has no contents before ``node`` writes it: it is new memory, or empty."""
        if not _has_elements(field.meta["val"]):
            return True
        first = min(self._order[user] for user in field.users)
        return field.target is torch.ops.aten.empty.memory_format and first == self._order[node]


def _is_pure(node: Node) -> bool:
    """Whether the node's value depends only on the values of its arguments."""
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        random = torch.Tag.nondeterministic_seeded in target.tags or target is torch.ops.aten.empty.memory_format
        return not target._schema.is_mutable and not random
    return target is operator.getitem or (getattr(target, "__module__", "") in _SYMBOLIC and not _tensors(node))


def _written(node: Node) -> list[Node]:
    """Arguments that the node writes to; all its tensors if its target has no schema."""
    if node.op in ("placeholder", "get_attr", "output") or _is_pure(node):
        return []
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return _tensors(node)
    arguments = target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
    return [x for a in arguments if a.is_write for x in _nodes(given.get(a.name))]


def _tensors(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if _storages(x)]


def _nodes(tree: Any) -> list[Node]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Node)]


def _storages(node: Node) -> list[int]:
    """The storages of a node's tensors that have elements."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return [t.untyped_storage()._cdata for t in values if isinstance(t, torch.Tensor) and _has_elements(t)]


def _has_elements(t: torch.Tensor) -> bool:
    """False if a size is known to be 0. Symbolic sizes are not compared, which would guard on them."""
    return all(size for size in t.shape if isinstance(size, int))


def _form(node: Node) -> Hashable:
    t = node.meta["val"]
    return "field", *map(str, (t.shape, t.stride(), t.dtype, t.device))
