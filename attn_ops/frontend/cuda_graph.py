"""CUDA-graph mode: the caller's buffers are the plan's memory, and their sizes its capacity.

The buffers of ``qo_indptr``, ``kv_indptr``, ``kv_indices`` and (MLA) ``kv_len_arr`` become fields of the plan. The last
page lengths, which a plan does not have, are copied to their buffer. If lengths are given in tokens, a plan's page
table leaves out pages without tokens: the plan then has memory of its own for it, and the caller's buffers of the table
are not written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_ops.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    DeviceError,
    DTypeError,
    PlanError,
    ShapeError,
    dtype_name,
    fail,
    shape_of,
)
from attn_ops.plan.page_table import BatchSize, PageTable

PLAN_FIELDS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len")
PLAN_FIELDS_BY_LENGTH = ("qo_indptr", "kv_len")
"""Plan fields in the caller's buffers: in general, and if lengths are given in tokens."""


@dataclass
class GraphBuffers:
    """The caller's buffers of a wrapper in CUDA-graph mode.

    ``buffers``: plan field, or ``kv_last_page_len`` or ``mask`` -> (the argument's name, its tensor).
    """

    where: str
    device: torch.device
    buffers: dict[str, tuple[str, Tensor]]
    storage: dict[str, Tensor] = field(init=False)
    batch: int = field(init=False)

    def __post_init__(self) -> None:
        for key, (name, buffer) in self.buffers.items():
            self._check(name, buffer, torch.uint8 if key == "mask" else torch.int32)
        name, indptr = self.buffers["kv_indptr"]
        if not indptr.shape[0]:
            fail(ShapeError, self.where, f"{name} is [0]", "[batch + 1]", "allocate an element more than requests")
        self.batch = indptr.shape[0] - 1
        for key, extra in (("qo_indptr", 1), ("kv_last_page_len", 0), ("kv_len", 0)):
            if key in self.buffers and self.buffers[key][1].shape[0] != self.batch + extra:
                other, buffer = self.buffers[key]
                fail(
                    ShapeError,
                    self.where,
                    f"{other} has {buffer.shape[0]} elements and {name} {indptr.shape[0]}",
                    f"{self.batch + extra}, for the {self.batch} requests of {name}",
                    "make the two agree",
                )
        fields = PLAN_FIELDS_BY_LENGTH if "kv_len" in self.buffers else PLAN_FIELDS
        self.storage = {key: self.buffers[key][1] for key in fields if key in self.buffers}

    def _check(self, name: str, buffer: Tensor | None, dtype: torch.dtype) -> None:
        if buffer is None:
            fail(ArgumentTypeError, self.where, f"{name} is missing", "a buffer, in CUDA-graph mode", f"pass {name}")
        if buffer.dtype != dtype:
            fail(
                DTypeError,
                self.where,
                f"{name} is {dtype_name(buffer.dtype)}",
                dtype_name(dtype),
                "allocate it in that dtype",
            )
        if buffer.device != self.device:
            fail(DeviceError, self.where, f"{name} is on {buffer.device}", f"{self.device}", "allocate it there")
        if buffer.dim() != 1 or not buffer.is_contiguous():
            shown = f"{name} is {shape_of(buffer)} with strides {list(buffer.stride())}"
            fail(ShapeError, self.where, shown, "a contiguous vector", "allocate it as one")

    def capacity(self, page_size: int, first: BatchSize) -> BatchSize:
        """The largest batch that the buffers hold; sizes that they do not bound are those of the first plan."""
        if "kv_indices" not in self.buffers:
            return BatchSize(self.batch, max(first.rows, 1), 0, first.kv_len or 1, first.splits)
        pages = self.buffers["kv_indices"][1].shape[0]
        return BatchSize(self.batch, max(first.rows, 1), pages, max(pages * page_size, 1), first.splits)

    def check(self, where: str, needed: BatchSize, capacity: BatchSize, mask: Tensor | None) -> None:
        """Raise unless the batch has the fixed number of requests and fits, and the buffers can be written."""
        for name, buffer in self.buffers.values():
            if buffer.is_inference() and not torch.is_inference_mode_enabled():
                fail(
                    ArgumentError,
                    where,
                    f"{name} was made in inference mode",
                    "a buffer made outside of it, or plan() inside",
                    "allocate it outside of torch.inference_mode()",
                )
        if mask is not None:
            self._check_mask(where, mask)
        if needed.batch != self.batch:
            fail(
                PlanError,
                where,
                f"the batch has {needed.batch} requests and the buffers are for {self.batch}",
                "the same number at every plan in CUDA-graph mode",
                f"fill up to {self.batch} with empty requests, or make another wrapper",
            )
        self._check_capacity(where, needed, capacity)

    def _check_capacity(self, where: str, needed: BatchSize, capacity: BatchSize) -> None:
        """Raise unless the batch fits: the error names the buffer, or the first plan, that bounds the size."""
        first_plan = "the first plan"
        pages = self.buffers["kv_indices"][0] if "kv_indices" in self.buffers else first_plan
        for what, want, have, name in (
            ("pages", needed.pages, capacity.pages, pages),
            ("query rows", needed.rows, capacity.rows, first_plan),
            ("splits of KV", needed.splits, capacity.splits, first_plan),
            ("tokens in a request", needed.kv_len or 0, capacity.kv_len or 0, pages if capacity.pages else first_plan),
        ):
            if want > have:
                fail(
                    CapacityError,
                    where,
                    f"the batch has {want} {what} and {name} capacity for {have}",
                    f"capacity for at least {want}",
                    "make the wrapper, or its first plan, that large",
                )

    def copy(self, tables: PageTable) -> None:
        """Copy the last page lengths, which the plan does not hold."""
        if "kv_last_page_len" in self.buffers and tables.kv_last_page_len is not None:
            self.buffers["kv_last_page_len"][1].copy_(tables.kv_last_page_len)

    def hold_mask(self, mask: Tensor) -> Tensor:
        """The buffer, with ``mask`` at its beginning."""
        buffer = self.buffers["mask"][1]
        buffer[: mask.shape[0]] = mask
        return buffer

    def _check_mask(self, where: str, mask: Tensor) -> None:
        if "mask" not in self.buffers:
            fail(
                ArgumentError,
                where,
                "a mask is given and custom_mask_buf is not",
                "a buffer for it, in CUDA-graph mode",
                f"make the wrapper with custom_mask_buf of at least {mask.shape[0]} bytes",
            )
        name, buffer = self.buffers["mask"]
        if mask.shape[0] > buffer.shape[0]:
            fail(
                CapacityError,
                where,
                f"the packed mask has {mask.shape[0]} bytes and {name} {buffer.shape[0]}",
                f"at least {mask.shape[0]}",
                "make the wrapper with such a buffer",
            )
