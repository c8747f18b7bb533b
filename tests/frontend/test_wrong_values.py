"""Random wrong values in every public callable: a call succeeds or raises a typed error, and then nothing is written.

One or two arguments of a valid call of :mod:`helpers.surfaces` are replaced: by tensors of other ranks, dtypes, sizes
and devices, by numbers that are negative, huge or not finite, and by empty lists. Values are drawn from fixed seeds.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.argument_types import ALL, _kinds, parameters
from helpers.surfaces.base import Surface
from helpers.wrapper_requests import DEVICE, int32, workspace
from torch import Tensor
from torch.utils import _pytree as pytree

import attn_ops as flashinfer
from attn_ops import errors, exports
from attn_ops.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

pytestmark = pytest.mark.usefixtures("no_grad")

DRAWS = int(os.environ.get("ATTN_OPS_FUZZ_SEEDS", "100"))
"""Wrong calls of each surface."""

NUMBERS = (-1, 0, 1, 3, -(2**31), 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**70)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, -1.0, 1e300, 1e-300, 5e-324)
DTYPES = (
    torch.float16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint32,
)  # fmt: skip
ALLOCATED = ("nnz", "max_batch", "max_tokens", "max_pages", "num_ctas", "max_kv_len")
"""Sizes of what a call allocates: a huge one that memory has room for is right."""

STRINGS = ("", "nonsense", "nhd", "NONE", "HND", "e4m3", "\0")


def _tensor(d: random.Random, base: Any) -> Any:
    t = base if isinstance(base, Tensor) else torch.zeros(3)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: torch.tensor(d.choice((0, 1, -5))),
        lambda: t.to(d.choice(DTYPES)),
        lambda: t.to("meta"),
        lambda: t[None],
        lambda: t.flatten(),
        lambda: t[:0],
        lambda: t.new_zeros([0] * t.dim()),
        lambda: t[:-1] if t.dim() and len(t) else t,
        lambda: torch.cat((t, t)) if t.dim() else t,
        lambda: t.transpose(0, -1) if t.dim() else t,
        lambda: t[..., None].expand(*t.shape, 2)[..., 0],
        lambda: t[..., :1].expand(*t.shape) if t.dim() else t,
        lambda: t.new_zeros(0),
        lambda: torch.full_like(t, d.choice((-1, 2**31 - 1, -(2**31)))) if t.dtype == torch.int32 else t,
        lambda: torch.full_like(t, math.nan) if t.is_floating_point() and t.dtype.itemsize > 1 else t,
        lambda: t.to_sparse() if t.dim() and t.dtype == torch.float32 else t,
        lambda: None,
    )
    return d.choice(changes)()


def _value(d: random.Random, annotation: Any, base: Any) -> Any:
    kinds = _kinds(annotation)
    if isinstance(base, tuple | list):
        return d.choice(([], (), [*base][:1], [*base, *base], [_tensor(d, base[0]), *base[1:]], [None] * len(base)))
    if Tensor in kinds and (float not in kinds or d.random() < 0.5):
        return _tensor(d, base)
    if float in kinds:
        return d.choice((*FLOATS, *NUMBERS))
    if bool in kinds and int not in kinds:
        return d.choice((True, False, 2, None))
    if int in kinds:
        return d.choice(NUMBERS)
    return d.choice((*STRINGS, *DTYPES, None))


def _describe(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype} {value.device}" if isinstance(value, Tensor) else repr(value)


@pytest.mark.parametrize("surface", ALL, ids=lambda surface: surface.name)
def test_a_wrong_value_is_accepted_or_refused_with_a_typed_error(surface: Surface) -> None:
    d, raw = random.Random(surface.name), []
    stages: dict[str, list[tuple[str, Any]]] = {}
    for stage, name, kind in parameters(surface):
        if not any(word in name for word in ("workspace", "semaphores", "args", "self")):
            stages.setdefault(stage, []).append((name, kind))
    tensors = [t for t in pytree.tree_leaves(surface.stages) if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    for _ in range(DRAWS):
        stage = d.choice([*stages])
        chosen = d.sample(stages[stage], k=min(len(stages[stage]), d.choice((1, 1, 1, 2))))
        changes = {name: _value(d, kind, surface.stages[stage].get(name)) for name, kind in chosen}
        if any(changes.get(name) in (2**31 - 1, 2**31) for name in ALLOCATED):
            continue
        try:
            surface.outcome(stage, **changes)
        except errors.AttnOpsError:
            for t, old in zip(tensors, before, strict=True):
                if stage == [*surface.stages][-1]:  # stages before it may write buffers of CUDA-graph mode
                    torch.testing.assert_close(t, old, rtol=0, atol=0, equal_nan=True)
        except Exception as error:
            shown = ", ".join(f"{name}={_describe(value)}" for name, value in changes.items())
            raw.append(f"{surface.name}.{stage} {shown}: {error!r}"[:400])
        for t, old in zip(tensors, before, strict=True):  # what a call that is accepted has appended or merged
            t.copy_(old)
    assert not raw, "\n".join(raw)


def test_values_of_the_right_type_that_nothing_takes() -> None:
    v, s = torch.zeros(3, 4, 64), torch.zeros(3, 4)
    with pytest.raises(errors.ArgumentError, match="merge_state: v_b is sparse_coo; expected a strided tensor"):
        flashinfer.merge_state(v, s, v.to_sparse(), s)
    prefill = next(surface for surface in ALL if surface.name == "prefill")
    with pytest.raises(errors.DTypeError, match="q_scale is complex64; expected a tensor of real numbers"):
        prefill.outcome("run", q_scale=torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(errors.DeviceError, match="BatchAttention: device is 'e4m3'; expected a device of PyTorch"):
        flashinfer.BatchAttention(device="e4m3")
    sizes = {"page_size": 4, "num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(errors.DeviceError, match="DecodePlanner: device is 'True'; expected a device of PyTorch"):
        flashinfer.DecodePlanner(1, 1, device=True, **sizes)
    with pytest.raises(errors.DeviceError, match="DecodePlanner: device is 'cuda:99', which is not available: "):
        flashinfer.DecodePlanner(1, 1, device=torch.device("cuda", 99), **sizes)
    with pytest.raises(errors.DeviceError, match="get_scheduler_metadata: device is 'cuda:99', which is not available"):
        get_scheduler_metadata(1, 1, 8, 1, 1, 8, 3, device="cuda:99")
    if not torch.cuda.is_available():
        with pytest.raises(errors.DeviceError, match="BatchAttention: device is 'cuda', which is not available: "):
            flashinfer.BatchAttention()
    attention = next(surface for surface in ALL if surface.name == "attention")
    with pytest.raises(errors.ArgumentError, match="causal is None; expected True or False"):
        attention.outcome("plan", causal=None)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(layout: torch.layout) -> None:
    """Its sizes raise PyTorch's internal error."""
    wrapper, parts = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()), (torch.zeros(2, 4, 64),) * 2
    nested = torch.nested.nested_tensor(list(parts), layout=layout, device=DEVICE)
    one, cache = torch.zeros(2, 4, 64, device=DEVICE), torch.zeros(2, 2, 16, 4, 64, device=DEVICE)
    table = int32(0, 1, 2), int32(0, 1), int32(3, 4)
    wrapper.plan(*table, 4, 4, 64, 16, q_data_type=torch.float32)
    calls: dict[str, Any] = {
        "q": lambda: wrapper.run(nested, cache),
        "paged_kv_cache[1]": lambda: wrapper.run(one, (cache[:, 0], nested)),
        "out": lambda: wrapper.run(one, cache, out=nested),
        "indptr": lambda: wrapper.plan(nested, *table[1:], 4, 4, 64, 16),
        "k": lambda: flashinfer.single_prefill_with_kv_cache(one, nested, one),
        "cache_seqlens": lambda: flash_attn_with_kvcache(one[:, None], *cache.unbind(1), cache_seqlens=nested),
        "v_a": lambda: flashinfer.merge_state(nested, one[..., 0], one, one[..., 0]),
    }
    for name, call in calls.items():
        with pytest.raises(errors.ArgumentError) as raised:
            call()
        fix = f"pass torch.cat({name}.unbind()), or {name}.to_padded_tensor(0)"
        assert f": {name} is a nested tensor; expected a strided tensor; {fix}" in str(raised.value)
    with pytest.raises(errors.ArgumentError, match="causal is a nested tensor; expected True or False"):
        flashinfer.single_prefill_with_kv_cache(one, one, one, causal=nested)


PASSED_ON = {
    "end_forward", "prewarm_paged_kv_stride_variant", "dtypes_follow_query",  # without arguments that are read
    "prepare_plan", "workspace_size",  # plan()'s arguments
    "forward_return_lse", "run_return_lse",  # forward()'s and run()'s arguments
    "reset_workspace_buffer",  # the constructor's
}  # fmt: skip
"""Methods whose arguments are those of another method that has a surface."""


def _covered() -> set[Any]:
    found = set()
    for surface in ALL:
        for stage in surface.stages:
            function = surface.function(stage)
            found.add(inspect.unwrap(function.__init__ if inspect.isclass(function) else function))
    return found


def _public_callables() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*exports.HOMES, "DecodePlanner", "PrefillPlanner"):
        value = getattr(flashinfer, name)
        if inspect.isclass(value):
            methods = {m: f for m, f in inspect.getmembers(value, callable) if not m.startswith("_") or m == "__init__"}
            found |= {f"{name}.{m}": f for m, f in methods.items()}
        else:
            found[name] = value
    return found


def test_every_public_callable_is_covered() -> None:
    covered = _covered()
    missing = {
        name
        for name, function in _public_callables().items()
        if inspect.unwrap(function) not in covered and name.rpartition(".")[2] not in PASSED_ON
    }
    assert missing == {
        "single_prefill_with_kv_cache_return_lse",  # passes its arguments on
        "BatchAttention.forward",  # run() of the pair (k, v)
        "BatchMLAPagedAttentionWrapper.forward",  # run() with a page table
    }


def test_methods_that_pass_arguments_on_exist() -> None:
    assert {name.rpartition(".")[2] for name in _public_callables()} >= PASSED_ON
