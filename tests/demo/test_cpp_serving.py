"""The C++ serving example: built as its README says, its tokens are those of Python."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import cpp_runner

from attn_ops import cpp
from attn_ops.cpp_serving import export
from attn_ops.demo import package
from attn_ops.demo.pages import pages_for
from attn_ops.demo.requests import from_seed

EXAMPLE = Path(export.__file__).parent
REFUSED = "; expected 1 or more of both, and 96 or less in the cache; change the request"


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)


def test_the_printed_options_are_those_of_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    for option, used in (("--flags", cpp.flags()), ("--cmake-prefix", [cpp.cmake_prefix()])):
        cpp.main([option])
        assert shlex.split(capsys.readouterr().out) == used


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_equal_those_of_python(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests join while others decode, run out of pages, start again and finish; three requests cannot run.

    With one layer, which compiles in less time: ``test_main.py`` has the server run a model of two different ones.
    """
    monkeypatch.setattr(export, "CONFIG", replace(export.CONFIG, num_layers=1, windows=(-1,)))
    requests = from_seed(12, export.CONFIG.vocab_size, 24, seed=0)
    packages = export.export(tmp_path, device, requests)
    server = cpp_runner.serving_example()
    file = tmp_path / "requests.txt"
    with file.open("a", encoding="utf-8") as more:
        more.write(f"1 {2**63 - 1} 5 6 7\n1 3\n1 3 5 x\n")
    served = package.serve(server, packages, file)

    *lines, too_long, empty, text = served.lines
    assert lines == (tmp_path / "expected.txt").read_text(encoding="utf-8").splitlines()
    assert too_long == f"refused: submit: a prompt of 3 and {2**63 - 1} new tokens{REFUSED}"
    assert text == "refused: server: '1 3 5 x'; expected ARRIVAL MAX_NEW_TOKENS TOKEN ...; correct the line"
    assert empty == f"refused: submit: a prompt of 0 and 3 new tokens{REFUSED}"

    capacity = export.CAPACITY
    assert sum(pages_for(r.max_tokens, capacity.page_size) for r in requests) > 2 * capacity.num_pages
    assert len({r.arrival for r in requests}) > 5
    assert served.numbers["preemptions"] > 0
    assert served.numbers["free_pages"] == capacity.num_pages
    assert served.numbers["decoded"] >= sum(len(r.output) - 1 for r in requests) - served.numbers["preemptions"]
    assert not served.python_mapped

    stop = int(lines[0].split()[3])
    stopped = package.serve(server, packages, file, [stop]).lines[: len(lines)]
    assert stopped == [_until(line, stop) for line in lines]

    for words, message in (
        ((), "usage: server PREFILL.pt2 DECODE.pt2 REQUESTS"),
        ((*packages, tmp_path / "absent.txt"), f"server: cannot read {tmp_path / 'absent.txt'}"),
        *(
            ((*packages, file, word), f"server: a stop token is '{word}'; expected a 64-bit integer; correct it")
            for word in ("3x", "9" * 20)
        ),
        ((file, packages.decode, file), f"package: cannot load {file}: "),
        (
            (packages.decode, packages.decode, file),
            "plan: qo_indptr is given; expected none, since this is a decode",
        ),
    ):
        done = _run(server, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr


def _until(line: str, stop: int) -> str:
    """``line`` up to its first ``stop``."""
    words = line.split()
    return " ".join(words[: words.index(str(stop)) + 1] if str(stop) in words else words)
