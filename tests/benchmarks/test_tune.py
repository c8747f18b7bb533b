"""Tables of tuned tiles: written by the command, read instead of the defaults, and part of Inductor's cache key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_ops import errors
from attn_ops.ops import inductor, tuning_table
from benchmarks import tune

pytest.importorskip("triton")

from attn_ops.kernels.triton import config_tuned
from attn_ops.kernels.triton.config_decode import DecodeTile
from attn_ops.kernels.triton.launch import Options

GPU = torch.device("cuda", 0)
PROBLEM = (torch.bfloat16, torch.bfloat16, 128, 128, 4, 16)
KEY = "bfloat16 bfloat16 128 128 4 16"
DEFAULT = DecodeTile(64, 4, 128, 128, Options(num_warps=4, num_stages=3))
ENTRY = {"kv": 128, "num_warps": 8, "num_stages": 2}


@pytest.fixture(autouse=True)
def some_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    _forget()
    yield
    _forget()


def _forget() -> None:
    for cached in (config_tuned._entry, config_tuned.table, inductor.sources_tag):
        cached.cache_clear()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(tuning_table.VARIABLE, str(path))
    return path


def _tile(*problem: Any) -> Any:
    return config_tuned.tuned(DEFAULT, "decode", GPU, *problem)


def test_a_table_takes_the_place_of_the_default_for_its_problem_and_gpu(table: Path) -> None:
    tune.store(table, "Some GPU", "decode", KEY, ENTRY)
    tune.store(table, "Another GPU", "decode", KEY.replace("4", "8"), ENTRY)
    tile = _tile(*PROBLEM)
    assert (tile.kv, tile.options.num_warps, tile.options.num_stages) == (128, 8, 2)
    assert tile.heads == DEFAULT.heads
    assert _tile(*PROBLEM[:-1], 64) == DEFAULT
    assert _tile(*PROBLEM[:4], 8, 16) == DEFAULT


def test_without_a_table_the_default_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning_table.VARIABLE, raising=False)
    assert _tile(*PROBLEM) == DEFAULT


def test_a_table_that_is_not_there_is_refused_by_name(table: Path) -> None:
    with pytest.raises(errors.OptionError, match=rf"tiles: {table} is not a table .* expected what .* ATTN_OPS_TILES"):
        _tile(*PROBLEM)


def test_an_entry_goes_when_the_default_wins_and_others_stay(table: Path) -> None:
    for kernel, key in (("decode", KEY), ("decode", "other"), ("prefill", KEY)):
        tune.store(table, "Some GPU", kernel, key, ENTRY)
    tune.store(table, "Some GPU", "decode", KEY, None)
    assert json.loads(table.read_text()) == {"Some GPU": {"decode": {"other": ENTRY}, "prefill": {KEY: ENTRY}}}


@pytest.mark.parametrize("text", ["[]", "{", '{"Some GPU": {"decode": {"x": {"kv": 64}}}}'])
def test_a_file_that_is_no_table_is_refused_by_name(table: Path, text: str) -> None:
    table.write_text(text)
    with pytest.raises(errors.OptionError, match=rf"tiles: {table} is not a table .* expected what .* ATTN_OPS_TILES"):
        _tile(*PROBLEM)


def test_inductor_does_not_reuse_what_was_compiled_for_other_tiles(table: Path) -> None:
    tags = []
    for entry in (None, ENTRY, {**ENTRY, "kv": 64}):
        tune.store(table, "Some GPU", "decode", KEY, entry)
        inductor.sources_tag.cache_clear()
        tags.append(inductor.sources_tag())
    assert len(set(tags)) == 3


def test_a_trial_holds_for_its_kernel_and_its_block(table: Path) -> None:
    table.write_text("{}")
    with config_tuned.override_tile("decode", {"kv": 32, "num_warps": 4, "num_stages": 2}):
        assert _tile(*PROBLEM).kv == 32
        assert config_tuned.tuned(DEFAULT, "prefill", GPU, *PROBLEM) == DEFAULT
    assert _tile(*PROBLEM) == DEFAULT


def test_the_tile_that_is_best_over_all_rows_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows: one candidate is best in one, another in both together, and one does not run the second."""
    times = {(32, 4, 2): (0.5, 1.9), (64, 4, 2): (0.9, 0.9), (128, 4, 2): (0.1, None)}

    def clock(case: tune.Case, entry: dict[str, int] | None) -> float | None:
        if entry is None:
            return 10.0
        share = times.get(tuple(entry.values()), (1.5, 1.5))[case.problem]
        return None if share is None else 10 * share

    monkeypatch.setattr(tune, "microseconds", clock)
    cases = [tune.Case("decode", KEY, "row", i, lambda problem: lambda copy: None, 1.0) for i in range(2)]
    tried: list[None] = []
    entry, share = tune.best_entry(cases, lambda: tried.append(None))
    assert entry == {"kv": 64, "num_warps": 4, "num_stages": 2}
    assert share == pytest.approx(0.9)
    assert len(tried) == len(tune.candidates("decode", KEY))


def test_the_triton_kernels_are_tuned_where_others_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Problem(SimpleNamespace):
        def __init__(self, row: Any) -> None:
            super().__init__(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, q=torch.zeros(1))

        def planner(self, paged: bool) -> Any:
            return SimpleNamespace(problem=SimpleNamespace(tile_rows=32))

    def prepare(problem: Any, **options: Any) -> Any:
        calls.append(options)

    for name in ("DecodeProblem", "PrefillProblem"):
        monkeypatch.setattr(tune, name, Problem)
    monkeypatch.setattr(tune, "general_ctas_per_head", lambda device, num_kv_heads: 2 * num_kv_heads)
    monkeypatch.setattr(tune.decode, "ours", prepare)
    args = SimpleNamespace(heads=(32, 8), head_dim=128, page_size=16, fp8=False)
    for case in tune.decode_cases(args):
        case.prepare(case.problem)
    assert calls == [{"backend": "triton", "num_ctas": 16}] * 3
    assert {case.prepare.keywords["backend"] for case in tune.prefill_cases(args)} == {"triton"}


def test_prefill_tiles_have_no_more_rows_than_the_plans() -> None:
    rows = {entry["rows"] for entry in tune.candidates("prefill", f"{KEY} 128")}
    assert rows == {64, 128}
