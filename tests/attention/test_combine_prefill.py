"""The combine kernel of prefill on scaled partial results, which ``cuda/mla.cu`` stores: float16, with scales."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import each_triton
from helpers.oracle import merge
from helpers.page_tables import page_table

from attn_ops import PrefillPlanner

pytestmark = pytest.mark.usefixtures("poisoned_memory")

QO_LENS, HEADS, DIM, TILE_ROWS = (1, 2, 3, 1), 3, 512, 2


@each_triton
@pytest.mark.parametrize("programs", [8, 1024], ids=["whole rows", "slices"])
@pytest.mark.parametrize("kv_lens", [(70, 6000, 0, 900), (0, 0, 40000, 0)], ids=["few splits", "many splits"])
def test_scaled_partial_results(
    device: str, backend: str, programs: int, kv_lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_ops.kernels.triton import combine_prefill

    monkeypatch.setattr(combine_prefill, "MAX_SCALED_PROGRAMS", programs)
    sizes = {"page_size": 64, "num_qo_heads": HEADS, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": DIM}
    planner = PrefillPlanner(4, 8, 1000, num_ctas=200, tile_rows=TILE_ROWS, device=device, **sizes)
    qo_indptr = torch.tensor([0, *QO_LENS]).cumsum(0)
    plan = planner.plan(*(t.to(device) for t in (qo_indptr, *page_table(kv_lens, 64))))
    tiles = [tile for tile in plan.split_tiles.tolist() if tile[3]]
    assert max(tile[3] for tile in tiles) > (combine_prefill.SLICE_SPLITS if kv_lens[2] else 2)

    slots = 2 * plan.split_tiles.shape[0]
    shape = slots, TILE_ROWS, HEADS, DIM // combine_prefill.SCALE_COLUMNS
    v = torch.randn(*shape, combine_prefill.SCALE_COLUMNS).half()
    scales, s = 2.0 ** torch.randint(-9, 9, shape), torch.randn(shape[:3]) * 9
    partial = planner.workspace.fill_(torch.nan).flatten()
    size = v.numel()
    partial[: size // 2] = v.flatten().view(torch.float32).to(device)
    partial[size // 2 :][: scales.numel()] = scales.flatten().to(device)
    partial[size:][: s.numel()] = s.flatten().to(device)
    out = torch.full((sum(QO_LENS), HEADS, DIM), torch.nan, device=device)
    lse = torch.full((sum(QO_LENS), HEADS), torch.nan, device=device)
    combine_prefill.combine_split_tiles(out, lse, partial, None, plan, scaled=True)

    out, lse = out.cpu(), lse.cpu()
    values, combined = (v.double() * scales[..., None]).flatten(3), torch.zeros(sum(QO_LENS), dtype=torch.bool)
    for row, rows, first, splits in tiles:
        of_tile = slice(row, row + rows)
        expected, of_rows = merge(
            values[first : first + splits, :rows].transpose(0, 1),
            s[first : first + splits, :rows].double().transpose(0, 1),
        )
        torch.testing.assert_close(out[of_tile].double(), expected, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(lse[of_tile].double(), of_rows, rtol=1e-5, atol=1e-5)
        combined[of_tile] = True
    assert out[~combined].isnan().all(), "rows of tiles that are not split are the attention kernel's"
