"""Arguments of wrong Python types, and numbers that float32 cannot hold, raise typed errors in every public callable.

Each argument of each call of :mod:`helpers.argument_types` is replaced in turn. The values are fixed, so that a failure
is found again.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.argument_types import (
    ALL,
    WrongArgument,
    is_listed,
    scalar_arguments,
    whole_numbers,
    wrong_arguments,
)
from helpers.surfaces import SURFACES
from helpers.surfaces.base import Surface
from torch import Tensor
from torch.utils import _pytree as pytree

import attn_ops as flashinfer
from attn_ops import errors, exports
from attn_ops.policy import UNSUPPORTED
from attn_ops.typed import typed

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(autouse=True, scope="module")
def _hints_are_resolved_once() -> Iterator[None]:
    """Thousands of calls fail here; resolving the annotations for each of them takes as long as everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "get_type_hints", functools.cache(typing.get_type_hints))
        yield


def _is_accepted(wrong: WrongArgument) -> bool:
    """Values that do mean something, or that nothing reads."""
    name, value = wrong.name, wrong.value
    if is_listed(wrong.surface, wrong.stage, name):
        return True
    if isinstance(value, Tensor) and value.is_meta:
        return True  # what is computed from it is on meta too
    if value is None:
        return name not in ("q", "k", "v", "query", "num_qo_heads", "num_kv_heads")  # the default
    if "scale" in name:
        return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    if wrong.stage == "init" and isinstance(value, Tensor):
        return True  # buffers of CUDA-graph mode, which is off, and the workspace, which plan() checks
    if name.startswith("actual_seq_lens") or (wrong.surface.name, name) == ("xqa_mla", "v_cache"):
        return isinstance(value, Tensor)  # dimensions of size 1 are allowed
    if name == "x":
        return isinstance(value, Tensor) and value.dtype == torch.bool
    return name in ("is_causal", "token_pos_in_items_len")  # of several rows, and with prefix_len_ptr


def _is_type_mismatch(wrong: WrongArgument) -> bool:
    return not isinstance(wrong.value, Tensor | tuple)


def _check_message(wrong: WrongArgument, error: errors.AttnOpsError) -> None:
    message = str(error)
    if not isinstance(error, errors.UnsupportedError):
        what, *rest = message.split("; expected ")
        assert ": " in what, f"{wrong}: {message}"
        assert len(rest) == 1, f"{wrong}: {message}"
        assert "; " in rest[0], f"{wrong}: {message}"
    if type(error) is errors.ArgumentError and _is_type_mismatch(wrong) and " is missing; " not in message:
        assert wrong.name in message, f"{wrong}: {message}"


def _copies(surface: Surface) -> list[Tensor]:
    return [t.clone() for t in pytree.tree_leaves(surface.stages) if isinstance(t, Tensor)]


@pytest.mark.parametrize("surface", ALL, ids=lambda surface: surface.name)
def test_a_wrong_type_is_refused_and_nothing_is_written(surface: Surface) -> None:
    stages = {**surface.stages}
    surface.outcome()
    before = _copies(surface)
    raw, accepted = [], []
    for wrong in wrong_arguments(surface):
        try:
            wrong.call()
        except errors.AttnOpsError as error:
            _check_message(wrong, error)
        except Exception as error:
            raw.append(f"{wrong}: {error!r}")
        else:
            if not _is_accepted(wrong):
                accepted.append(str(wrong))
    assert not raw
    assert not accepted
    assert surface.stages == stages
    for a, b in zip(before, _copies(surface), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("surface", ALL, ids=lambda surface: surface.name)
def test_a_whole_number_must_be_an_integer(surface: Surface) -> None:
    """A float or a bool is refused, or has the value that changes nothing; NumPy's integers are taken."""
    for stage, name, value in whole_numbers(surface):
        if name in surface.stages[stage]:
            surface.outcome(stage, **{name: np.int64(value)})
        for wrong in (float(value), bool(value)):
            refused = _refusal(surface, stage, name, wrong)
            if refused is None:
                unread = name == "token_pos_in_items_len" and not value
                assert name in UNSUPPORTED or unread, f"{surface.name}.{stage}.{name}={wrong!r} is accepted"
            elif not isinstance(refused, errors.UnsupportedError):
                assert f"{name} is {wrong}, of type {type(wrong).__name__}; expected an integer" in str(refused)


def _refusal(surface: Surface, stage: str, name: str, value: Any) -> errors.AttnOpsError | None:
    try:
        surface.outcome(stage, **{name: value})
    except errors.AttnOpsError as error:
        return error
    return None


UNREAD_NUMBERS = {"o_scale", "rope_scale", "rope_theta"}
"""``o_scale`` is divided out by the caller; the shared-prefix wrappers apply no positional encoding."""


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_a_number_beyond_float32_is_refused_by_the_callers_name(surface: Surface) -> None:
    unnamed = []
    for wrong in scalar_arguments(surface, (math.nan, math.inf, -math.inf, 1e300, -1e39)):
        try:
            wrong.call()
        except errors.AttnOpsError as error:
            if wrong.name not in str(error) or not isinstance(error, ValueError):
                unnamed.append(f"{wrong}={wrong.value}: {error}")
        else:
            if wrong.name not in UNREAD_NUMBERS:
                unnamed.append(f"{wrong}={wrong.value} is accepted")
    assert not unnamed


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_an_integer_is_taken_for_a_float(surface: Surface) -> None:
    """Also one beyond 64 bits, which PyTorch's dispatcher does not convert."""
    refused = []
    for wrong in scalar_arguments(surface, (2**70,)):
        try:
            wrong.call()
        except errors.AttnOpsError as error:
            if wrong.name not in UNSUPPORTED and "is given and the output is float16" not in str(error):
                refused.append(f"{wrong}: {error}")
    assert not refused


@pytest.mark.parametrize("name", ["trtllm decode", "deepseek", "decode", "prefill", "mla"])
def test_sinks_on_the_host_are_logits(name: str) -> None:
    surface = next(s for s in SURFACES if s.name == name)
    stage = "call" if "call" in surface.stages else "run"
    argument = "attention_sinks" if name == "deepseek" else "sinks"
    for value in (math.nan, math.inf):
        with pytest.raises(errors.OptionError, match=f"{argument} has a NaN or an infinity"):
            surface.outcome(stage, **{argument: torch.tensor([0.0, value, 0.0, 0.0])})
    surface.outcome(stage, **{argument: torch.full((4,), -math.inf)})


def _caller(**changes: Any) -> Any:
    q, k = torch.zeros(4, 64), torch.zeros(9, 2, 64)
    return flashinfer.single_decode_with_kv_cache(**{"q": q, "k": k, "v": k, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": None}, errors.ArgumentError, "q is None; expected a tensor; pass q"),
        ({"q": [1.0]}, errors.ArgumentError, "q is of type list; expected a tensor; make a tensor of it with torch.te"),
        (
            {"k": np.zeros(3)},
            errors.ArgumentError,
            "k is of type numpy.ndarray; expected a tensor; make a tensor of",
        ),
        ({"v": "text"}, errors.ArgumentError, "v is 'text', of type str; expected a tensor; pass a tensor"),
        ({"sm_scale": "1"}, errors.ArgumentError, "sm_scale is '1', of type str; expected a number or None; pass a n"),
        ({"window_left": torch.zeros(2)}, errors.ArgumentError, "window_left is a tensor [2]; expected an integer"),
        ({"q": torch.zeros(4, 64, device="meta")}, errors.DeviceError, "k is on cpu; expected meta"),
    ],
)
def test_the_message_names_what_was_given_and_how_to_fix_it(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        _caller(**changes)
    assert message in str(raised.value)
    assert raised.value.__suppress_context__ or isinstance(raised.value.__context__, errors.AttnOpsError | None)


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument") as raised:
        _caller(nonsense=1)
    assert not isinstance(raised.value, errors.AttnOpsError)
    with pytest.raises(TypeError, match="positional argument"):
        flashinfer.packbits()


@typed
def _typed_call(fault: str, flag: bool = False, size: int = 1, x: Tensor | None = None) -> Any:
    """Fails for a reason of its own, at an integer beyond 64 bits, at a sparse tensor, or at a flag that is None."""
    if fault == "own":
        raise RuntimeError("something else")
    if fault == "size":
        return torch.empty(size, device="meta")
    if fault == "tensor":
        return x.as_strided((1,), (1,))  # type: ignore[union-attr]
    return int(flag)


def test_a_flag_that_is_none_is_not_blamed_for_other_errors() -> None:
    with pytest.raises(RuntimeError, match="something else") as raised:
        _typed_call("own", flag=None)  # type: ignore[arg-type]
    assert not isinstance(raised.value, errors.AttnOpsError)
    with pytest.raises(errors.OptionError, match=f"^_typed_call: size is {2**70}; expected an integer of 64 bits"):
        _typed_call("size", flag=None, size=2**70)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match=r"^_typed_call: x is sparse_coo; expected a strided tensor"):
        _typed_call("tensor", flag=None, x=torch.eye(3).to_sparse())  # type: ignore[arg-type]


@typed
def _typed_lists(anything: Sequence[Any], one: Any, tensors: Sequence[Tensor] = ()) -> Any:
    """Fails for a reason of its own."""
    raise RuntimeError("something else")


def test_a_tensor_of_any_kind_is_not_blamed_where_any_is_taken() -> None:
    anything = torch.tensor(2.0), torch.ones(1, dtype=torch.complex64), torch.eye(3).to_sparse()
    for one in anything:
        with pytest.raises(RuntimeError, match="something else") as raised:
            _typed_lists(anything, one, [torch.ones(1)])
        assert not isinstance(raised.value, errors.AttnOpsError)
    with pytest.raises(errors.ShapeError, match=r"^_typed_lists: tensors\[1\] is a tensor without dimensions"):
        _typed_lists(anything, anything[0], [torch.ones(1), torch.ones(())])


def test_a_flag_that_is_none_is_named_where_nothing_takes_it() -> None:
    with pytest.raises(errors.ArgumentError, match=r"^_typed_call: flag is None; expected True or False; pass flag"):
        _typed_call("flag", flag=None)  # type: ignore[arg-type]


def test_a_nested_call_is_named_by_the_callers_argument() -> None:
    surface = next(s for s in SURFACES if s.name == "pod")
    with pytest.raises(errors.ArgumentError, match=r"^PODWithPagedKVCacheWrapper.run: q_p is None; expected a tensor"):
        surface.outcome("run", q_p=None)


def test_partial_plans_keep_the_signature() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 16))
    plan = functools.partial(flashinfer.fast_decode_plan, wrapper)
    assert "indptr" in inspect.signature(plan).parameters
    with pytest.raises(errors.ArgumentError, match="indptr is of type list"):
        plan([0], torch.zeros(1), torch.zeros(1), 4, 2, 64, 16)


def test_every_public_callable_has_a_valid_call() -> None:
    assert {surface.make.__name__ for surface in ALL} >= set(exports.HOMES) - {
        "single_prefill_with_kv_cache_return_lse"  # its arguments are those of single_prefill_with_kv_cache
    }
