"""The tensors of prefill and MLA rows: random KV, page tables, planners, and a float32 reference."""

from __future__ import annotations

import torch
from torch import Tensor

import attn_ops
from benchmarks.comparison import alibi_bias, largest_error, rotated
from benchmarks.page_table import PageTable, indptr
from benchmarks.prefill_rows import MlaRow, PrefillRow
from benchmarks.timing import copies_for


class PrefillProblem:
    """Copies of paged KV caches, ``k_caches[i]`` and ``v_caches[i]``, and of the same tokens in ragged form.

    The ragged ones are ``keys[i]`` and ``values[i]``. All are in NHD layout.
    """

    def __init__(self, row: PrefillRow, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        self.row, self.dtype, self.device = row, dtype, device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.table = PageTable(row.kv_lens, row.page_size, generator, device)
        self.copies = copies_for(row.kv_bytes())
        pages = (self.table.num_pages, row.page_size, row.num_kv_heads)
        self.k_caches = [random(*pages, row.head_dim) for _ in range(self.copies)]
        self.v_caches = [random(*pages, row.head_dim_vo) for _ in range(self.copies)]
        q = random(sum(row.qo_lens), row.num_qo_heads, row.head_dim)
        self.q = q.to(torch.float8_e4m3fn) if row.fp8_query else q
        self.qo_indptr, self.kv_indptr = indptr(row.qo_lens, device), indptr(row.kv_lens, device)
        self.keys, self.values = (
            [torch.cat([self.table.tokens(c, b, n) for b, n in enumerate(row.kv_lens)]) for c in caches]
            for caches in (self.k_caches, self.v_caches)
        )
        self.visible = [self._visible(n, m, generator) for n, m in zip(row.qo_lens, row.kv_lens, strict=True)]
        self.kv_dtype = torch.float8_e4m3fn if row.fp8 else dtype
        for tensors in (self.k_caches, self.v_caches, self.keys, self.values):
            tensors[:] = [t.to(self.kv_dtype) for t in tensors]

    def _visible(self, rows: int, keys: int, generator: torch.Generator) -> Tensor | None:
        """The custom mask of a request, bool ``[rows, keys]``, if the row has one."""
        if not self.row.mask:
            return None
        if self.row.mask == "causal":
            return torch.ones(rows, keys, dtype=torch.bool, device=self.device).tril(keys - rows)
        visible = torch.rand(rows, keys, generator=generator, device=self.device) < 0.5
        visible[:, : keys - rows] = True
        visible.diagonal(keys - rows).fill_(True)
        return visible

    @property
    def mask(self) -> Tensor | None:
        """The custom mask of all requests, bool ``[sum(qo_lens * kv_lens)]``."""
        return torch.cat([t.flatten() for t in self.visible if t is not None]) if self.row.mask else None

    def packed_mask(self) -> Tensor | None:
        """The same in bytes, as the ops take it."""
        mask = self.mask
        if mask is None:
            return None
        bits = tuple(n * m for n, m in zip(self.row.qo_lens, self.row.kv_lens, strict=True))
        num_bytes = sum(-(-n // 8) for n in bits)
        return torch.ops.attn.segment_packbits(mask, indptr(bits, self.device), num_bytes, bitorder="little")[0]

    def planner(self, paged: bool) -> attn_ops.PrefillPlanner:
        """A planner of exactly this batch, with its plan made."""
        row = self.row
        planner = attn_ops.PrefillPlanner(
            row.batch,
            sum(row.qo_lens),
            self.table.num_pages if paged else 0,
            page_size=row.page_size if paged else 1,
            num_qo_heads=row.num_qo_heads,
            num_kv_heads=row.num_kv_heads,
            head_dim=row.head_dim,
            head_dim_vo=row.head_dim_vo,
            max_kv_len=max(row.kv_lens),
            causal=row.causal,
            window_left=row.window_left,
            device=self.device,
        )
        planner.plan(self.qo_indptr, *(self.table.arguments if paged else (self.kv_indptr,)))
        return planner

    def empty_out(self) -> Tensor:
        return self.q.new_empty(*self.q.shape[:-1], self.row.head_dim_vo, dtype=self.dtype)

    def dense(self, copy: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """``q, k, v`` as views ``[batch, heads, rows, head_dim]``, None if requests differ in size."""
        if self.row.equal_lengths is None:
            return None
        tensors = (self.q, self.keys[copy], self.values[copy])
        return tuple(t.view(self.row.batch, -1, *t.shape[1:]).transpose(1, 2) for t in tensors)  # type: ignore[return-value]

    def error(self, out: Tensor, copy: int = 0, rows: int = 64) -> float:
        """Largest relative error in norm of first, middle and last query rows of two requests, against float32."""
        pairs = []
        for b in {0, self.row.batch - 1}:
            n, first = self.row.qo_lens[b], int(self.qo_indptr[b])
            for begin in {max(0, n - rows), max(0, n // 2 - rows // 2), 0}:
                i = torch.arange(begin, min(n, begin + rows), device=self.device)
                pairs.append((out[first + i], self._expected(b, i, copy)))
        return largest_error(pairs)

    def _expected(self, b: int, i: Tensor, copy: int) -> Tensor:
        """The float32 result of query rows ``i`` of request ``b``."""
        row, n, m = self.row, self.row.qo_lens[b], self.row.kv_lens[b]
        first_q, first_kv = int(self.qo_indptr[b]), int(self.kv_indptr[b])
        k, v = (t[copy][first_kv : first_kv + m].float() for t in (self.keys, self.values))
        q = self.q[first_q + i].float()
        if row.pos_encoding == "ROPE_LLAMA":
            q, k = rotated(q, i + m - n), rotated(k, torch.arange(m, device=self.device))
        q = q.unflatten(1, (row.num_kv_heads, -1))
        logits = torch.einsum("nhgd,mhd->nhgm", q, k) * row.head_dim**-0.5
        if row.pos_encoding == "ALIBI":
            distance = torch.arange(m, device=self.device) - i[:, None]
            logits += alibi_bias(row.num_qo_heads, distance).unflatten(1, (row.num_kv_heads, -1))
        if row.logits_soft_cap:
            logits = row.logits_soft_cap * torch.tanh(logits / row.logits_soft_cap)
        if row.causal:
            key, last = torch.arange(m, device=self.device), (i + m - n)[:, None]
            masked = key > last
            if row.window_left >= 0:
                masked |= key < last - row.window_left
            logits.masked_fill_(masked[:, None, None], -torch.inf)
        visible = self.visible[b]
        if visible is not None:
            logits.masked_fill_(~visible[i][:, None, None], -torch.inf)
        return torch.einsum("nhgm,mhd->nhgd", logits.softmax(-1), v).flatten(1, 2)


class MlaProblem:
    """Copies of paged latent caches, ``ckv[i]`` and ``kpe[i]``, with one query row per request."""

    def __init__(self, row: MlaRow, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        self.row, self.dtype, self.device = row, dtype, device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.table = PageTable(row.kv_lens, row.page_size, generator, device)
        self.copies = copies_for(row.kv_bytes())
        pages = (self.table.num_pages, row.page_size)
        self.kv_dtype = torch.float8_e4m3fn if row.fp8 else dtype
        self.ckv = [random(*pages, 512).to(self.kv_dtype) for _ in range(self.copies)]
        self.kpe = [random(*pages, 64).to(self.kv_dtype) for _ in range(self.copies)]
        self.q_nope, self.q_pe = random(row.batch, row.num_heads, 512), random(row.batch, row.num_heads, 64)
        self.qo_indptr = indptr((1,) * row.batch, device)

    def planner(self) -> attn_ops.PrefillPlanner:
        """A planner of exactly this batch, with its plan made."""
        row = self.row
        planner = attn_ops.PrefillPlanner(
            row.batch,
            row.batch,
            self.table.num_pages,
            page_size=row.page_size,
            num_qo_heads=row.num_heads,
            num_kv_heads=1,
            head_dim=576,
            head_dim_vo=512,
            device=self.device,
        )
        planner.plan(self.qo_indptr, *self.table.arguments)
        return planner

    def error(self, out: Tensor, copy: int = 0) -> float:
        """Largest relative error in norm of the first and the last request, compared with float32."""
        return largest_error((out[b], self._expected(b, copy)) for b in {0, self.row.batch - 1})

    def _expected(self, b: int, copy: int) -> Tensor:
        ckv, kpe = (self.table.tokens(c[copy], b, self.row.kv_lens[b]).float() for c in (self.ckv, self.kpe))
        q = torch.cat((self.q_nope[b], self.q_pe[b]), -1).float()
        return (q @ torch.cat((ckv, kpe), -1).T * 192**-0.5).softmax(-1) @ ckv
