"""Faults that are planted in the prefill kernel and noticed when it runs on the host (``helpers/cuda_host``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers.cuda_host import Fault, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, OPS, attend, prefill_case
from helpers.cuda_host.faults import COPIED, FEWER, TOKEN_FAULTS, Planted, host_with, noticed
from helpers.harness import Setup

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

RELEASE = "arrive(shared_address(&shared.unit_empty));"
VALUES_FULL = "v_full.wait(number);"
VALUES_FENCE = "if (kFencesValues) fence_async_shared();"

PREFILL_FAULTS = {
    "no arrival": Planted(
        Fault("release_keys(number * kKeyParts + kKeyParts - 1);", ""),
        "deadlock(.|\n)*wait at prefill_producer.cuh",
    ),
    "another parity": Planted(
        Fault(
            "wait(empty + n % kStages * 8, n / kStages & 1 ^ 1);",
            "wait(empty + n % kStages * 8, n / kStages & 1);",
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
        Fault(f"{VALUES_FULL}\n    {VALUES_FENCE}", VALUES_FENCE),
        r"race: (.|\n)*TMA(.|\n)*wgmma",
    ),
    "a stage is released before its last product": Planted(
        Fault(
            "wgmma_wait<0>();\n      "
            "finish_pv(output, partial, probabilities, values_of(previous), alpha_before);\n      "
            "arrive_by_warp(v_empty + previous % kPvStages * 8);",
            "arrive_by_warp(v_empty + previous % kPvStages * 8);\n      wgmma_wait<0>();",
        ),
        r"race: (.|\n)*read by wgmma(.|\n)*TMA",
    ),
    "a consumer passes on no turn": Planted(
        Fault("    order.arrive(kept);\n", ""), "deadlock(.|\n)*bar.sync", case="three consumers"
    ),
    "logits are used in flight": Planted(
        Fault("finish_logits<1>(number);", "finish_logits<2>(number);"),
        "before wgmma.wait_group",
    ),
    "the output is used in flight, beside the next unit's first logits": Planted(
        Fault(
            "wgmma_wait<1>();\n            finish_output(number);",
            "finish_output(number);",
        ),
        "before wgmma.wait_group",
    ),
    "the next unit's first logits are used in flight": Planted(
        Fault("finish_logits<0>(base);", "finish_logits<1>(base);"),
        "before wgmma.wait_group",
    ),
    "no wait for the next unit": Planted(
        Fault("wait_for_queries(n + 1);", ""), "race|uninitialised|nothing has written"
    ),
    "no fence of registers": Planted(
        Fault(
            "wgmma_fence();\n      issue_qk(logits, query, ring + stage % kKeyStages * (kKeyBytes / 16), part);",
            "issue_qk(logits, query, ring + stage % kKeyStages * (kKeyBytes / 16), part);",
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
        Fault("sync();  // the first part of the state is stored\n", ""),
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


CONVERTER_RELEASE = "if (lane == 0) arrive(ring.fp8_empty + from * 8);"
CONVERTED = f"fence_async_shared();\n      __syncwarp();\n      {CONVERTER_RELEASE}"

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
        Fault("wait(ring.fp8_full + from * 8, fp8_stage / FP8_STAGES & 1);", ""), "race|uninitialised"
    ),
    "a tile is loaded over one that is converted": Planted(
        Fault("tiles.wait_for_empty(stage);", "", 2), "race|more arrivals"
    ),
    "no wait for a stage": Planted(
        Fault("if (part == 0) wait(ring.empty + stage % STAGES * 8, stage / STAGES & 1 ^ 1);", ""), "race|more arrivals"
    ),
    "the end is passed on while tiles are converted": Planted(
        Fault("for (int i = 0; i < kStages; ++i) wait_for_empty(tile + i);", ""), "race|more arrivals"
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
        Fault("if (lane == 0) arrive(ring.full + stage % (2 * STAGES) * 8);", ""), "deadlock"
    ),
}


ROTATED_KEYS = "fence_async_shared();\n    arrive_by_warp(shared_address(&shared.k_full[tile % (2 * kKeyStages)]));"

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
    "the end is not passed on": Planted(Fault("if (stored < 0) return;", ""), "deadlock|outside"),
    "angles of the first row for all": Planted(Fault("angles.add(step);", ""), "differs"),
    "positions of the query tile": Planted(
        Fault(
            "return RopeAngles(turns, position + row_of(first + i + row));",
            "return RopeAngles(turns, row_of(first + i + row));",
        ),
        "differs",
    ),
}


ROTATED_PART = (
    "rotation.rotate_keys<8 * KeyConverter::Part::kGroups, Layout::kGroup, Layout::kColumn>(to, first + token, turns,\n"
    + " " * 93
    + "step);"
)

ROPE_FP8_FAULTS = {
    "keys are rotated while lanes convert them": Planted(
        Fault("__syncwarp();\n      " + ROTATED_PART, ROTATED_PART), "race|uninitialised"
    ),
    "all keys have the positions of the first": Planted(
        Fault(
            "change(to + warp * Part::kGroups * TileLayout<DIM>::kGroup, 8 * (group + warp * Part::kGroups));",
            "change(to + warp * Part::kGroups * TileLayout<DIM>::kGroup, 0);",
        ),
        "differs",
    ),
    "values are not converted": Planted(Fault("values.fill_stage([](uint32, int) {});", ""), "deadlock"),
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
            "if (first + kTile <= unit.plain_end && first >= unit.visible_begin) [[likely]] return;",
            "if (first + kTile <= unit.visible_end && first >= unit.visible_begin) return;",
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


PREFILL_TOKEN_FAULTS = TOKEN_FAULTS | {
    "an arrival fewer for keys": Planted(
        Fault(
            "init_barrier(shared_address(&barrier), kConverts ? kWarpsOfTensor : writers);",
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
            "               Q_FP8 || kTensorProducers > 1 ? kProducerWarps : 2 + queries.threads());",
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
            "arrive_after_chunks(tiles.full + stage % Tiles::kFullBarriers * 8);",
            "arrive(tiles.full + stage % Tiles::kFullBarriers * 8);",
        ),
        COPIED,
    ),
    "no proxy fence of keys": Planted(Fault("if (kFencesKeys) fence_async_shared();", ""), "no proxy fence"),
    "no proxy fence of values": Planted(Fault(VALUES_FENCE, ""), "no proxy fence"),
    "no wait for a stage": Planted(
        Fault("tiles.wait_for_empty(stage);\n        mark(kWaitEmpty);", "", 2), "race|more arrivals"
    ),
}


STORED = "store(output, rows, p, row_of, arguments.results, unit.block, line, first_column);"
WIDE_FAULTS = {
    "a part of the keys is multiplied before it has arrived": Planted(
        Fault("k_full.wait(stage);", ""), "race|uninitialised"
    ),
    "a part of the keys is released before its product": Planted(
        Fault("wgmma_wait<1>();\n        release_keys(stage - 1);", "release_keys(stage - 1);"), "race"
    ),
    "parts of the keys are not released": Planted(
        Fault("arrive_by_warp(k_empty + stage % kKeyStages * 8);", ""), "deadlock"
    ),
    "the first part of the keys for all": Planted(
        Fault(
            "load_tile<Layout>(p, source, unit, first, first_block + part * Layout::kBlocks, boxes, to, barrier);",
            "load_tile<Layout>(p, source, unit, first, first_block, boxes, to, barrier);",
        ),
        "differs",
    ),
    "the first half of the values for both units": Planted(
        Fault("unit.first_column = u % UNIT_PARTS * kDimVo;", "unit.first_column = 0;"), "race|differs"
    ),
    "both halves of the output in one place": Planted(
        Fault(STORED, STORED.replace("first_column", "0")), "race|differs", case="shared rows"
    ),
    "one consumer releases the values": Planted(
        Fault("arrive_by_warp(v_empty + number % kPvStages * 8);", ";"), "deadlock", case="shared rows"
    ),
}
"""Of heads of 512."""


QUERY_CHUNK = (
    "copy_chunk(row_to + block * kPackedRows * kRowBytes, copies ? row_from + block * kRowBytes : q.first, copies);"
)
QUERY_BOX = """load_box(to + i * kQueryBytes + block * kPackedRows * kRowBytes, q.map, Columns(block).first,
                 unit.kv_head * p.group, row + i * q.box_rows, 0, full);"""
KV_BOX = """load_box(to + block * Layout::kColumn + i * Layout::kGroup, source.map, columns.first, 0, columns.block,
                   boxes.group, outer, barrier);"""
STORED_VECTOR = "if (exists[r] && of_row.has(first_column + 8 * (i + threadIdx.x % 4))) to[i] = chunk;"
STORED_ROWS = (
    "store_as<kFewRows ? kBFloat16 : kLikeOperands>(to.out_type, to.out, output, first_column, of_row, to_row, exists);"
)
COPIED_TOKENS = """tokens.template copy_rows<Layout::kBlocks, Layout::kRow, Layout::kColumn>(
              p, of_columns, groups, [](int) { return ~0u; }, PADDED ? end_byte : Layout::kBlocks * Layout::kRow);"""
ZEROED_ROWS = """for (int i = begin * kValueChunks + lane; i < end * kValueChunks; i += 32)
    zero_chunk(values, i / kValueChunks, i % kValueChunks);"""
PADDED_FAULTS = {
    "columns of the next head in queries": Planted(
        Fault(QUERY_CHUNK, QUERY_CHUNK.replace("copies", "exists")), "differs|outside", case="odd group"
    ),
    "a box of queries begins at another column": Planted(
        Fault(QUERY_BOX, QUERY_BOX.replace("Columns(block)", "Columns(0)")), "differs"
    ),
    "a box of keys or values begins at another column": Planted(
        Fault(KV_BOX, KV_BOX.replace("columns.first", "0")), "differs"
    ),
    "columns after the last are stored": Planted(
        Fault(STORED_VECTOR, "if (exists[r]) to[i] = chunk;"), "differs|outside|race"
    ),
    "rows of the output as wide as the kernel": Planted(
        Fault(STORED_ROWS, STORED_ROWS.replace("of_row", "FullRow<kOutDim>{}")), "differs|outside"
    ),
    "tokens copied to the end of the row": Planted(
        Fault(COPIED_TOKENS, COPIED_TOKENS.replace("PADDED ? end_byte : ", "")), "differs|outside", case="by tokens"
    ),
    "zeros in a part of a swizzled row": Planted(
        Fault(ZEROED_ROWS, ZEROED_ROWS.replace("kValueChunks", "(kValueColumns / 8)")), "differs"
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
            "store_mask(mask_of(p, uniform(unit.block.request), uniform(unit.block.row)), shared);",
            "const UnitMask made = mask_of(p, uniform(unit.block.request), uniform(unit.block.row));\n"
            "if (threadIdx.x % 32 == 0) own_mask(shared) = made;",
        ),
        "race",
    ),
}


SIZES: dict[str, Any] = {"kv_lens": (280, 70), "qo_lens": (70, 33)}
PREFILL_CASES = {
    "": prefill_case("even", **SIZES, heads=(4, 2)),
    "odd": prefill_case("odd", **SIZES, heads=(3, 1), planner={"tile_rows": 20}),
    # Products of heads of 128 read queries from registers, which these read from shared memory.
    "odd of 64": prefill_case("odd of 64", **SIZES, heads=(3, 1), head_dims=(64, 64), planner={"tile_rows": 20}),
    "three consumers": prefill_case("three consumers", kv_lens=(400,), qo_lens=(70,), heads=(4, 1), head_dims=(64, 64)),
}


@pytest.mark.parametrize("name", ["", *PREFILL_FAULTS])
def test_faults_of_prefill_are_noticed(name: str) -> None:
    """And the same source without one is not."""
    for case in [PREFILL_FAULTS[name].case] if name else PREFILL_CASES:
        with noticed(PREFILL_FAULTS, name):
            attend("prefill", PREFILL_CASES[case], host_with(PREFILL_FAULTS, name))


@pytest.mark.parametrize("name", ["", *WIDE_FAULTS])
def test_faults_of_wide_heads_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (280, 70), "heads": (4, 2), "head_dims": (512, 512), "page_size": 64}
    cases = {"": prefill_case("512", **sizes, qo_lens=(70, 33))}
    cases["shared rows"] = prefill_case("512, shared rows", **sizes, qo_lens=(5, 2))
    for case in [WIDE_FAULTS[name].case] if name else cases:
        with noticed(WIDE_FAULTS, name):
            attend("prefill", cases[case], host_with(WIDE_FAULTS, name))


@pytest.mark.parametrize("name", ["", *PADDED_FAULTS])
def test_faults_of_padded_heads_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (280, 70), "qo_lens": (70, 33), "head_dims": (80, 80), "storage": "padded"}
    cases = {
        "": prefill_case("padded", **sizes, heads=(4, 2)),
        "odd group": prefill_case("padded, odd group", **sizes, heads=(3, 1)),
        "by tokens": prefill_case("padded, by tokens", **sizes, heads=(4, 2), page_size=3),
        "by tokens, mask": prefill_case("padded, by tokens, mask", **sizes, heads=(4, 2), page_size=3, masked=0.5),
    }
    for case in [PADDED_FAULTS[name].case] if name else cases:
        with noticed(PADDED_FAULTS, name):
            attend("prefill", cases[case], host_with(PADDED_FAULTS, name))


@pytest.mark.parametrize("name", ["", *MASK_FAULTS])
def test_faults_of_custom_masks_are_noticed(name: str) -> None:
    ends = name in MASK_FAULTS and MASK_FAULTS[name].case == "band"
    sizes = {"kv_lens": (400, 70), "qo_lens": (280, 33), "masked": "band"} if ends else SIZES | {"masked": 0.04}
    setup = Setup("ragged", prefill_case("mask", **sizes, heads=(4, 2)))
    hidden = torch.cat([~mask.any(0) for mask in setup.masks]).nonzero().flatten()
    setup.fill_with_nan(hidden)
    with host_with(MASK_FAULTS, name).installed(), noticed(MASK_FAULTS, name):
        out, lse = OPS["ragged"](**setup.arguments)
        setup.check(out, lse, **setup.tolerance("cuda"))


@pytest.mark.parametrize("name", ["", *PREFILL_TOKEN_FAULTS])
def test_faults_of_prefill_by_tokens_are_noticed(name: str) -> None:
    sizes = {"kv_lens": (900, 70), "qo_lens": (70, 33), "heads": (3, 1), "head_dims": (64, 64), "page_size": 3}
    case = prefill_case("by tokens", **sizes)
    with noticed(PREFILL_TOKEN_FAULTS, name):
        attend("prefill", case, host_with(PREFILL_TOKEN_FAULTS, name))


@pytest.mark.parametrize("name", ["", *FP8_FAULTS])
def test_faults_of_fp8_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (4, 2)}
    with noticed(FP8_FAULTS, name):
        attend("prefill", prefill_case("FP8 KV", **sizes, **FP8_KV), host_with(FP8_FAULTS, name))


@pytest.mark.parametrize("name", ["", *FEW_ROWS_FAULTS])
def test_faults_of_few_rows_over_fp8_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (4, 3), "causal": True}
    with noticed(FEW_ROWS_FAULTS, name):
        attend("prefill", prefill_case("few rows", **sizes, **FP8_KV), host_with(FEW_ROWS_FAULTS, name))


@pytest.mark.parametrize("name", ["", *ROPE_FAULTS])
def test_faults_of_rope_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (4, 2)}
    case = prefill_case("RoPE", **sizes, pos_encoding="ROPE_LLAMA", causal=True)
    with noticed(ROPE_FAULTS, name):
        attend("prefill", case, host_with(ROPE_FAULTS, name))


@pytest.mark.parametrize("name", ["", *ROPE_FP8_FAULTS])
def test_faults_of_rope_over_fp8_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (4, 2)}
    case = prefill_case("RoPE, FP8 KV", **sizes, **FP8_KV, pos_encoding="ROPE_LLAMA", causal=True)
    with noticed(ROPE_FP8_FAULTS, name):
        attend("prefill", case, host_with(ROPE_FP8_FAULTS, name))


@pytest.mark.parametrize("name", ["", *ALIBI_FAULTS])
def test_faults_of_alibi_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (6, 2)}
    case = prefill_case("ALiBi", **sizes, pos_encoding="ALIBI", causal=True)
    with noticed(ALIBI_FAULTS, name):
        attend("prefill", case, host_with(ALIBI_FAULTS, name))
