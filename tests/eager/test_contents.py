"""Keys of the contents of tensors: of the extension module and without it."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import fake_driver as f
from torch import Tensor

from attn_ops.eager import contents as module
from attn_ops.eager.contents import contents


@pytest.fixture(params=[pytest.param(True, marks=f.needs_the_module), False], ids=["native", "python"], autouse=True)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(module, "_NATIVE", None)
    return bool(request.param)


def table(indptr: tuple[int, ...], indices: tuple[int, ...], lengths: tuple[int, ...] = (7, 9)) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (indptr, lengths, indices))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_equal_numbers_have_equal_keys(dtype: torch.dtype) -> None:
    numbers = torch.randint(100, (3, 4)).to(dtype)
    given = numbers, numbers[0].clone(), numbers[:0]
    assert contents(given) == contents(tuple(t.clone() for t in given))
    for i, place in itertools.product((0, 1), (0, -1)):
        other = [t.clone() for t in given]
        other[i].view(-1)[place] += 1
        assert contents(given) != contents(tuple(other))


def test_the_layout_of_a_tensor_does_not_matter() -> None:
    """Tensors whose memory is equal and whose numbers are not differ."""
    numbers = torch.arange(6, dtype=torch.int32).view(2, 3)
    transposed = numbers.reshape(3, 2).t()
    assert contents((transposed,)) != contents((numbers,))
    assert contents((transposed,)) == contents((transposed.clone(),))
    assert contents((numbers[:, :2],)) != contents((numbers[:, 1:],))
    assert contents((numbers[1:],)) != contents((numbers[:1],))


def test_numbers_past_the_limit_have_no_key() -> None:
    given = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    assert contents(given, 28) is not None
    assert contents(given, 27) is None


def test_pages_that_a_table_does_not_use_are_left_out() -> None:
    def key(indptr: tuple[int, ...], indices: tuple[int, ...], most: int = 1000) -> object:
        return contents(table(indptr, indices), most, True)

    assert key((0, 1, 3), (4, 5, 6, 7)) == key((0, 1, 3), (4, 5, 6, 8)) == key((0, 1, 3), (4, 5, 6))
    assert key((0, 1, 3), (4, 5, 6, 7)) != key((0, 1, 3), (4, 5, 7, 7))
    assert key((0, 1, 3), (4, 5, 6, 7)) != key((0, 2, 3), (4, 5, 6, 7))
    for last in (0, -1, 9):  # such a table uses all of them
        assert key((0, 1, last), (4, 5, 6, 7)) != key((0, 1, last), (4, 5, 6, 8))
    assert key((0, 1, 3), (0,) * 100, 32) is not None
    assert key((0, 1, 3), (0,) * 100, 31) is None
    assert key((), ()) == key((), ())
