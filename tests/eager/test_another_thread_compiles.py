"""Eager calls while another thread compiles: PyTorch's flag of compilation is of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.oracle import Expected
from torch import Tensor

import attn_ops
from attn_ops.errors import ArgumentError, PageTableError
from attn_ops.flash_attn import flash_attn_func


@pytest.fixture(autouse=True)
def another_thread_compiles() -> Iterator[None]:
    """Compilation in another thread begins before the test and ends after it."""
    begun, end = threading.Event(), threading.Event()

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        begun.set()
        assert end.wait(60)
        return module

    thread = threading.Thread(target=torch.compile(lambda x: x + 1, backend=backend), args=(torch.zeros(3),))
    thread.start()
    assert begun.wait(60)
    yield
    end.set()
    thread.join()


def _indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_wrapper_plans() -> None:
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    wrapper.plan(_indices(0, 1), _indices(2), _indices(3), 4, 2, 32, 4, q_data_type=torch.float32)
    q, cache = torch.randn(1, 4, 32), torch.full((3, 2, 4, 2, 32), torch.nan)
    cache[2, :, :3] = torch.randn(2, 3, 2, 32)
    Expected.of([(q, *cache[2, :, :3])]).check(wrapper.run(q, cache))


def test_contents_of_page_tables_are_checked() -> None:
    planner = attn_ops.DecodePlanner(4, 8, page_size=4, num_qo_heads=4, num_kv_heads=2, head_dim=32)
    with pytest.raises(PageTableError, match=r"kv_last_page_len\[0\] is 9"):
        planner.plan(_indices(0, 1), _indices(0), _indices(9))


def test_values_in_memory_of_their_own_are_not_columns_of_the_keys() -> None:
    """Only addresses tell: they have the strides of the keys."""
    q, keys, values = torch.randn(1, 4, 80), torch.randn(3, 4, 80), torch.randn(3, 4, 80)[..., :64]
    out = attn_ops.xqa_mla(q, keys, values, _indices(0, 2)[None], _indices(7), q_scale=0.1)
    k, v = (t[[0, 2]].flatten(0, 1)[:7, None] for t in (keys, values))
    Expected.of([(q, k, v)], sm_scale=0.1).check(out)


def test_an_error_names_the_argument() -> None:
    with pytest.raises(ArgumentError, match="flash_attn_func: k is None; expected a tensor; pass k"):
        flash_attn_func(torch.zeros(1, 3, 4, 32), None, None)
