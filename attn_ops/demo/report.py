"""Results of a run: a table of rates, and the checks that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from attn_ops.demo.compiling import Counts
from attn_ops.demo.dense import Comparison
from attn_ops.demo.engine import Rates

STEPS = ("prefill", "decode")


@dataclass
class Row:
    """One way to run the model: its rates, and its greedy tokens compared with the dense reference."""

    name: str
    rates: Rates | None = None
    equal: Comparison = field(default_factory=Comparison)

    def cells(self) -> tuple[str, str, str, str]:
        decode, serving = ("-", "-") if self.rates is None else (f"{rate:,.0f}" for rate in self.rates)
        return self.name, decode, serving, str(self.equal)


@dataclass
class Report:
    """Results of a run, filled in stage by stage.

    Attributes:
        header: lines above the table.
        cuda_graphs: whether compiled steps run as CUDA graphs.
        rows: one for each way to run the model.
        compiled: counts of the warm-up of compiled steps, None before it.
        after: counts after the warm-up, None before.
        pages: free pages and all pages after each serving run.
        python_mapped: whether libpython is mapped in the C++ process, None before it has run.
        skipped: checks that could not run, with the reason.
    """

    header: list[str]
    cuda_graphs: bool = False
    rows: list[Row] = field(default_factory=list)
    compiled: Counts | None = None
    after: Counts | None = None
    pages: list[tuple[int, int]] = field(default_factory=list)
    python_mapped: bool | None = None
    skipped: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """One sentence for each check that failed or could not run."""
        found = [f"{row.name}: tokens differ from the dense reference" for row in self.rows if row.equal.different]
        for counts, when in ((self.compiled, "in warm-up"), (self.after, "after warm-up")):
            if counts and counts.graph_breaks:
                found.append(f"{counts.graph_breaks} graph breaks {when}")
            if counts and counts.cudagraph_skips:
                found.append(f"{counts.cudagraph_skips} graphs ran without a CUDA graph {when}")
        if self.compiled and self.compiled.compilations != len(STEPS):
            found.append(f"{self.compiled.compilations} graphs were compiled for the {len(STEPS)} steps")
        if self.after and self.after.compilations:
            found.append(f"{self.after.compilations} recompiles after warm-up")
        if any(free != total for free, total in self.pages):
            found.append("a finished run did not free all its pages")
        if self.python_mapped:
            found.append("libpython is mapped in the C++ process")
        return found + [f"not checked: {what}" for what in self.skipped]

    def render(self) -> str:
        """The header and the table as text."""
        table = [("", "decode tokens/s", "serving tokens/s", "tokens equal to the dense reference")]
        lines = [*self.header, "", *_columns(table + [row.cells() for row in self.rows]), ""]
        if self.compiled and self.after:
            lines += [
                f"compiled graphs           {self.compiled.compilations}",
                f"graph breaks              {self.compiled.graph_breaks + self.after.graph_breaks}",
                f"recompiles after warm-up  {self.after.compilations}",
            ]
            if self.cuda_graphs:
                lines.append(f"CUDA graphs skipped       {self.compiled.cudagraph_skips + self.after.cudagraph_skips}")
        if self.pages:
            lines.append("pages freed               " + ", ".join(f"{free} of {total}" for free, total in self.pages))
        if self.python_mapped is not None:
            lines.append(f"libpython in C++ process  {'mapped' if self.python_mapped else 'absent'}")
        return "\n".join(lines)


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        ).rstrip()
        for row in table
    ]
