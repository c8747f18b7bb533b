"""Reading the keys and values of a kernel call from the caches: as views, or gathered."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from attn_ops.eager.captured_call import View
from attn_ops.kernels.cpu.schedule import KernelCall, Pages
from attn_ops.kernels.reference.cache_views import bits

MIN_KEPT_BYTES, MAX_KEPT_BYTES = 1 << 17, 1 << 24
"""Bounds on the bytes that a thread keeps for gathered keys, and for gathered values."""

Take = Callable[[Tensor], Tensor]


class Gathered(threading.local):
    """Memory of a thread for the keys and values that a kernel call gathers. The next kernel call overwrites it.

    Memory of that size that is allocated anew consists of new pages of the operating system, in every call.
    """

    def __init__(self) -> None:
        self.kept = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def index_select(self, cache: Tensor, numbers: Tensor, place: int) -> Tensor:
        """``cache.index_select(0, numbers)`` in the memory of the keys, ``place`` 0, or of the values, 1."""
        shape, dtype = (numbers.shape[0], *cache.shape[1:]), cache.dtype
        size = math.prod(shape) * dtype.itemsize
        if not MIN_KEPT_BYTES <= size <= MAX_KEPT_BYTES:
            return cache.index_select(0, numbers)
        if self.kept[place].shape[0] < size:
            with torch.inference_mode(False):  # calls outside of inference mode use it too
                self.kept[place] = torch.empty(size, dtype=torch.uint8, device="cpu")
        out = self.kept[place][:size].view(dtype).view(shape)
        return torch.index_select(cache, 0, numbers, out=out)


GATHERED = Gathered()


class Reader:
    """Reads the keys or values of kernel calls from caches of the form of ``cache``.

    cache     a cache of keys or of values
    base      the tensor that the cache is a view of
    as_pages  views such a base as ``[pages, page_size, num_kv_heads, dim]``
    place     0 for keys, 1 for values
    """

    def __init__(self, cache: Tensor, base: Tensor, as_pages: Callable[[Tensor], Tensor], place: int) -> None:
        pages = View.of(as_pages(cache), base)
        self.take_pages, self.ahead, self.place = pages.taker(), pages.ahead, place
        self.num_pages, self.page_size, self.heads, self.dim = pages.size
        self.page, token, self.head, self.element = pages.strides
        self.token = self.page if self.page_size == 1 else token
        self.is_row = self.page == self.page_size * self.token

    def __call__(self, call: KernelCall) -> Take:
        """A function of a base that returns ``[requests, num_kv_heads, L, dim]``: a view if pages are in a row."""
        requests, pages, number, skipped = call.requests, call.pages, call.end - call.begin, call.begin % self.page_size
        if pages.first is not None and (self.is_row or pages.per_request == 1):
            ahead = self.ahead + pages.first * self.page + skipped * self.token
            strides = pages.stride * self.page, self.head, self.token, self.element
            return View((requests, self.heads, number, self.dim), strides, ahead).taker()
        return functools.partial(self._gather, requests, pages, slice(skipped, skipped + number))

    def _gather(self, requests: int, pages: Pages, tokens: slice, base: Tensor) -> Tensor:
        cache, (count, numbers, first, stride) = self.take_pages(base), pages
        if count == 1:  # of a single page only the tokens in use are copied
            cache, tokens = cache[:, tokens], slice(None)
        if first is not None and stride == count:
            taken = bits(cache[first : first + requests * count])
        else:
            assert numbers is not None
            taken = GATHERED.index_select(bits(cache), numbers, self.place)
        taken = taken.reshape(requests, count * cache.shape[1], self.heads, self.dim)
        taken = taken if taken.dtype == cache.dtype else taken.view(cache.dtype)
        return taken[:, tokens].transpose(1, 2)
