"""The code blocks of the documentation run. ``./dev docs`` builds the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_ops.ops import backends

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    """A fenced block: its language, the words behind that, its text, and the line of the page before it."""

    language: str
    words: list[str]
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2].split(), found[3], text.count("\n", 0, found.start(3)))
        for found in FENCE.finditer(text)
    ]


def with_blocks() -> list[object]:
    """Pages with blocks to run. Those that compile C++ are slow."""
    params = []
    for page in PAGES:
        languages = {block.language for block in blocks(page)}
        if languages & {"python", "cpp"}:
            marks = [pytest.mark.slow] if "cpp" in languages else []
            params.append(pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks))
    return params


@pytest.mark.parametrize("page", with_blocks())
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page in order, in one namespace and one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS)
    torch._dynamo.reset()
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": page.stem}
    try:
        done = [run(block, page, namespace) for block in blocks(page)]
    finally:
        backends.choose.cache_clear()
    if not any(done):
        pytest.skip("every block needs a GPU")


def run(block: Block, page: Path, namespace: dict[str, object]) -> bool:
    """Run a block, unless it is for reading or needs a GPU that is absent. Returns whether it ran."""
    if block.language == "python" and (torch.cuda.is_available() or "cuda" not in block.words):
        # Blank lines before the block, so that an error names the line of the page.
        exec(compile("\n" * block.line + block.text, page, "exec", dont_inherit=True), namespace)
    elif block.language == "cpp":
        (name,) = (word.removeprefix("file=") for word in block.words if word.startswith("file="))
        Path(name).write_text(block.text, encoding="utf-8")
    elif block.language == "bash" and "run" in block.words:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}, line {block.line}:\n{done.stderr}"
    else:
        return False
    return True


def test_fences_have_known_words() -> None:
    """A block behind a misspelt word would not run."""
    known = {"python": {"cuda"}, "bash": {"run"}, "cpp": {"file=serve.cpp"}, "cuda": set(), "text": set()}
    for page in PAGES:
        for block in blocks(page):
            assert block.language in known, (page, block.line)
            assert set(block.words) <= known[block.language], (page, block.line)
        assert len(re.findall("^```", page.read_text(encoding="utf-8"), re.MULTILINE)) % 2 == 0, page


def test_missing_texts_of_ops_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of an argument, an output, a formula and an op are missing, and one is of an op that does not exist."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import op_reference

    assert op_reference.ops().problems == []
    words = op_reference.data("ops.toml")
    del words["arguments"]["window_left"], words["ops"]["merge_state"]["flops"], words["ops"]["packbits"]
    words["ops"]["seq_lens"]["outputs"] = []
    words["ops"]["gone"] = {"text": "an op of long ago"}
    monkeypatch.setattr(op_reference, "data", lambda _: words)
    problems = "\n".join(op_reference.ops().problems)
    for problem in (
        "op batch_decode: argument window_left has no text",
        "op merge_state: FLOP formula",
        "op packbits: has no text",
        "op seq_lens: returns 1 tensors and 0 are named",
        "there is no op gone",
    ):
        assert problem in problems


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script async src="https://cdn.example/a.js"></script>', 1),
        ("<img src='//cdn.example/a.png'>", 1),
        ('<link rel="stylesheet" href="http://cdn.example/a.css">', 1),
        ('<script src="_static/a.js"></script><a href="https://example.org">a link</a>', 0),
    ],
)
def test_a_page_that_loads_from_another_host_is_found(
    html: str, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``./dev docs`` looks at every page of the site, and fails on one."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import own_host

    assert len(own_host.loads_of_other_hosts(html)) == loads
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    builder = SimpleNamespace(format="html", get_outfilename=lambda name: tmp_path / f"{name}.html")
    app = SimpleNamespace(builder=builder, env=SimpleNamespace(found_docs={"page"}))
    if loads:
        with pytest.raises(Exception, match=r"page loads from another host: .*cdn\.example"):
            own_host.check(app, None)
    else:
        own_host.check(app, None)


def test_a_table_of_measurements_is_named_with_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have one heading, and files of one benchmark on two GPUs the same one."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import benchmark_results

    text = "# Decode\n\nNote.\n\n| row | us |\n|---|---|\n| a | 1 |\n\nNot measured:\n\n* b: it is not installed\n"
    first, other = (
        benchmark_results._section(text, benchmark_results.RESULTS / name) for name in ("decode.md", "h100/decode.md")
    )
    assert first.splitlines()[0] == "### Decode"
    assert other.splitlines()[0] == "### Decode, H100"
    assert '<div class="results">\n\n| row | us |\n|---|---|\n| a | 1 |\n\n</div>' in first
    assert "<details><summary>Not measured</summary>\n\n* b: it is not installed\n\n</details>" in first


def test_hyphens_become_the_characters_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In prose alone: code and signatures stay as they are typed."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import typography
    from docutils import nodes, utils

    document = utils.new_document("page")
    prose, code = "a -> -1, -inf and 2^-24; x-1, fan-in, --peers", nodes.literal("", "", nodes.inline("", "-1 -> -inf"))
    document += nodes.paragraph("", "", nodes.strong("", "name"), nodes.Text(" -- a meaning"))
    document += nodes.paragraph("", "", nodes.Text(prose), code)
    typography.replace(None, document)
    first, second = (paragraph.astext() for paragraph in document.children)
    assert first == "name: a meaning"
    minus = "\N{MINUS SIGN}"
    assert second == f"a → {minus}1, {minus}inf and 2^{minus}24; x-1, fan-in, --peers" + "-1 -> -inf"
