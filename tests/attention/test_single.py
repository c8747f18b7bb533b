"""``attn::single_prefill``: every request of the ragged cases on its own."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from helpers.cases import RAGGED, RAGGED_SPECIAL, Case
from helpers.harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", [*(c for c in RAGGED if "planned" not in c.name), *RAGGED_SPECIAL], ids=str)
def test_matches_oracle(case: Case) -> None:
    check_single(case)


def check_single(case: Case, device: str = "cpu", backend: str = "auto", **tolerance: float) -> None:
    setup = Setup("ragged", case, device)
    options = {name: value for name, value in setup.arguments.items() if name not in ("q", "k", "v", "plan", "mask")}
    del options["workspace"]
    sizes = list(zip(setup.qo_lens, case.kv_lens, strict=True))
    ends = {
        "rows": list(accumulate(setup.qo_lens)),
        "tokens": list(accumulate(case.kv_lens)),
        "bytes": list(accumulate(-(-n * m // 8) for n, m in sizes)),
    }
    for b, (n, m) in enumerate(sizes):
        rows = slice(ends["rows"][b] - n, ends["rows"][b])
        tokens = slice(ends["tokens"][b] - m, ends["tokens"][b])
        k, v = ((t[tokens] if case.kv_layout == "NHD" else t[:, tokens]) for t in (setup.k, setup.v))
        mask = setup.packed_mask
        if mask is not None:
            mask = mask[ends["bytes"][b] - -(-n * m // 8) : ends["bytes"][b]]
        out, lse = torch.ops.attn.single_prefill(setup.q[rows], k, v, mask=mask, backend=backend, **options)
        assert out.dtype == case.dtype
        setup.expected.rows(rows).check(out, lse, **tolerance)
