"""Faults that are planted in the MLA kernels and noticed when these run on the host (``helpers/cuda_host``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers import mla_cases
from helpers.cuda_host import Fault, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, mla_op, swapped
from helpers.cuda_host.faults import COPIED, FEWER, TOKEN_FAULTS, Planted, host_with, noticed

from attn_ops.kernels.cuda import mla

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

STAGED = "fence_async_shared();\n  __syncwarp();"
BULK_STORE = """if (lane % 4 == 0 && exists[r])
      store_bulk(to.values + (row[r] * kLatent + first_column) / 2, staged + (lane / 4 + 8 * r) * kStagedRowBytes,
                 kStored * 2)"""
STORE = "store(SELF * kHalf + p.split * kStored, merge.memory, stored, rows.row_max, sums, p, arguments, unit)"
FENCE = "if (SPLITS > 1) fence_async_shared();  // before TMA loads the next query there"

MLA_FAULTS = {
    "the other CTA's consumers are not waited for": Planted(
        Fault("arrive_in_cluster(address_in(barrier, lane));", "arrive_in_cluster(address_in(barrier, 0));"),
        "race|more arrivals|deadlock",
    ),
    "P is stored over keys that are read": Planted(
        Fault(
            "named_sync(kBarrier, kConsumerThreads);\n    store_probabilities(own_stage + kRotary * kBlockBytes, "
            "probabilities);",
            "store_probabilities(own_stage + kRotary * kBlockBytes, probabilities);",
        ),
        r"race: (.|\n)*read by wgmma",
    ),
    "no proxy fence after P": Planted(
        Fault(
            "store_matrices(to + row * kRowBytes + ((2 * i + lane / 16) ^ (row & 7)) * 16, p[i]);\n  "
            "fence_async_shared();",
            "store_matrices(to + row * kRowBytes + ((2 * i + lane / 16) ^ (row & 7)) * 16, p[i]);",
        ),
        "no proxy fence",
    ),
    "a CTA ends before the others' arrivals": Planted(
        Fault("for (int half = 0; half < 2; ++half) wait(empty + ((tile & 1) * 2 + half) * 8, tile >> 1 & 1 ^ 1);", ""),
        "a CTA of the cluster may end before",
    ),
    "the plan is read before it is acquired": Planted(Fault("acquire_plan();", ""), "before the plan is acquired"),
    "mbarriers are used before they are initialised": Planted(
        Fault("cluster_wait_for_init();\n  wait_for_earlier_kernels();", "wait_for_earlier_kernels();"),
        "is no mbarrier",
    ),
    "no proxy fence before a bulk store": Planted(Fault(STAGED, "__syncwarp();"), "no proxy fence(.|\n)*bulk store"),
    "a bulk store does not wait for the other lanes": Planted(Fault(STAGED, "fence_async_shared();"), "bulk store"),
    "a query is loaded over what a bulk store reads": Planted(
        Fault("wait_for_bulk_reads();", ""), "race: (.|\n)*bulk store"
    ),
    "another lane waits for the bulk store": Planted(
        Fault("wait_for_bulk_reads();", "if (lane == 1) wait_for_bulk_reads();"), "race: (.|\n)*bulk store of thread"
    ),
    "a partial result is stored twice": Planted(
        Fault(f"{BULK_STORE};", f"{BULK_STORE}; {BULK_STORE};"), "race: (.|\n)* of partial(.|\n)*bulk store"
    ),
    "a query is loaded over a partial result": Planted(
        Fault(
            f"{STORE};\n      {FENCE}\n      if (reused) arrive_by_warp(q_empty);",
            f"if (reused) arrive_by_warp(q_empty);\n      {STORE};",
        ),
        "race",
    ),
}

MERGE_FAULTS = {
    "columns are sent before the partner has room": Planted(Fault("wait(ready, parity);", ""), "race"),
    "columns are read before they have come": Planted(
        Fault("wait(full, parity);", ""), "race|uninitialised|more arrivals"
    ),
    "a warp waits for its own readiness": Planted(
        Fault("arrive_in_cluster(address_in(ready, partner));", "arrive(ready);"), "race|more arrivals|deadlock"
    ),
    "no proxy fence before the next query": Planted(Fault(FENCE + "\n", ""), "no proxy fence"),
    "a query is loaded over what has come": Planted(
        Fault("if (!reused) arrive_by_warp(q_empty);", "arrive_by_warp(q_empty);"), "race|more arrivals|no proxy fence"
    ),
    "results are staged over columns that other lanes read": Planted(
        Fault("__syncwarp();  // all lanes have read the state of the other CTA\n", ""), "race"
    ),
}

SWAPPED_MERGE_FAULTS = {
    "results are staged over columns that other warps read": Planted(
        Fault("if (SPLITS > 1) sync();  // all warps have read the state of the other CTA\n", ""), "race"
    ),
    "columns are sent over results that bulk stores still read": Planted(Fault("wait_for_bulk_reads();", ""), "race"),
}

SWAPPED_FAULTS = {
    "maxima are read before all warps have stored them": Planted(
        Fault("sync();  // maxima are stored\n", ""), "race|uninitialised"
    ),
    "P is multiplied before all warps have stored it": Planted(
        Fault("sync();  // P is stored\n", ""), "race|uninitialised|no proxy fence"
    ),
    "no proxy fence after P": Planted(
        Fault("fence_async_shared();  // for P, and for the zeros of zero_values\n", ""), "no proxy fence"
    ),
    "a half is released before it is multiplied": Planted(Fault("wgmma_wait<1>();", ""), "race"),
    "no proxy fence before a bulk store": Planted(
        Fault("fence_async_shared();  // for bulk stores\n", ""), "no proxy fence"
    ),
    "columns are staged over those that a bulk store reads": Planted(Fault("wait_for_bulk_reads();", ""), "race"),
    "columns are staged before all are read": Planted(Fault("sync();  // columns are read\n", ""), "race"),
}

LATENT_CONVERTED = (
    "if (i == kQuarters - 1) conversion.convert_rotary();\n      fence_async_shared();\n      __syncwarp();"
)
HALF_EMPTY = "wait(shared_address(&shared.empty[stage][half]), number >> 1 & 1 ^ 1);"
OVER_P = "rotary columns are loaded over P, which lies elsewhere with swapped operands"

MLA_FP8_FAULTS = {
    "no proxy fence after conversions": Planted(
        Fault(LATENT_CONVERTED, LATENT_CONVERTED.replace("fence_async_shared();", "")), "no proxy fence"
    ),
    "lane 0 arrives for lanes that still convert": Planted(
        Fault(LATENT_CONVERTED, LATENT_CONVERTED.replace("__syncwarp();", "")), "race|no proxy fence"
    ),
    "chunks are overwritten before all lanes have read theirs": Planted(
        Fault("x[j] = load_shared(from(j));\n    __syncwarp();", "x[j] = load_shared(from(j));"), "race"
    ),
    "a quarter is converted before it has arrived": Planted(
        Fault("wait(shared_address(&shared.fp8_full[stage][i]), parity);", ""), "race|uninitialised"
    ),
    "a tile is loaded over one that is multiplied": Planted(
        Fault("wait(shared_address(&shared.empty[stage][1 - tile.first]), number >> 1 & 1 ^ 1);", ""),
        "race|more arrivals",
    ),
    OVER_P: Planted(
        Fault("if (last) wait(shared_address(&shared.empty[stage][tile.first]), number >> 1 & 1 ^ 1);", ""),
        "race|more arrivals",
    ),
    "a quarter is converted over one that is multiplied": Planted(
        Fault("if (i == 0) wait(shared_address(&shared.empty[stage][first]), parity ^ 1);", ""), "race|more arrivals"
    ),
    "the end is passed on while tiles are converted": Planted(
        Fault(f"for (int half = 0; half < 2; ++half) {HALF_EMPTY}", ""),
        "race|more arrivals",
    ),
    "the end is not passed on": Planted(Fault("arrive(shared_address(&shared.fp8_full[stage][0]));", ""), "deadlock"),
    "a converted quarter is not passed on": Planted(
        Fault("arrive(shared_address(&shared.full[stage][conversion.tile.quarter(i)]));", ";"), "deadlock"
    ),
    "the rotary columns are not waited for": Planted(
        Fault(
            "arrive_expect(barrier, kBlockBytes + (last ? kBlockBytes / 2 : 0));",
            "arrive_expect(barrier, kBlockBytes);",
        ),
        "lacks|race|more",
    ),
}

MLA_TOKEN_FAULTS = TOKEN_FAULTS | {
    "an arrival fewer": Planted(
        Fault(
            "init_barrier(shared_address(&barrier), KV_FP8 ? kConverterWarps : kTileArrivals);",
            "init_barrier(shared_address(&barrier), KV_FP8 ? kConverterWarps : kTileArrivals - 1);",
        ),
        FEWER,
    ),
    "an arrival fewer of FP8": Planted(
        Fault(
            "init_barrier(shared_address(&barrier), kTileArrivals);",
            "init_barrier(shared_address(&barrier), kTileArrivals - 1);",
        ),
        FEWER,
        case="FP8",
    ),
    "copies are not waited for": Planted(
        Fault(
            "arrive_after_chunks(shared_address(&shared.full[stage][2 * half]));",
            "arrive(shared_address(&shared.full[stage][2 * half]));",
        ),
        COPIED,
    ),
    "copies of FP8 are not waited for": Planted(
        Fault(
            "arrive_after_chunks(shared_address(&shared.fp8_full[stage][quarter + 1]));",
            "arrive(shared_address(&shared.fp8_full[stage][quarter + 1]));",
        ),
        COPIED,
        case="FP8",
    ),
    "no proxy fence": Planted(Fault("if (kFencesKv) fence_async_shared();", ""), "no proxy fence"),
    "no wait for a half": Planted(Fault(f"{HALF_EMPTY}\n    mark(kWaitEmpty);", ""), "race|more|deadlock"),
    "the rotary columns are copied over P": Planted(
        Fault("wait(shared_address(&shared.empty[stage][first]), parity);", ""), "race", case="FP8"
    ),
}


@pytest.mark.parametrize("name", ["", *MLA_FAULTS])
def test_faults_of_mla_are_noticed(name: str) -> None:
    (case,) = (one for one in mla_cases.CASES if str(one) == "512/64 decode")
    case = replace(case, qo_lens=(1, 1), kv_lens=(300, 70))
    with host_with(MLA_FAULTS, name).installed(), noticed(MLA_FAULTS, name):
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *MERGE_FAULTS])
def test_faults_of_merges_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"qo_lens": (1,) * 5, "kv_lens": (700, 70, 70, 130, 70), "planner": {"num_ctas": 4}}
    host, case = host_with(MERGE_FAULTS, name), swapped("faulty", 64, **sizes)
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    with host.installed(), noticed(MERGE_FAULTS, name):
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *SWAPPED_MERGE_FAULTS])
def test_faults_of_merges_with_swapped_operands_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clusters with several units, of which some are split."""
    sizes = {"qo_lens": (1,) * 5, "kv_lens": (700, 70, 70, 130, 70), "planner": {"num_ctas": 4}, "page_size": 3}
    host, case = host_with(SWAPPED_MERGE_FAULTS, name), swapped("faulty", 32, **sizes)
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    with host.installed(), noticed(SWAPPED_MERGE_FAULTS, name):
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *SWAPPED_FAULTS])
def test_faults_of_swapped_operands_are_noticed(name: str) -> None:
    case = swapped("faulty", 16, qo_lens=(1, 1), kv_lens=(300, 70))
    with host_with(SWAPPED_FAULTS, name).installed(), noticed(SWAPPED_FAULTS, name):
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize(
    ("name", "heads"),
    [(name, heads) for heads in (16, 128) for name in ("", *MLA_FP8_FAULTS) if (name, heads) != (OVER_P, 16)],
)
def test_faults_of_an_fp8_cache_are_noticed(name: str, heads: int) -> None:
    case = swapped("faulty", heads, qo_lens=(1, 1), kv_lens=(300, 70), **FP8_KV)
    with host_with(MLA_FP8_FAULTS, name).installed(), noticed(MLA_FP8_FAULTS, name):
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *MLA_TOKEN_FAULTS])
def test_faults_of_mla_by_tokens_are_noticed(name: str) -> None:
    dtypes: dict[str, dict[str, Any]] = {"": {}, "FP8": FP8_KV}
    for dtype in [MLA_TOKEN_FAULTS[name].case] if name else dtypes:
        case = swapped("by tokens", 64, qo_lens=(1, 1), kv_lens=(500, 170), page_size=3, **dtypes[dtype])
        faults = {key: one for key, one in MLA_TOKEN_FAULTS.items() if dtype == "FP8" or one.case == dtype}
        with host_with(faults, name).installed(), noticed(MLA_TOKEN_FAULTS, name):
            mla_cases.check(case, op=mla_op)
