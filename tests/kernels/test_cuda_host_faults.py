"""Faults that are planted in CUDA kernels and noticed when these run on the host (``helpers/cuda_host``)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from attn_ops.kernels.cuda import mla
from helpers import mla_cases
from helpers.cuda_host import Fault, Host, HostError, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, OPS, attend, mla_op, prefill_case, swapped
from helpers.harness import Setup

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]


class Planted(NamedTuple):
    """A fault, what the machine says of it, and the case that shows it, of prefill one of ``PREFILL_CASES``."""

    fault: Fault
    message: str
    case: str = "even"


RELEASE = "arrive(shared_address(&shared.unit_empty));"
VALUES_FULL = "wait(v_full.of(number), v_full.parity(number));"
VALUES_FENCE = "if (kFencesValues) fence_async_shared();"

PREFILL_FAULTS = {
    "no arrival": Planted(
        Fault("arrive_by_warp(k_empty + number % kKeyStages * 8);", "", 2),
        "deadlock(.|\n)*wait at prefill_producer.cuh",
    ),
    "another parity": Planted(
        Fault(
            "wait(empty + tile % kStages * 8, tile / kStages & 1 ^ 1);",
            "wait(empty + tile % kStages * 8, tile / kStages & 1);",
        ),
        "deadlock",
    ),
    "no wait for a stage": Planted(
        Fault("wait(shared_address(&shared.q_empty[buffer]), n / kQueries & 1 ^ 1);", ""),
        "race|more arrivals",
        case="odd of 64",
    ),
    "the next unit is written before this one is read": Planted(
        Fault("wait(shared_address(&shared.unit_empty), n & 1 ^ 1);", ""), "race|more arrivals|deadlock"
    ),
    "no wait for a unit": Planted(Fault("wait(shared_address(&shared.unit_full), n & 1);", ""), "race|uninitialised"),
    "producer K asks for no unit": Planted(
        Fault("if (!released && unit.end - first <= kTilesAhead * kTile) release_unit(shared), released = true;", ""),
        "deadlock",
    ),
    "producer V releases no unit": Planted(Fault("if (released) release_unit(shared);", "", 2), "deadlock"),
    "producer Q releases a unit for producer V": Planted(
        Fault(
            f"if (more) {RELEASE}",
            f"if (more) {{ {RELEASE} {RELEASE} }}",
        ),
        "race|more arrivals",
    ),
    "another number of bytes": Planted(
        Fault("arrive_expect(full, blocks * kQueryBytes);", "arrive_expect(full, 64);"),
        "lacks 0 of 1 arrivals and -",
    ),
    "no wait for values": Planted(
        Fault(f"{VALUES_FULL}\n      {VALUES_FENCE}", VALUES_FENCE),
        r"race: (.|\n)*TMA(.|\n)*wgmma",
    ),
    "a stage is released before its last product": Planted(
        Fault(
            "wgmma_wait<0>();\n          "
            "finish_pv(output, partial, probabilities, values_of(previous), alpha_before);\n          "
            "arrive_by_warp(v_empty + previous % kPvStages * 8);",
            "arrive_by_warp(v_empty + previous % kPvStages * 8);\n          wgmma_wait<0>();",
        ),
        r"race: (.|\n)*read by wgmma(.|\n)*TMA",
    ),
    "a consumer passes on no turn": Planted(
        Fault("        order.arrive();\n", ""), "deadlock(.|\n)*bar.sync", case="three consumers"
    ),
    "logits are used in flight": Planted(
        Fault("wgmma_wait<1>();\n        fence_registers(logits);", "fence_registers(logits);"),
        "before wgmma.wait_group",
    ),
    "the output is used in flight, beside the next unit's first logits": Planted(
        Fault(
            "wgmma_wait<1>();\n          finish_pv(output, partial, probabilities, values_of(number), alpha_before);",
            "finish_pv(output, partial, probabilities, values_of(number), alpha_before);",
        ),
        "before wgmma.wait_group",
    ),
    "the next unit's first logits are used in flight": Planted(
        Fault("wgmma_wait<0>();\n          fence_registers(logits);", "fence_registers(logits);"),
        "before wgmma.wait_group",
    ),
    "no wait for the next unit": Planted(
        Fault("wait_for_queries(n + 1);", ""), "race|uninitialised|nothing has written"
    ),
    "no fence of registers": Planted(
        Fault(
            "wgmma_fence();\n    issue_qk(logits, query, keys + tile % kKeyStages * (kKeyBytes / 16));",
            "issue_qk(logits, query, keys + tile % kKeyStages * (kKeyBytes / 16));",
        ),
        "without wgmma.fence",
    ),
    "no proxy fence after zeros": Planted(
        Fault("fence_async_shared();\n        __syncwarp();", "__syncwarp();"), "no proxy fence"
    ),
    "no proxy fence after copies": Planted(
        Fault("wait_for_chunks();\n  fence_async_shared();", "wait_for_chunks();"),
        "no proxy fence",
        case="odd of 64",
    ),
    "arrival before copies": Planted(
        Fault(
            "if (exists) copy_queries(p, q, unit, to, thread);\n    arrive(full);",
            "arrive(full);\n    if (exists) copy_queries(p, q, unit, to, thread);",
        ),
        "race|uninitialised",
        case="odd",
    ),
    "no barrier between stores and loads": Planted(
        Fault("sync();  // the state is stored\n", ""),
        "race|uninitialised",
        case="odd",
    ),
    "lane 0 arrives for lanes that still read": Planted(
        Fault(
            "__syncwarp();\n  if (elect()) arrive(barrier);",
            "if (elect()) arrive(barrier);",
        ),
        "race",
        case="odd",
    ),
    "rows after the last": Planted(
        Fault("if (exists[1]) to_lse[to_row[1]] = lse[1];", "to_lse[to_row[1]] = lse[1];"),
        "outside of all tensors(.|\n)* of lse|race between clusters: (.|\n)* of lse",
    ),
    "no wait for earlier kernels": Planted(Fault("wait_for_earlier_kernels();", ""), "before griddepcontrol.wait"),
}

RELEASE = "if (lane == 0) arrive(tiles.fp8_empty + stage * 8);"
CONVERTED = f"fence_async_shared();\n      __syncwarp();\n      {RELEASE}"

CONVERTED_QUERIES = "fence_async_shared();\n  arrive_by_warp(shared_address(&shared.q_full[buffer]));"
QUERY_SCALE = "if (chunk == 0) scales[first + i * kRowsAtOnce] = inverse_of_power(scale);"

FP8_FAULTS = {
    "no proxy fence after conversions": Planted(
        Fault(CONVERTED, CONVERTED.removeprefix("fence_async_shared();\n      ")), "no proxy fence"
    ),
    "lane 0 arrives for lanes that still convert": Planted(
        Fault(CONVERTED, CONVERTED.replace("__syncwarp();\n      ", "")), "race|no proxy fence"
    ),
    "a tile is converted before it has arrived": Planted(
        Fault("wait(tiles.fp8_full + stage * 8, loaded / kFp8Stages & 1);", ""), "race|uninitialised"
    ),
    "a tile is loaded over one that is converted": Planted(
        Fault("tiles.wait_for_empty(tile);", "", 2), "race|more arrivals"
    ),
    "no wait for a stage": Planted(
        Fault("if (part == 0) wait(tiles.empty + tile % STAGES * 8, tile / STAGES & 1 ^ 1);", ""), "race|more arrivals"
    ),
    "the end is passed on while tiles are converted": Planted(
        Fault("for (int i = 0; i < kFp8Stages; ++i) wait_for_empty(tile + i);", ""), "race|more arrivals"
    ),
    "the end is not passed on": Planted(
        Fault("if (lane < kProducerArrivals) arrive(full + tile % kStages * 8);", ""), "deadlock"
    ),
}

FEW_ROWS_FAULTS = {
    "queries are converted before they have arrived": Planted(
        Fault("wait(shared_address(&shared.q_loaded[buffer]), n / kQueries & 1);", "", 2), "race|uninitialised"
    ),
    "no proxy fence after queries are converted": Planted(
        Fault(CONVERTED_QUERIES, CONVERTED_QUERIES.removeprefix("fence_async_shared();")), "no proxy fence"
    ),
    "queries have no scale": Planted(
        Fault(QUERY_SCALE, QUERY_SCALE.replace("inverse_of_power(scale)", "1")), "differs"
    ),
    "a converted tile is not passed on": Planted(
        Fault("if (lane == 0) arrive(tiles.full + tile % (2 * STAGES) * 8);", ""), "deadlock"
    ),
}

ROTATED_KEYS = "fence_async_shared();\n      arrive_by_warp(shared_address(&shared.k_full[tile % (2 * kKeyStages)]));"

ROPE_FAULTS = {
    "queries are rotated before they have arrived": Planted(
        Fault("wait(shared_address(&shared.q_loaded[buffer]), n / kQueries & 1);", "", 2), "race|uninitialised"
    ),
    "keys are rotated before they have arrived": Planted(
        Fault("wait(shared_address(&shared.k_loaded[stage]), tile / kKeyStages & 1);", ""), "race|uninitialised"
    ),
    "no proxy fence after keys": Planted(
        Fault(ROTATED_KEYS, ROTATED_KEYS.removeprefix("fence_async_shared();")), "no proxy fence"
    ),
    "rotated keys are not passed on": Planted(Fault(ROTATED_KEYS, "fence_async_shared();"), "deadlock"),
    "the end is not passed on": Planted(Fault("if (stored < 0) return;", "", 2), "deadlock|outside"),
    "angles of the first row for all": Planted(Fault("angles.add(step);", ""), "differs"),
    "positions of the query tile": Planted(
        Fault(
            "return RopeAngles(turns, position + row_of(first + i + row));",
            "return RopeAngles(turns, row_of(first + i + row));",
        ),
        "differs",
    ),
}

ALIBI_FAULTS = {
    "rows of all requests": Planted(
        Fault(
            "to.bias_row = int(p.has_cap ? in_request : position), "
            "to.bias_rest = int(uint32(to.bias_row) - in_request);",
            "to.bias_row = position, to.bias_rest = to.bias_row - int(in_request + first);",
        ),
        "differs",
    ),
    "positions in the KV": Planted(
        Fault("row_max += alibi_slope(block.head + head, num_heads) * float(block.bias_rest) * kLog2e;", ";"),
        "differs",
    ),
    "the slope of the first head": Planted(
        Fault(
            "of[r] = alibi_slope(head + packed - row_of(packed) * p.group, p.num_kv_heads * p.group) / scale;",
            "of[r] = alibi_slope(head, p.num_kv_heads * p.group) / scale;",
        ),
        "differs",
    ),
    "slopes of a power of 2 of heads": Planted(
        Fault(
            "return exp2_approx(float(beyond < 0 ? -8 * (head + 1) : -8 * beyond - 4) * inverse);",
            "return exp2_approx(float(-8 * (head + 1)) * inverse);",
        ),
        "differs",
    ),
    "no bias of tiles that all rows see whole": Planted(
        Fault(
            "if (first + kTile <= plain_end && first >= visible_begin) [[likely]] return;",
            "if (first + kTile <= visible_end && first >= visible_begin) return;",
        ),
        "differs",
    ),
    "slopes are not divided by the scale": Planted(
        Fault(
            "of[r] = alibi_slope(head + packed - row_of(packed) * p.group, p.num_kv_heads * p.group) / scale;",
            "of[r] = alibi_slope(head + packed - row_of(packed) * p.group, p.num_kv_heads * p.group);",
        ),
        "differs",
    ),
}

STAGED = "fence_async_shared();\n  __syncwarp();"
BULK_STORE = """if (lane % 4 == 0 && exists[r])
      store_bulk(to.values + (row[r] * kLatent + first_column) / 2, staged + (lane / 4 + 8 * r) * kStagedRowBytes,
                 kStored * 2)"""
STORE = "store(SELF * kHalf + p.split * kStored, merge.memory, stored, rows.row_max, sums, p, arguments, unit)"
FENCE = "if (SPLITS > 1) fence_async_shared();  // before a query is loaded"

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
        Fault("__syncwarp();  // what has arrived is read\n", ""), "race"
    ),
}

SWAPPED_MERGE_FAULTS = {
    "results are staged over columns that other warps read": Planted(
        Fault("if (SPLITS > 1) sync();  // what has arrived is read\n", ""), "race"
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
    "no proxy fence after P": Planted(Fault("fence_async_shared();  // P\n", ""), "no proxy fence"),
    "a half is released before it is multiplied": Planted(Fault("wgmma_wait<1>();", ""), "race"),
    "no proxy fence before a bulk store": Planted(Fault("fence_async_shared();  // columns\n", ""), "no proxy fence"),
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

TOKEN_FAULTS = {
    "another place": Planted(
        Fault(
            "copy_chunk(to_row + block * BLOCK_BYTES, from_row + block * ROW_BYTES, existing >> (row + j) & 1);",
            "copy_chunk(to_row + block * BLOCK_BYTES ^ 16, from_row + block * ROW_BYTES, existing >> (row + j) & 1);",
        ),
        "differs",
    ),
    "the address of another row": Planted(
        Fault(
            "addresses[j] = __shfl_sync(~0u, own, row + j, kChunks) + lane % kChunks * 16;",
            "addresses[j] = __shfl_sync(~0u, own, row + j) + lane % kChunks * 16;",
        ),
        "differs",
    ),
    "page numbers of the tile before": Planted(
        Fault("first += STEP;\n    load_pages(p);", "first += STEP;"), "differs"
    ),
}
"""Of KV tiles that are copied token by token."""

COPIED = "race|uninitialised|in flight"
FEWER = "more arrivals|race|uninitialised|deadlock"
PREFILL_TOKEN_FAULTS = TOKEN_FAULTS | {
    "an arrival fewer for keys": Planted(
        Fault(
            "init_barrier(shared_address(&barrier), ROPE ? kConverterWarps : writers);",
            "init_barrier(shared_address(&barrier), writers - 1);",
        ),
        FEWER,
    ),
    "the arrivals of one producer of values": Planted(
        Fault(
            "for (uint64& barrier : shared.v_full) init_barrier(shared_address(&barrier), writers);",
            "for (uint64& barrier : shared.v_full) init_barrier(shared_address(&barrier), kProducerArrivals);",
        ),
        FEWER,
    ),
    "the next unit while a producer reads this one": Planted(
        Fault(
            "init_barrier(shared_address(&shared.unit_empty),\n"
            "                 Q_FP8 || kTensorProducers > 1 ? kProducerWarps : 2 + queries.threads());",
            "init_barrier(shared_address(&shared.unit_empty), kProducerWarps - 1);",
        ),
        "race|more|deadlock",
    ),
    "the queries of one producer alone": Planted(
        Fault(
            "if (kTensorProducers > 1 && part && query_thread < q.threads())\n"
            "      load_queries(p, q, unit, n, shared, query_thread);",
            "if (!VALUES && part) load_queries(p, q, unit, n, shared, query_thread);",
        ),
        "deadlock",
    ),
    "copies are not waited for": Planted(
        Fault(
            "arrive_after_chunks(tiles.full + tile % Tiles::kFullBarriers * 8);",
            "arrive(tiles.full + tile % Tiles::kFullBarriers * 8);",
        ),
        COPIED,
    ),
    "no proxy fence of keys": Planted(Fault("if (kFencesKeys) fence_async_shared();", ""), "no proxy fence"),
    "no proxy fence of values": Planted(Fault(VALUES_FENCE, "", 2), "no proxy fence"),
    "no wait for a stage": Planted(
        Fault("tiles.wait_for_empty(tile);\n      mark(kWaitEmpty);", "", 2), "race|more arrivals"
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


MASK_FAULTS = {
    "no bits of the requests before": Planted(
        Fault(
            "bytes += ((wide(p.qo_indptr[b + 1]) - wide(p.qo_indptr[b])) * wide(p.kv_len[b]) + 7) / 8;",
            "bytes += 0;",
        ),
        "differs",
    ),
    "the mask of the query row before": Planted(
        Fault(
            "load_bits(p, custom.first + int64(row) * custom.stride + first + column, visible);",
            "load_bits(p, custom.first + int64(row - 1) * custom.stride + first + column, visible);",
        ),
        "differs",
    ),
    "values that no row sees": Planted(Fault("zero_unseen(to, seen, lane);", ""), "differs"),
    "values that the first rows do not see": Planted(
        Fault(
            "load_bits(p, mask.first + int64(row) * mask.stride + token, bits);",
            "load_bits(p, mask.first + int64(row % 8) * mask.stride + token, bits);",
        ),
        "differs",
    ),
    "the last KV tile that a row sees": Planted(
        Fault(
            "if (seen) return min(last, token + ((31 - __clz(seen)) / kTileLanes + 1) * kTile);",
            "if (seen) return min(last, token + (31 - __clz(seen)) / kTileLanes * kTile);",
        ),
        "differs",
        case="band",
    ),
    "the first KV tile that a row sees": Planted(
        Fault(
            "if (seen) return first + (__ffs(seen) - 1) / kTileLanes * kTile;",
            "if (seen) return first + ((__ffs(seen) - 1) / kTileLanes + 1) * kTile;",
        ),
        "differs",
        case="band",
    ),
    "tiles at the ends by the mask of few rows": Planted(
        Fault(
            "for (int i = 0; i < kRows; ++i) of_rows |= bits[i][word];",
            "for (int i = 0; i < kRows && first + i < 8; ++i) of_rows |= bits[i][word];",
        ),
        "differs",
        case="band",
    ),
    "the unit is read before all know it": Planted(
        Fault(
            "if (takes && !schedule.next(p, unit)) unit = {};\n  __syncwarp();",
            "if (takes && !schedule.next(p, unit)) unit = {};",
        ),
        "race|uninitialised",
    ),
    "a mask is read before it is stored": Planted(
        Fault(
            "store_mask(mask_of(p, uniform(block.request), uniform(block.row)), shared);",
            "const UnitMask made = mask_of(p, uniform(block.request), uniform(block.row));\n"
            "if (threadIdx.x % 32 == 0) own_mask(shared) = made;",
        ),
        "race",
    ),
}


def _faulty(planted: dict[str, Planted], name: str) -> Host:
    faults = [one.fault for one in planted.values()]
    return Host(sms=2, faults=faults, planted=1 + list(planted).index(name) if name else 0)


def _noticed(planted: dict[str, Planted], name: str) -> contextlib.AbstractContextManager[object]:
    """A fault is noticed by the machine or in the results, which are right without one."""
    if not name:
        return contextlib.nullcontext()
    return pytest.raises((HostError, AssertionError), match=planted[name].message)


SIZES: dict[str, Any] = {"kv_lens": (280, 70), "qo_lens": (70, 33)}
PREFILL_CASES = (
    prefill_case("even", **SIZES, heads=(4, 2)),
    prefill_case("odd", **SIZES, heads=(3, 1), planner={"tile_rows": 20}),
    # Products of heads of 128 read queries from registers, which these read from shared memory.
    prefill_case("odd of 64", **SIZES, heads=(3, 1), head_dims=(64, 64), planner={"tile_rows": 20}),
    prefill_case("three consumers", kv_lens=(400,), qo_lens=(70,), heads=(4, 1), head_dims=(64, 64)),
)


@pytest.mark.parametrize("name", ["", *PREFILL_FAULTS])
def test_faults_of_prefill_are_noticed(name: str) -> None:
    """And the same source without one is not."""
    host = _faulty(PREFILL_FAULTS, name)
    planted = PREFILL_FAULTS.get(name)
    cases = [case for case in PREFILL_CASES if planted is None or case.name == planted.case]
    noticed = pytest.raises(HostError, match=planted.message) if planted else contextlib.nullcontext()
    assert cases
    for case in cases:
        with noticed:
            attend("prefill", case, host)


@pytest.mark.parametrize("name", ["", *MASK_FAULTS])
def test_faults_of_custom_masks_are_noticed(name: str) -> None:
    ends = name in MASK_FAULTS and MASK_FAULTS[name].case == "band"
    sizes = {"kv_lens": (400, 70), "qo_lens": (280, 33), "masked": "band"} if ends else SIZES | {"masked": 0.04}
    setup = Setup("ragged", prefill_case("mask", **sizes, heads=(4, 2)))
    hidden = torch.cat([~mask.any(0) for mask in setup.masks]).nonzero().flatten()
    setup.fill_with_nan(hidden)
    with _faulty(MASK_FAULTS, name).installed(), _noticed(MASK_FAULTS, name):
        out, lse = OPS["ragged"](**setup.arguments)
        setup.check(out, lse, **setup.tolerance("cuda"))


@pytest.mark.parametrize("name", ["", *PREFILL_TOKEN_FAULTS])
def test_faults_of_prefill_by_tokens_are_noticed(name: str) -> None:
    sizes = {"kv_lens": (900, 70), "qo_lens": (70, 33), "heads": (3, 1), "head_dims": (64, 64), "page_size": 3}
    case = prefill_case("by tokens", **sizes)
    with _noticed(PREFILL_TOKEN_FAULTS, name):
        attend("prefill", case, _faulty(PREFILL_TOKEN_FAULTS, name))


@pytest.mark.parametrize("name", ["", *MLA_TOKEN_FAULTS])
def test_faults_of_mla_by_tokens_are_noticed(name: str) -> None:
    dtypes: dict[str, dict[str, Any]] = {"even": {}, "FP8": FP8_KV}
    planted = MLA_TOKEN_FAULTS.get(name)
    for dtype in [planted.case] if planted else dtypes:
        case = swapped("by tokens", 64, qo_lens=(1, 1), kv_lens=(500, 170), page_size=3, **dtypes[dtype])
        faults = {key: one for key, one in MLA_TOKEN_FAULTS.items() if dtype == "FP8" or one.case == dtype}
        with _faulty(faults, name).installed(), _noticed(MLA_TOKEN_FAULTS, name):
            mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *FP8_FAULTS])
def test_faults_of_fp8_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (4, 2)}
    with _noticed(FP8_FAULTS, name):
        attend("prefill", prefill_case("FP8 KV", **sizes, **FP8_KV), _faulty(FP8_FAULTS, name))


@pytest.mark.parametrize("name", ["", *FEW_ROWS_FAULTS])
def test_faults_of_few_rows_over_fp8_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (4, 3), "causal": True}
    with _noticed(FEW_ROWS_FAULTS, name):
        attend("prefill", prefill_case("few rows", **sizes, **FP8_KV), _faulty(FEW_ROWS_FAULTS, name))


@pytest.mark.parametrize("name", ["", *ROPE_FAULTS])
def test_faults_of_rope_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (4, 2)}
    case = prefill_case("RoPE", **sizes, pos_encoding="ROPE_LLAMA", causal=True)
    with _noticed(ROPE_FAULTS, name):
        attend("prefill", case, _faulty(ROPE_FAULTS, name))


@pytest.mark.parametrize("name", ["", *ALIBI_FAULTS])
def test_faults_of_alibi_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (6, 2)}
    case = prefill_case("ALiBi", **sizes, pos_encoding="ALIBI", causal=True)
    with _noticed(ALIBI_FAULTS, name):
        attend("prefill", case, _faulty(ALIBI_FAULTS, name))


@pytest.mark.parametrize("name", ["", *MLA_FAULTS])
def test_faults_of_mla_are_noticed(name: str) -> None:
    (case,) = (one for one in mla_cases.CASES if str(one) == "512/64 decode")
    case = replace(case, qo_lens=(1, 1), kv_lens=(300, 70))
    noticed = pytest.raises(HostError, match=MLA_FAULTS[name].message) if name else contextlib.nullcontext()
    with _faulty(MLA_FAULTS, name).installed(), noticed:
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *MERGE_FAULTS])
def test_faults_of_merges_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"qo_lens": (1,) * 5, "kv_lens": (700, 70, 70, 130, 70), "planner": {"num_ctas": 4}}
    host, case = _faulty(MERGE_FAULTS, name), swapped("faulty", 64, **sizes)
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    noticed = pytest.raises(HostError, match=MERGE_FAULTS[name].message) if name else contextlib.nullcontext()
    with host.installed(), noticed:
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *SWAPPED_MERGE_FAULTS])
def test_faults_of_merges_with_swapped_operands_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clusters with several units, of which some are split."""
    sizes = {"qo_lens": (1,) * 5, "kv_lens": (700, 70, 70, 130, 70), "planner": {"num_ctas": 4}, "page_size": 3}
    host, case = _faulty(SWAPPED_MERGE_FAULTS, name), swapped("faulty", 32, **sizes)
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    noticed = pytest.raises(HostError, match=SWAPPED_MERGE_FAULTS[name].message) if name else contextlib.nullcontext()
    with host.installed(), noticed:
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize("name", ["", *SWAPPED_FAULTS])
def test_faults_of_swapped_operands_are_noticed(name: str) -> None:
    case = swapped("faulty", 16, qo_lens=(1, 1), kv_lens=(300, 70))
    noticed = pytest.raises(HostError, match=SWAPPED_FAULTS[name].message) if name else contextlib.nullcontext()
    with _faulty(SWAPPED_FAULTS, name).installed(), noticed:
        mla_cases.check(case, op=mla_op)


@pytest.mark.parametrize(
    ("name", "heads"),
    [(name, heads) for heads in (16, 128) for name in ("", *MLA_FP8_FAULTS) if (name, heads) != (OVER_P, 16)],
)
def test_faults_of_an_fp8_cache_are_noticed(name: str, heads: int) -> None:
    case = swapped("faulty", heads, qo_lens=(1, 1), kv_lens=(300, 70), **FP8_KV)
    noticed = pytest.raises(HostError, match=MLA_FP8_FAULTS[name].message) if name else contextlib.nullcontext()
    with _faulty(MLA_FP8_FAULTS, name).installed(), noticed:
        mla_cases.check(case, op=mla_op)
