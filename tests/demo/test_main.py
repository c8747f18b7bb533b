"""The command line of the demo: output, errors and exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import cpp_runner, demo_golden
from safetensors.torch import save_file

from attn_ops import cpp_serving
from attn_ops.demo.__main__ import main
from attn_ops.demo.compiling import Counts
from attn_ops.demo.dense import Comparison
from attn_ops.demo.engine import Rates
from attn_ops.demo.report import Report, Row

CASE = json.loads(demo_golden.FILE.read_text(encoding="utf-8"))["qwen3-window"]
CONFIG = CASE["config"] | {"num_hidden_layers": 2, "max_window_layers": 1, "eos_token_id": None}
CONFIG["layer_types"] = CONFIG["layer_types"][1:]
SERVER = Path(cpp_serving.__path__[0]) / "server.cpp"
CLEAN = Report(
    ["header"],
    rows=[
        Row("eager", Rates(10.0, 5.0), Comparison(8)),
        Row("compiled", Rates(1234.0, 99.0), Comparison(8, near_ties=1, widest=0.51)),
    ],
    compiled=Counts(2, 0, 0),
    after=Counts(0, 0, 0),
    pages=[(4, 4)],
    python_mapped=False,
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A small model on the CPU leaves the process with one thread."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, with a window in the second of two layers, and a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    shapes = {name: shape for name, shape in CASE["weights"].items() if ".layers.2." not in name}
    save_file({name: demo_golden.weight(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    vocabulary = {f"w{i}": i for i in range(demo_golden.SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def demo(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_ops.demo", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_every_check_of_a_whole_run_passes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported the compiler, with the server that the tests compile once."""
    servers = {SERVER: cpp_runner.serving_example()}
    monkeypatch.setattr("attn_ops.cpp.build", lambda source, program: shutil.copy(servers[source], program))
    torch._dynamo.reset()
    output = tmp_path / "output" / "kept"
    prompts = [f"--prompt={' '.join(f'w{i}' for i in range(1, n))}" for n in (3, 9, 20)]
    sizes = ["--batch", "3", "--max-new-tokens", "5", "--output", str(output)]
    status = main(["--device", "cpu", "--model", str(checkpoint), *prompts, *sizes])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert {path.name for path in output.iterdir()} == {"prefill.pt2", "decode.pt2", "requests.txt", "server"}
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in out.splitlines()}
    for row in ("eager", "compiled", "AOTInductor, C++"):
        assert lines[row].endswith("yes, 30 of 30")
    assert lines["compiled graphs"] == "compiled graphs 2"
    assert lines["graph breaks"] == "graph breaks 0"
    assert lines["recompiles after warm-up"] == "recompiles after warm-up 0"
    assert lines["libpython in C++ process"] == "libpython in C++ process absent"
    (free,) = [line for line in lines.values() if line.startswith("pages freed")]
    assert free.count(" of ") == 3
    assert "serving, compiled" in err
    assert "\nw1 w2 " in out


@pytest.mark.gpu
@pytest.mark.slow
def test_every_check_passes_on_a_gpu() -> None:
    done = demo("--device", "cuda", "--batch", "4", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "CUDA graphs skipped       0" in done.stdout


@pytest.mark.slow
def test_ranks_serve(checkpoint: Path, tmp_path: Path) -> None:
    """Without a compiler, since compiling on every rank takes minutes."""
    arguments = ["--tp", "2", "--model", str(checkpoint), "--batch", "2", "--max-new-tokens", "3"]
    done = demo(*arguments, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stdout.count("yes, 12 of 12") == 1, "the first rank reports, and it alone"
    assert done.stderr.count("FAILED") == 1
    assert "FAILED: not checked: compiled steps" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_ranks_on_gpus() -> None:
    done = demo("--device", "cuda", "--tp", "2", "--batch", "4", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "CUDA graphs skipped       0" in done.stdout


@pytest.mark.slow
def test_heads_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    """Three, by two ranks."""
    case = json.loads(demo_golden.FILE.read_text(encoding="utf-8"))["llama"]
    config = case["config"] | {"num_attention_heads": 3, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows, hidden = 3 * config["head_dim"], config["hidden_size"]
    shapes = {"q_proj": (rows, hidden), "k_proj": (rows, hidden), "v_proj": (rows, hidden), "o_proj": (hidden, rows)}
    weights = {
        name: demo_golden.weight(name, shapes.get(name.split(".")[-2], shape))
        for name, shape in case["weights"].items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    done = demo("--tp", "2", "--model", str(tmp_path), "--batch", "2", "--max-new-tokens", "3")
    assert done.returncode == 2
    assert "error: planner: num_qo_heads has" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_a_compiler_the_rest_runs_and_the_exit_status_says_so(checkpoint: Path, tmp_path: Path) -> None:
    done = demo("--model", str(checkpoint), "--batch", "2", "--max-new-tokens", "3", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "eager" in done.stdout
    assert "FAILED: not checked: compiled steps and the C++ server, which need g++" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/absent"], "error: --model /absent is not a folder"),
        (["--device", "tpu"], "error: --device tpu is not"),
        (["--device", "meta"], "error: --device meta is not supported"),
        (["--prompt", "hello"], "--prompt needs --model"),
        (["--batch", "0"], "--batch is the number"),
        (["--batch", "5000"], "1 to 4096"),
        (["--tp", "0"], "--tp is the number of processes"),
        (["--tp", "2", "--output", "x"], "--output keeps packages"),
        (["--seed", "-1"], "--seed is a number from 0"),
        (["--seed", str(1 << 63)], "--seed is a number from 0"),
        (["--device", "cuda:99"], "error: --device cuda:99"),
        (["--output", "/dev/null"], "error: --output /dev/null cannot be created"),
        (["--output", "/dev/null/folder"], "error: --output /dev/null/folder cannot be created"),
        (["--max-new-tokens", "1"], "--max-new-tokens is at least 2"),
        (["--max-new-tokens", "4000"], "error: the longest request has 40"),
    ],
)
def test_wrong_options_are_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments if "--device" in arguments else [*arguments, "--device", "cpu"])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_prompt_without_a_tokenizer(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert main(["--device", "cpu", "--model", str(tmp_path), "--prompt", "w1"]) == 2
    assert "holds no tokenizer.json" in capsys.readouterr().err


def test_recompiles_are_counted() -> None:
    torch._dynamo.reset()
    twice = torch.compile(lambda x: x + x, backend="eager", fullgraph=True, dynamic=False)
    start = Counts.now()
    twice(torch.ones(3))
    twice(torch.zeros(3))
    assert Counts.now().since(start).compilations == 1
    twice(torch.ones(4))
    assert Counts.now().since(start).compilations == 2


def test_graph_breaks_are_counted() -> None:
    torch._dynamo.reset()

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    start = Counts.now()
    torch.compile(broken, backend="eager")(torch.ones(3))
    assert Counts.now().since(start).graph_breaks == 1


def test_a_clean_report_has_no_failures() -> None:
    assert CLEAN.failures() == []
    text = CLEAN.render()
    assert "compiled            1,234                99  yes, 8 of 8, 1 near ties within 0.5 eps" in text
    assert "recompiles after warm-up  0" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rows": [Row("eager", Rates(1.0, 1.0), Comparison(8, different=1))]},
            "eager: tokens differ from the dense reference",
        ),
        ({"compiled": Counts(2, 1, 0)}, "1 graph breaks in warm-up"),
        ({"compiled": Counts(3, 0, 0)}, "3 graphs were compiled for the 2 steps"),
        ({"after": Counts(1, 0, 0)}, "1 recompiles after warm-up"),
        ({"after": Counts(0, 0, 2)}, "2 graphs ran without a CUDA graph after warm-up"),
        ({"pages": [(3, 4)]}, "did not free all its pages"),
        ({"python_mapped": True}, "libpython is mapped"),
        ({"skipped": ["the server"]}, "not checked: the server"),
    ],
)
def test_every_failed_check_is_reported(changes: dict[str, object], message: str) -> None:
    (failure,) = Report(**(vars(CLEAN) | changes)).failures()  # type: ignore[arg-type]
    assert message in failure


def test_a_cache_beyond_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 64)
    assert main(["--device", "cpu", "--batch", "2", "--max-new-tokens", "2"]) == 2
    assert re.search(r"error: the KV cache needs \d.* GiB and cpu has 0\.0 GiB; lower --batch", capsys.readouterr().err)


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand details")

    monkeypatch.setattr("attn_ops.demo.session.seeded", full)
    assert main(["--device", "cpu"]) == 2
    assert "error: out of memory (CUDA out of memory.); use a smaller model" in capsys.readouterr().err


def test_a_tokenizer_of_another_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["w60"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert main(["--device", "cpu", "--model", str(tmp_path), "--prompt", "w1 w60"]) == 2
    assert "error: tokenizer.json gives token 1000 and the model has a vocabulary of 61" in capsys.readouterr().err
