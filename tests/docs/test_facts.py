"""What the documentation says of the repository is true: paths, the figure, the list of caches."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cpu_time import BUDGET
from helpers.syntax_trees import name_of

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
]
PATH = re.compile(r"`((?:attn_ops|kernels|meta|examples|tests|docs|benchmarks|\.github)/[\w./*-]*|\.ci/run)`")
FENCE = re.compile(r"^ *(```+).*?^ *\1$", re.MULTILINE | re.DOTALL)
ARCHITECTURE = ROOT / "docs" / "contributing" / "architecture.md"
DESIGN = ROOT / "docs" / "contributing" / "kernels" / "design.md"


def test_the_architecture_has_every_module() -> None:
    """Each module and folder of ``attn_ops`` is in the tree or in the table of layers."""
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("## Layers")[2].partition("## One call")[0]
    named = set(re.findall(r"\w+", text))
    private = {"exports", "version", "share"}  # names of public modules, a number, CMake's file
    found = {path.stem for path in (ROOT / "attn_ops").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not sorted(name for name in found - named - private if not name.startswith("_"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    named = set(PATH.findall(page.read_text(encoding="utf-8"))) - {"docs/_build/html"}
    assert not [path for path in sorted(named) if not any(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_has_at_most_120_columns(page: Path) -> None:
    """Tables, images and code blocks may have more."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert not [line for line in prose if len(line) > 120 and not line.lstrip().startswith(("|", "!["))]


def test_each_folder_of_tests_has_a_budget() -> None:
    text = (ROOT / "docs" / "contributing" / "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `tests/(\w+)/` \|.*\| (\d+) \|$", text, re.MULTILINE)
    assert {folder: int(seconds) for folder, seconds in rows} == BUDGET
    assert f"{sum(BUDGET.values()) / 60:.0f} minutes in all" in text
    assert BUDGET.keys() == {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}


def test_figures_are_those_of_their_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of plans is drawn from a real plan."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import plan_figure
    import schedule_figure

    drawn = {plan_figure.FILE: plan_figure.draw()}
    drawn |= {file: schedule_figure.draw(figure()) for file, figure in schedule_figure.FIGURES.items()}
    for file, image in drawn.items():
        assert file.read_text(encoding="utf-8") == image, f"{file.name}: run its script in docs/_ext again"


CONSUMERS = {"one consumer": 1, "three consumers": 3}
"""Ends of the descriptions of prefill tiles."""


def test_sizes_of_prefill_tiles_are_those_of_the_kernel() -> None:
    prefill = pytest.importorskip("attn_ops.kernels.cuda.prefill", exc_type=ImportError)
    row = re.compile(r"^\| (\d+)(?:/(\d+))?(.*) \| (\d+) \| ([\d, ]+) \| (\d+) \| (\d+) \|", re.MULTILINE)
    listed = Counter(
        ((int(qk), int(vo or qk)), CONSUMERS.get(end, 2), int(tokens), stages, int(queries), int(kib))
        for qk, vo, kind, tokens, stages, queries, kib in row.findall(DESIGN.read_text(encoding="utf-8"))
        for end in (kind.rpartition(", ")[2],)
    )
    found: Counter[object] = Counter()
    for family in prefill.FAMILIES:
        if "ALIBI" in family.macros:  # whose tiles are those of others
            continue
        itemsize = family.dtypes[0].itemsize
        for dims, tile in (*family.tiles.items(), *family.masked.items()):
            stages = (tile.key_stages, tile.value_stages, tile.transposed_stages)
            text = ", ".join(str(number) for number in stages if number)
            kib = tile.shared_bytes(*dims, itemsize, False) / 1024
            found[dims, tile.consumers, tile.tokens, text, tile.queries, kib] += 1
    assert listed == found


IMAGE_ROWS: dict[str, dict[str, object]] = {
    "for any plan": {},
    "for few packed rows": {"special": "few rows"},
    "for large batches": {"special": "large batch"},
    "for short KV": {"special": "short KV"},
    "with RoPE": {"pos_encoding": "ROPE_LLAMA"},
    "with ALiBi": {"pos_encoding": "ALIBI"},
    "for padded heads": {"padded": True},
}
"""Rows of the table of images of ``prefill.cu``: what the keys of a row do not have at its default."""


def test_numbers_of_images_are_those_of_the_kernels() -> None:
    build = pytest.importorskip("attn_ops.kernels.cuda.build", exc_type=ImportError)
    from attn_ops.kernels.cuda.prefill import E4M3, SPECIALIZATIONS

    section = DESIGN.read_text(encoding="utf-8").partition("## Images")[2].partition("\n## ")[0]
    images = {build.key_of(one): one.kernel.source for one in build.specializations()}
    rows = re.findall(r"^\| `(\w+\.cu)` \| (\d+) \|", section, re.MULTILINE)
    assert {source: int(number) for source, number in rows} == Counter(images.values())
    assert f"So {len(images)} images" in section
    table = section.partition("| images of `prefill.cu` |")[2]
    listed = {name: line.split("|") for name, line in re.findall(r"^\| ((?:for|with) [\w ]+) \| (.*) \|$", table, re.M)}
    assert listed.keys() == IMAGE_ROWS.keys()
    defaults: dict[str, object] = {"special": "", "pos_encoding": "NONE", "padded": False}
    for name, cells in listed.items():
        wanted = defaults | IMAGE_ROWS[name]
        keys = [key for key in SPECIALIZATIONS if all(getattr(key, field) == x for field, x in wanted.items())]
        columns = Counter((key.dtype == E4M3, key.fp8, key.custom_mask) for key in keys)
        order = [(False, fp8, mask) for fp8 in (False, True) for mask in (False, True)] + [(True, True, False)]
        assert [int(cell or 0) for cell in map(str.strip, cells)] == [columns.pop(column, 0) for column in order], name
        assert not columns


def module_state(tree: ast.Module) -> Iterator[str]:
    """Cached functions, libraries of ops, and module variables that begin empty or belong to a thread."""
    thread_local = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and "local" in map(name_of, node.bases)
    }
    containers = {"WeakValueDictionary", "WeakKeyDictionary", "ContextVar", "local", "dict", "list", "set"}
    containers |= {"BoundedCache", "Library"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and {"cache", "lru_cache"} & set(map(name_of, node.decorator_list)):
            yield node.name
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        empty = (isinstance(node.value, ast.Dict) and not node.value.keys) or (
            isinstance(node.value, ast.List) and not node.value.elts
        )
        made = isinstance(node.value, ast.Call) and name_of(node.value) in containers | thread_local
        if isinstance(target, ast.Name) and (empty or made):
            yield target.id


Place = tuple[str, str]
"""A file and a name in it."""


def listed_places() -> tuple[set[Place], set[Place]]:
    """The names of the column "where" with the files that follow them, and the last names with the file before them."""
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("## Caches and module state")[2]
    followed: set[Place] = set()
    last: set[Place] = set()
    for row in re.findall(r"^\| .* \|$", section, re.MULTILINE)[1:]:
        for part in row.split(" | ")[1].split("; "):
            words = re.findall(r"`([\w./]+)(?:\(\))?`", part)
            runs = [list(run) for _, run in itertools.groupby(words, lambda word: "/" in word)]
            for names, files in itertools.pairwise(runs):
                if "/" in files[0]:
                    followed |= set(itertools.product(files, names))
            if len(runs) > 1 and "/" not in runs[-1][0]:
                last |= {(runs[-2][-1], name) for name in runs[-1]}
    return followed, last


def test_caches_and_module_state_are_listed() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("attn_ops", "kernels", "meta")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "demo" not in path.parts
        for name in module_state(ast.parse(path.read_text(encoding="utf-8")))
    }
    followed, last = listed_places()
    assert len(found) > 10
    assert not sorted(found - followed - last)


def test_listed_caches_and_module_state_exist() -> None:
    """Each name of the column "where" occurs in the files that follow it."""
    followed, _ = listed_places()
    assert len(followed) > 40
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in followed}
    assert not sorted((file, word) for file, word in followed if not re.search(rf"\b{re.escape(word)}\b", texts[file]))
