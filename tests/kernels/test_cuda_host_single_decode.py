"""The CUDA decode kernel of dense KV on the host (``helpers/cuda_host``): results, and faults that are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # whose kernel combines splits

from helpers.cases import Case
from helpers.cuda_host import Fault, Host, needs_a_compiler
from helpers.cuda_host.faults import Planted, host_with, noticed
from helpers.harness import Setup
from helpers.oracle import Expected

from attn_ops.kernels.cuda import prefill, single_decode
from attn_ops.plan import equal_requests

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]


def _case(name: str, batch: int, keys: int, **fields: Any) -> Case:
    sizes: dict[str, Any] = {"qo_lens": (1,) * batch, "kv_lens": (keys,) * batch, "heads": (8, 2)}
    return Case(name, **(sizes | {"dtype": torch.bfloat16, "head_dims": (128, 128)} | fields))


def _attend(case: Case, splits: int, host: Host, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Run the case on the host and compare it with the oracle."""
    monkeypatch.setattr(equal_requests, "fastest_splits", lambda *_: splits)
    setup = Setup("ragged", case)
    with host.installed():
        out, lse = prefill.single_prefill(**setup.unplanned_arguments)
    setup.check(out, lse, **setup.tolerance("cuda"))
    return out, lse


F16_64: dict[str, Any] = {"dtype": torch.float16, "head_dims": (64, 64)}

E4M3: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)}
E5M2: dict[str, Any] = {"kv_dtype": torch.float8_e5m2, "kv_scale": (2.0, 0.25)}
ROPE: dict[str, Any] = {"pos_encoding": "ROPE_LLAMA"}

CASES = [
    (_case("one split", 3, 300), 1),
    (_case("splits, sinks", 2, 700, sinks=1.0, causal=True), 3),
    (_case("the last split has one key", 1, 257), 3),
    (_case("splits without keys", 2, 130, sinks=1.0), 5),
    (_case("no keys", 2, 0, sinks=2.0), 1),
    (_case("more requests than CTAs", 9, 70), 1),
    (_case("window, cap", 2, 500, window_left=190, logits_soft_cap=5.0), 2),
    (_case("window longer than the keys", 2, 100, window_left=190, window_right=3), 1),
    (_case("HND, another dtype of the output", 2, 300, kv_layout="HND", out_dtype=torch.float32), 2),
    (_case("groups of 16", 2, 300, heads=(16, 1)), 2),
    (_case("groups of 7", 1, 65, heads=(14, 2)), 1),
    (_case("64, two KV heads in a CTA", 2, 500, **F16_64, sinks=1.0), 2),
    (_case("64, two KV heads in a CTA, HND", 2, 200, **F16_64, heads=(16, 4), kv_layout="HND"), 1),
    (_case("64, an odd number of KV heads", 2, 300, **F16_64, heads=(9, 3)), 2),
    (_case("64, groups of 16", 1, 300, **F16_64, heads=(32, 2)), 2),
    (_case("96", 2, 300, head_dims=(96, 96)), 2),
    (_case("80, groups of 16", 1, 200, head_dims=(80, 80), dtype=torch.float16, heads=(32, 2), kv_layout="HND"), 1),
    (_case("FP8", 2, 700, **E4M3, sinks=1.0), 3),
    (_case("FP8, groups of 16", 2, 300, **E5M2, heads=(32, 2), kv_layout="HND"), 1),
    (_case("FP8, one KV head", 1, 300, **E4M3, heads=(7, 1), dtype=torch.float16, window_left=200), 2),
    (_case("64, FP8", 2, 700, **F16_64 | E4M3, logits_soft_cap=5.0), 2),
    (_case("64, FP8, splits of half a KV tile", 2, 400, **F16_64 | E5M2, heads=(9, 3)), 4),
    (_case("96, FP8", 2, 300, **E4M3, head_dims=(96, 96)), 2),
    (_case("RoPE", 2, 700, **ROPE, rope=(4.0, 5e5), sinks=1.0), 3),
    (_case("RoPE, window", 2, 500, **ROPE, window_left=190, kv_layout="HND"), 2),
    (_case("RoPE, 64", 2, 300, **ROPE | F16_64, heads=(32, 2)), 1),
    (_case("RoPE, 64, an odd number of KV heads", 2, 300, **ROPE | F16_64, heads=(9, 3)), 2),
]


@pytest.mark.parametrize("seed", range(len(CASES)), ids=[case.name for case, _ in CASES])
def test_matches_the_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, splits = CASES[seed]
    host = Host(4, seed)
    _attend(case, splits, host, monkeypatch)
    (launched,) = host.launched
    dim = case.head_dims[0]
    pairs = (dim == 64 or case.kv_dtype is not None) and case.heads[1] % 2 == 0
    macros = {f"HEAD_DIM={dim}"} if dim in (64, 128) else {"HEAD_DIM=128", "PADDED=1"}
    assert macros | {"decode", "DENSE=1", f"KV_HEADS={1 + pairs}"} <= set(launched.split())


def test_the_order_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = (_attend(*CASES[1], Host(4, seed), monkeypatch) for seed in range(3))
    for one in others:
        assert all(torch.equal(a, b) for a, b in zip(first, one, strict=True))


def test_keys_and_values_of_any_strides() -> None:
    """Between NaN: keys and values are columns of one tensor, whose heads are every second."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.full((2 * 150, 4, 264), torch.nan, dtype=torch.bfloat16)
    kv = memory[:, ::2, 8:]
    kv.copy_(torch.randn(kv.shape, generator=generator))
    q = torch.randn(2, 8, 256, generator=generator).bfloat16()[..., :128]
    k, v = kv.split(128, -1)
    with Host(3).installed():
        out, lse = prefill.single_prefill(q, k, v, 2, return_lse=True)
    Expected.of([(q[b : b + 1], k[150 * b : 150 * b + 150], v[150 * b : 150 * b + 150]) for b in (0, 1)]).check(
        out, lse
    )


@pytest.mark.parametrize(
    "options",
    [
        {"qo_lens": (2, 2)},
        {"heads": (34, 2)},
        {"head_dims": (256, 256)},
        {"head_dims": (192, 128)},
        {"masked": 0.5},
        {"pos_encoding": "ALIBI"},
        {"kv_dtype": torch.float8_e4m3fn, "pos_encoding": "ROPE_LLAMA"},
        {"dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn},
    ],
    ids=str,
)
def test_other_calls_are_for_the_prefill_kernel(options: dict[str, Any]) -> None:
    launched: list[str] = []

    def launch(specialization: Any, *_: Any, **__: Any) -> None:
        launched.append(specialization.kernel.function)

    setup = Setup("ragged", _case("other", 2, 40, **options))
    with Host(3).installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "launch", launch)
        patch.setattr(single_decode, "launch", launch)
        prefill.single_prefill(**setup.unplanned_arguments)
    assert launched == ["prefill"]


WAIT_FOR_STAGE = "wait(shared_address(&shared.empty[stage]), parity);"
TWO_BARRIERS = "arrive_expect(k_full, kTileBytes), arrive_expect(v_full, kTileBytes);"
KEYS = "load_box(shared_address(shared.stages[stage].keys), &k, 0, first, 0, blockIdx.x, item.row, k_full, policy);"

FAULTS = {
    "no wait for a stage": Planted(Fault(WAIT_FOR_STAGE, "", times=2), "race|more arrivals"),
    "another number of bytes": Planted(
        Fault(TWO_BARRIERS, "arrive_expect(k_full, kTileBytes), arrive_expect(v_full, 64);", times=2),
        "lacks 0 of 1 arrivals and -",
    ),
    "keys of the first request for all": Planted(Fault(KEYS, KEYS.replace("item.row", "0")), "differs"),
    "splits overlap": Planted(
        Fault("to.first = to.begin;", "to.end = min(to.end + 1, p.keys), to.first = to.begin;"), "differs"
    ),
    "no wait for earlier kernels": Planted(
        Fault("if (early) wait_for_earlier_kernels();", ""), "before griddepcontrol.wait"
    ),
    "keys after the last of a split are seen": Planted(Fault("if (!item.hides(first)) return;", "return;"), "differs"),
}


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_faults_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same source without one is not."""
    case = _case("faults", 2, 650)
    with noticed(FAULTS, name):
        _attend(case, 2, host_with(FAULTS, name, sms=3), monkeypatch)
