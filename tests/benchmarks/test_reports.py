"""Tables, headlines and plots of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import model, overheads, plot, report
from benchmarks.comparison import NotMeasured

TIMES = report.Columns(("attn_ops", "one launch"), ("flashinfer", "sdpa cudnn", "flex"))


RATES = report.Columns(("paged", "ragged"), ("flex", "flashinfer fa3 ragged"), higher_is_better=True)


def test_a_report_names_what_was_not_measured() -> None:
    entries = [NotMeasured("x", "a", "why"), NotMeasured("x", "b", "why"), NotMeasured("peer", "a", "no")]
    data = {
        "title": "Title",
        "headline": "A headline.",
        "note": "A note.",
        "environment": {"torch": "2"},
        "rows": [{"row": "a", "us": 1.234, "peer": None}, {"row": "b", "us": 56.78, "peer": 9.0}],
        "not measured": [entry._asdict() for entry in entries],
    }
    text = report.markdown(data)
    assert text.startswith("# Title\n\n**A headline.**\n\nA note.\n\ntorch 2\n\n| row |")
    assert "| a | 1.23 | - |\n| b | 56.8 | 9.00 |\n" in text
    assert text.endswith("Not measured:\n\n* x: why (every row)\n* peer: no (a)\n")


def test_speedups_are_above_one_where_ours_is_faster() -> None:
    times = {"row": "r", "attn_ops": 2.0, "one launch": 4.0, "flashinfer": 3.0, "sdpa cudnn": None, "goal": 1.0}
    assert report.speedups(times, TIMES) == {"flashinfer": 1.5}
    rates = {"row": "r", "paged": 300.0, "ragged": 400.0, "flex": 200.0, "flashinfer fa3 ragged": 500.0}
    assert report.speedups(rates, RATES) == {"flex": 2.0, "flashinfer fa3 ragged": 0.8}
    assert report.fastest_peer(rates, RATES) == ("flashinfer fa3 ragged", 0.8)


def test_the_headline_names_the_fastest_peer_of_each_row() -> None:
    rows: list[report.Row] = [
        {"row": "a", "attn_ops": 2.0, "flashinfer": 8.0, "sdpa cudnn": 4.0},
        {"row": "b", "attn_ops": 2.0, "flashinfer": 1.0, "sdpa cudnn": None},
        {"row": "c", "attn_ops": 2.0, "flashinfer": None, "sdpa cudnn": 8.0},
        {"row": "d", "attn_ops": 2.0, "flashinfer": None, "sdpa cudnn": None},
    ]
    absent = [NotMeasured(peer, "d", "why") for peer in ("flex", "flashinfer")]
    assert report.headline(rows, TIMES, absent) == (
        "Speed relative to the fastest peer of each row: 1.59x (geometric mean), 0.50x to 4.00x; faster in 2 of 3 "
        "rows. Fastest peers, by number of rows: sdpa cudnn (2), flashinfer (1). In no row measured: flex."
    )
    assert report.headline(rows[3:], TIMES) == "No peer was measured."
    assert list(report.with_fastest_peer(rows[0], TIMES).items())[:3] == [
        ("row", "a"), ("fastest peer", "sdpa cudnn"), ("vs fastest peer", 2.0)
    ]  # fmt: skip


def test_saved_results_have_a_headline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"gpu": "Some GPU"})
    rows = [{"row": "a", "attn_ops": 2.0, "flashinfer": 3.0}]
    report.save("decode", "Decode", "A note.", rows, tmp_path, TIMES)
    text = (tmp_path / "decode.md").read_text()
    assert "**Speed relative to the fastest peer of each row: 1.50x" in text
    assert "| a | flashinfer | 1.50 | 2.00 | 3.00 |" in text
    report.save("other", "Other", "A note.", rows, tmp_path, "No peer here.")
    assert "**No peer here.**" in (tmp_path / "other.md").read_text()


@pytest.mark.parametrize(
    "path", sorted(report.RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.stem}/{path.stem}"
)
def test_stored_results_name_the_fastest_peers(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.markdown(data)
    if "columns" in data:
        columns = report.Columns(**data["columns"])
        entries = [NotMeasured(**entry) for entry in data["not measured"]]
        assert data["headline"] == report.headline(data["rows"], columns, entries)
        for row in data["rows"]:
            assert (row[report.FASTEST], row[report.SPEEDUP]) == (report.fastest_peer(row, columns) or (None, None))


def test_plots_are_made_of_the_stored_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stored = sorted(report.RESULTS.glob("*.json"))
    for source in stored:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    plot.run(type("Arguments", (), {"results": tmp_path}))
    plots = {path.stem for path in tmp_path.glob("*.png")}
    assert plots == {path.stem for path in report.RESULTS.glob("*.png")}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))


def test_the_first_call_is_the_sum_of_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "_in_new_process", lambda program: [0.25, 0.5, 1.0])
    found = [(row["what"], row["measured"]) for row in overheads._first_call()]
    assert found[0] == ("first plan and decode, empty caches", 1.75)
    assert found[1:] == [
        (f"of it, {name}", x) for name, x in zip(overheads.FIRST_CALL_PARTS, (0.25, 0.5, 1.0), strict=True)
    ]


def test_headlines_of_tables_without_peer_columns() -> None:
    times = {"wrapper.run": 7.0, "wrapper.plan": 48.0, f"{overheads.PEER}.run": 21.0}
    rows: list[report.Row] = [{"what": f"{name}, host", "measured": time} for name, time in times.items()]
    assert overheads.headline(rows) == (
        "Host time: wrapper.run takes 7.0 us, FlashInfer's 21.0 us; wrapper.plan takes 48.0 us, no peer."
    )
    text = model.headline([{"batch": 1, "step": 5.0, "attention": 0.25}])
    assert text.startswith("batch 1: 5.00 ms, 5% attention. No peer")
