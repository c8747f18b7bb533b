"""Turns a case into tensors, a plan and a call: the body of the attention tests of every backend."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import attn_ops
from attn_ops.plan.sizing import MIN_PACKED_ROWS
from attn_ops.plan.state import PlanProblem
from helpers.cases import Case
from helpers.fp8_products import Fp8Expected
from helpers.masks import make, pack
from helpers.oracle import GARBAGE, Expected, PagedBatch

CPU_BACKENDS = ("reference", "auto")
"""On the CPU ``auto`` is the kernel ``cpu.sdpa`` where it runs the call."""

OPS = {"decode": "batch_decode", "prefill": "batch_prefill", "ragged": "ragged_prefill"}


class Setup:
    """The tensors of ``case`` and a plan for them. ``kind`` is ``decode``, ``prefill`` or ``ragged``."""

    def __init__(self, kind: str, case: Case, device: str = "cpu", seed: int = 0) -> None:
        self.kind, self.case, self.device = kind, case, device
        self.generator = torch.Generator().manual_seed(seed)
        (self.num_qo_heads, self.num_kv_heads), (self.head_dim, self.head_dim_vo) = case.heads, case.head_dims
        self.qo_lens = (1,) * len(case.kv_lens) if kind == "decode" else case.qo_lens
        self._query()
        (self._ragged if kind == "ragged" else self._paged)()
        sinks = torch.randn(self.num_qo_heads, generator=self.generator) * case.sinks
        self.sinks = sinks.to(device) if case.sinks else None
        self.kv_scale = None if case.kv_scale is None else torch.tensor(case.kv_scale, device=device)
        self._mask()
        self._plan()

    def run(self, backend: str = "auto", **overrides: Any) -> tuple[Tensor, Tensor]:
        """Call the op, with ``return_lse`` unless it is overridden."""
        arguments = {**self.arguments, "backend": backend, **overrides}
        return getattr(torch.ops.attn, OPS[self.kind])(**arguments)

    def check_run(self, backend: str) -> None:
        """Call the op and compare the result with the oracle. For the reference, ``auto`` on the CPU as well."""
        for name in CPU_BACKENDS if backend == "reference" else (backend,):
            out, lse = self.run(name)
            self.check(out, lse, **self.tolerance(name))

    def check_single(self, backend: str = "auto") -> None:
        """Call ``single_prefill`` for each request of a ragged batch, and compare it with the oracle."""
        options = {k: v for k, v in self.arguments.items() if k not in ("q", "k", "v", "plan", "workspace", "mask")}
        sizes = list(zip(self.qo_lens, self.case.kv_lens, strict=True))
        columns = self.qo_lens, self.case.kv_lens, [-(-n * m // 8) for n, m in sizes]
        ranges = [[slice(end - n, end) for n, end in zip(c, accumulate(c), strict=True)] for c in columns]
        for rows, tokens, mask_bytes in zip(*ranges, strict=True):
            k, v = (t[tokens] if self.case.kv_layout == "NHD" else t[:, tokens] for t in (self.k, self.v))
            mask = None if self.packed_mask is None else self.packed_mask[mask_bytes]
            for name in CPU_BACKENDS if backend == "reference" else (backend,):
                out, lse = torch.ops.attn.single_prefill(self.q[rows], k, v, mask=mask, backend=name, **options)
                assert out.dtype == (self.case.out_dtype or self.case.dtype)
                tolerance = self.tolerance(name)
                expected = self._exact(tolerance.pop("rotated_dtype", None))
                expected.rows(rows).check(out, lse, **tolerance)

    def check_equal_lengths(self, backend: str = "auto") -> None:
        """Call ``single_prefill`` for all requests of a ragged batch of equal lengths, and compare with the oracle."""
        for name in CPU_BACKENDS if backend == "reference" else (backend,):
            out, lse = torch.ops.attn.single_prefill(**self.unplanned_arguments, backend=name)
            self.check(out, lse, **self.tolerance(name))

    @property
    def unplanned_arguments(self) -> dict[str, Any]:
        """The arguments of ``single_prefill`` for a ragged batch of equal lengths."""
        assert len(set(self.qo_lens)) == len(set(self.case.kv_lens)) == 1
        without = {name: x for name, x in self.arguments.items() if name not in ("plan", "workspace")}
        mask = None if self.packed_mask is None else pack([torch.cat(self.masks)])
        bits = sum(self.qo_lens) * self.case.kv_lens[0]
        if mask is not None:
            mask = mask[: -(-bits // 8)].to(self.device)
        return without | {"mask": mask, "batch_size": len(self.qo_lens)}

    def tolerance(self, backend: str) -> dict[str, Any]:
        """How much further than the reference the kernels of ``backend`` may be from the oracle.

        They round rotated queries and keys to the dtype, as the oracle then does, but FP8 keys only on ``cuda``, and
        compute with FP8 keys and values in float16. The scale of the values also multiplies what a probability that
        underflows has lost.
        """
        case, tolerance = self.case, dict[str, Any]()
        if case.out_dtype is not None and case.dtype != torch.float32:
            tolerance["eps"] = torch.finfo(case.dtype).eps
        if backend in ("auto", "reference"):
            return tolerance
        if case.pos_encoding == "ROPE_LLAMA":
            rounds = case.dtype != torch.float32 and (case.kv_dtype is None or backend == "cuda")
            tolerance["float32_eps"] = torch.finfo(case.dtype).eps / (64 if rounds else 8)
            tolerance["rotated_dtype"] = case.dtype if rounds else None
        if case.pos_encoding == "ALIBI" and backend == "cuda":
            tolerance["biased_tile"] = 128
        if self._in_float16(backend):
            tolerance["smallest"] = torch.finfo(torch.float16).smallest_normal
        if case.kv_scale is not None:
            smallest = tolerance.get("smallest", torch.finfo(case.dtype).smallest_normal)
            tolerance["smallest"] = smallest * max(1.0, case.kv_scale[1])
        return tolerance

    def _in_float16(self, backend: str) -> bool:
        """Whether products with an FP8 cache are in float16: in decode, and on ``cuda`` in prefill of few rows."""
        if self.case.kv_dtype is None or self.case.dtype == torch.float32:
            return False
        if self.kind == "decode":
            return True
        packed_rows = PlanProblem.of(self.planner.state.problem).tile_rows * (self.num_qo_heads // self.num_kv_heads)
        return self.kind == "prefill" and backend == "cuda" and packed_rows <= MIN_PACKED_ROWS

    def check(
        self, out: Tensor, lse: Tensor | None = None, rotated_dtype: torch.dtype | None = None, **tolerance: float
    ) -> None:
        assert out.dtype == (self.case.out_dtype or self.case.dtype)
        assert out.is_contiguous()
        self._exact(rotated_dtype).check(out, lse, **tolerance)

    def fill_with_nan(self, tokens: Tensor) -> None:
        """The keys and values of these ``tokens``, of the first request if KV is paged, in FP8 or 16 bits."""
        at: Any = tokens
        if self.kind != "ragged":
            page_size = self.case.page_size
            at = self.page_table[1].long()[tokens // page_size], tokens % page_size
        for t in (self.k, self.v):
            t.view(torch.uint8)[at] = 0xFF  # a NaN of each of these dtypes

    @property
    def arguments(self) -> dict[str, Any]:
        keys = ("k", "v") if self.kind == "ragged" else ("k_cache", "v_cache")
        more = {} if self.kind == "decode" else self._prefill_options
        return {
            "q": self.q,
            **dict(zip(keys, (self.k, self.v), strict=True)),
            "plan": self.planner.state,
            "workspace": self.planner.workspace,
            "sm_scale": self.case.sm_scale,
            "logits_soft_cap": self.case.logits_soft_cap,
            "window_left": self.case.window_left,
            "sinks": self.sinks,
            "kv_layout": self.case.kv_layout,
            "return_lse": True,
            "kv_scale": self.kv_scale,
            "pos_encoding": self.case.pos_encoding,
            "rope_scale": self.case.rope[0],
            "rope_theta": self.case.rope[1],
            "out_dtype": self.case.out_dtype,
            **more,
        }

    @property
    def _prefill_options(self) -> dict[str, Any]:
        return {"causal": self.case.causal, "window_right": self.case.window_right, "mask": self.packed_mask}

    def check_fp8_products(self, out: Tensor, lse: Tensor, float32_eps: float = 2**-23) -> float:
        """:meth:`check` of a kernel that multiplies in FP8."""
        assert out.dtype == (self.case.out_dtype or self.case.dtype)
        assert out.is_contiguous()
        assert lse.dtype == torch.float32
        return self._expected(Fp8Expected).check(out, lse, float32_eps=float32_eps)

    @cached_property
    def expected(self) -> Expected:
        return self._expected(Expected)

    def _exact(self, rotated_dtype: torch.dtype | None) -> Expected:
        return self.expected if rotated_dtype is None else self._expected(Expected, rotated_dtype=rotated_dtype)

    def _expected(self, kind: Any, **options: Any) -> Any:
        """The expected results, of ``kind``: :class:`Expected` or :class:`Fp8Expected`."""
        # A decode row is the last of its sequence: the causal mask hides no key from it.
        rows = self.q[: sum(self.qo_lens)].split(self.qo_lens)
        k_scale, v_scale = self.case.kv_scale or (1.0, 1.0)
        requests = [
            (q, k.double() * k_scale, v.double() * v_scale, mask)
            for q, k, v, mask in zip(rows, self.keys, self.values, self.masks, strict=True)
        ]
        no_keys, no_values = (torch.zeros(0, self.num_kv_heads, dim) for dim in self.case.head_dims)
        return kind.of(
            [*requests, (self.q[:0], no_keys, no_values, None)],
            padding=self.case.padding,
            causal=self.case.causal,
            window_left=self.case.window_left,
            window_right=self.case.window_right,
            logits_soft_cap=self.case.logits_soft_cap,
            sm_scale=self.case.sm_scale,
            sinks=self.sinks,
            pos_encoding=self.case.pos_encoding,
            rope_scale=self.case.rope[0],
            rope_theta=self.case.rope[1],
            **options,
        )

    def replan(self) -> None:
        """Plan into tensors of garbage, none of which may remain in use."""
        for t in self.planner.state:
            t.fill_(GARBAGE)
        self.planner.workspace.fill_(math.nan)
        self.planner.plan(*self.plan_inputs)

    def _query(self) -> None:
        rows = sum(self.qo_lens)
        heads = self.num_qo_heads + (2 * self.num_kv_heads if self.case.storage == "padded" else 0)
        memory = torch.full((rows + self.case.padding, heads, self.head_dim), math.nan, dtype=self.case.dtype)
        random = torch.randn(rows, self.num_qo_heads, self.head_dim, generator=self.generator)
        memory[:rows, : self.num_qo_heads] = random.to(self.case.dtype)
        self.q = memory.to(self.device)[:, : self.num_qo_heads]

    def _mask(self) -> None:
        """Little-endian bits. Every request begins at a new byte."""
        shapes, masked = list(zip(self.qo_lens, self.case.kv_lens, strict=True)), self.case.masked
        self.masks: list[Any] = [None] * len(shapes)
        self.packed_mask = None
        if masked is not None:
            self.masks = [make(masked, *shape, self.generator) for shape in shapes]
            self.packed_mask = pack(self.masks).to(self.device)

    def _paged(self) -> None:
        case = self.case
        batch = PagedBatch(
            lengths=case.kv_lens,
            page_size=case.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_vo=self.head_dim_vo,
            kv_layout=case.kv_layout,
            dtype=case.kv_dtype or case.dtype,
            device=self.device,
            storage=case.storage,
            generator=self.generator,
        )
        self.k, self.v, self.keys, self.values = batch.k_cache, batch.v_cache, batch.keys, batch.values
        self.page_table = batch.page_table
        self.num_pages = batch.num_pages

    def _ragged(self) -> None:
        """Tokens of all requests concatenated, followed by NaN."""
        spare, dtype = 2 if self.case.storage == "padded" else 0, self.case.kv_dtype or self.case.dtype

        def tokens(dim: int) -> tuple[list[Tensor], Tensor]:
            shapes = [(n, self.num_kv_heads, dim) for n in self.case.kv_lens]
            each = [torch.randn(shape, generator=self.generator).to(dtype) for shape in shapes]
            after = torch.full((spare, self.num_kv_heads, dim), math.nan)
            flat = torch.cat((*(t.float() for t in each), after))
            if self.case.kv_layout == "HND":
                flat = flat.transpose(0, 1).contiguous()
            memory = torch.full((*flat.shape[:2], dim + 8 * spare), math.nan)
            memory[..., :dim] = flat
            return each, memory.to(self.device, dtype)[..., :dim]

        self.keys, self.k = tokens(self.head_dim)
        self.values, self.v = tokens(self.head_dim_vo)

    def _plan(self) -> None:
        sizes: dict[str, Any] = {
            "max_batch": max(1, len(self.case.kv_lens) + self.case.padding + self.case.spare_batch),
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_vo": self.head_dim_vo,
            "max_kv_len": max((1, *self.case.kv_lens)),
            "device": self.device,
        }
        qo_indptr = self._indptr(self.qo_lens)
        if self.kind == "ragged":
            sizes |= {"max_pages": 0, "max_tokens": max(1, sum(self.qo_lens))}
            self.plan_inputs: tuple[Tensor, ...] = (qo_indptr, self._indptr(self.case.kv_lens))
        else:
            sizes |= {"max_pages": self.page_table[1].shape[0] + 3, "page_size": self.case.page_size}
            self.plan_inputs = self.page_table
        if self.kind == "prefill":
            sizes |= {"max_tokens": max(1, sum(self.qo_lens))}
            self.plan_inputs = (qo_indptr, *self.plan_inputs)
        if self.kind != "ragged":
            sizes |= {"cache_pages": self.num_pages}
        planner = attn_ops.DecodePlanner if self.kind == "decode" else attn_ops.PrefillPlanner
        if self.kind != "decode":
            sizes |= {"short_kv": False}  # most cases are short, and for the kernels of any length
        self.planner = planner(**(sizes | self.case.planner))
        self.replan()

    def _indptr(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
