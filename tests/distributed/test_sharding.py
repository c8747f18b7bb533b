"""Tensor parallelism: the ops on DTensors and on one rank's heads, on several processes, against the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.calls import schema
from helpers.rank_processes import run_ranks
from helpers.sharding_ranks import CASES, DEVICE_INDEPENDENT

from attn_ops.distributed.sharding_table import SHARDED_DIMS
from attn_ops.ops.schemas import SCHEMAS

RUNS = [
    pytest.param(("cpu", 2), id="cpu"),
    pytest.param(("cuda", 2), id="2 GPUs", marks=pytest.mark.gpu),
    pytest.param(("cuda", 4), id="4 GPUs", marks=pytest.mark.gpu),
]
Failures = dict[str, dict[str, str]]


@pytest.fixture(scope="module", params=RUNS)
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    """By case and rank, the traceback of a failure. The processes run all cases once."""
    device, world = request.param
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    folder: Path = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANKS_ON", device)
        results = run_ranks("helpers.sharding_ranks", world, folder)
    assert all(len(ranks) == world for ranks in results.values())
    return results


@pytest.mark.parametrize("case", CASES)
def test_ranks(case: str, failures: Failures) -> None:
    if case in DEVICE_INDEPENDENT and case not in failures:
        pytest.skip("the same on the CPU")
    failed = {rank: text for rank, text in failures[case].items() if text}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_table_names_arguments_of_the_schema(op: str) -> None:
    tensors = {a.name for a in schema(op).arguments if "Tensor" in str(a.type)}
    for axis in SHARDED_DIMS[op]:
        assert axis.dims.keys() <= tensors
        assert axis.dims.keys().isdisjoint({"plan", "workspace"})


def test_every_op_has_a_case() -> None:
    tested = {"batch_mla", "append_kv", *CASES}
    assert {op for op, axes in SHARDED_DIMS.items() if axes} <= tested
