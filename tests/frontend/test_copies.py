"""Copies of wrappers: a plan of their own, and with ``copy.copy`` the caller's workspace."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from helpers.surfaces import SURFACES
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops.errors import UnsupportedError
from attn_ops.frontend.base import Wrapper

PLANNED = [surface for surface in SURFACES if len(surface.stages) > 2]
"""Those of a wrapper that plans: init, plan, run, by any name."""
DUPLICATES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda w: pickle.loads(pickle.dumps(w))}


def _wrappers(owner: Any) -> list[Wrapper]:
    """``owner`` and the wrappers among its attributes."""
    inner = [y for x in vars(owner).values() for y in (x if isinstance(x, list) else [x]) if isinstance(y, Wrapper)]
    return inner + [owner] * isinstance(owner, Wrapper)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("surface", PLANNED, ids=lambda surface: surface.name)
def test_a_copy_has_a_plan_of_its_own(surface: Any) -> None:
    wrapper = surface.make(**surface.stages["init"])
    _, *planning, run = surface.stages
    for stage in planning:
        surface.function(stage)(wrapper, **surface.stages[stage])

    def results(of: Any) -> list[torch.Tensor]:
        return [t.clone() for t in _tensors(surface.function(run)(of, **surface.stages[run]))]

    expected, other = results(wrapper), copy.copy(wrapper)
    assert all(map(torch.equal, results(other), expected))
    for of_copy, of_wrapper in zip(_wrappers(other), _wrappers(wrapper), strict=True):
        assert of_copy._workspace is of_wrapper._workspace
        for t in of_copy._constants():
            if of_wrapper._planned is None or t is not of_wrapper._planned.workspace:
                t.zero_()
    assert all(map(torch.equal, results(wrapper), expected))


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_a_copy_that_plans_leaves_the_other_plan(duplicate: str) -> None:
    r, other = Requests((37, 5, 130)), Requests((2, 60, 9), seed=1)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*r.table, *r.sizes)
    copied = DUPLICATES[duplicate](wrapper)
    r.expected().check(copied.run(r.q, r.cache()))
    copied.plan(*other.table, *other.sizes)
    r.expected().check(wrapper.run(r.q, r.cache()))
    other.expected().check(copied.run(other.q, other.cache()))


def test_a_copy_of_a_wrapper_without_a_plan() -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    copied = copy.copy(wrapper)
    copied.plan(*r.table, *r.sizes)
    assert wrapper._planned is None
    r.expected().check(copied.run(r.q, r.cache()))


def test_a_copy_keeps_attributes_of_subclasses() -> None:
    class Named(flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        layers: list[int]

    wrapper = Named(workspace())
    wrapper.layers = [1, 2]
    copied = copy.copy(wrapper)
    assert type(copied) is Named
    assert copied.layers is wrapper.layers


def test_no_copy_in_cuda_graph_mode() -> None:
    indptr, last = (torch.empty(n, dtype=torch.int32, device=DEVICE) for n in (5, 4))
    indices = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), indptr, indices, last)
    with pytest.raises(UnsupportedError, match=r"CUDA-graph mode is not supported; .* buffers of its own"):
        copy.copy(wrapper)


def test_a_planned_wrapper_is_saved_by_torch() -> None:
    r, other = Requests((37, 5, 130)), Requests((2, 60, 9), seed=1)
    wrapper, file = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()), io.BytesIO()
    wrapper.plan(*r.table, *r.sizes)
    torch.save(wrapper, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    r.expected().check(loaded.run(r.q, r.cache()))
    loaded.plan(*other.table, *other.sizes)
    other.expected().check(loaded.run(other.q, other.cache()))
    r.expected().check(wrapper.run(r.q, r.cache()))


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_a_copy_of_a_planner_has_a_plan_of_its_own(duplicate: str) -> None:
    r, other = Requests((37, 5, 130)), Requests((2, 60, 9), seed=1)
    heads, kv_heads, dim, page_size = r.sizes
    sizes: dict[str, Any] = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": page_size}
    planner = flashinfer.DecodePlanner(3, 40, device=DEVICE, **sizes)
    kept = [t.clone() for t in planner.plan(*r.table)]
    copied = DUPLICATES[duplicate](planner)
    assert all(map(torch.equal, copied.state, kept))
    copied.plan(*other.table)
    assert all(map(torch.equal, planner.state, kept))
    assert not torch.equal(copied.state.kv_len, planner.state.kv_len)
    assert copied.workspace is not planner.workspace


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_a_copy_of_a_sparse_planner_has_a_plan_of_its_own(duplicate: str) -> None:
    sizes: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": DEVICE}
    planner = flashinfer.BlockSparsePlanner(32, 64, 16, 16, max_blocks=6, **sizes)
    indptr, indices = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((0, 2, 3), (0, 3, 1)))
    kept = [t.clone() for t in planner.plan(indptr, indices)]
    copied = DUPLICATES[duplicate](planner)
    copied.plan(indptr, indices.flip(0))
    assert all(map(torch.equal, planner.state, kept))
    assert not all(map(torch.equal, copied.state, kept))
