"""``export_package``: a step and its planning in one package, with metadata for C++."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import decoder as d
from torch import Tensor, nn
from torch.export import Dim
from tracing.conftest import Package

import attn_ops
from attn_ops import errors, packaging
from attn_ops.plan.state import workspace_size


def _metadata(package: str, model: str) -> dict[str, str]:
    from torch._inductor.package import load_package

    loaded: Any = load_package(package, model)
    return loaded.get_metadata() if hasattr(loaded, "get_metadata") else loaded.loader.get_metadata()


@pytest.mark.slow
def test_a_package_describes_itself(decoder_package: Package) -> None:
    package, planner, _, (path, configs) = decoder_package
    assert package == str(path)
    assert configs == {"aot_inductor.metadata": {"model": "decoder"}}, "the caller's options are left alone"

    found = _metadata(package, "model")
    own = {name.removeprefix("attn_ops."): text for name, text in found.items() if name.startswith("attn_ops.")}
    assert found["model"] == "decoder"
    assert own["version"] == attn_ops.__version__
    assert own["capacity"] == "max_batch=6 max_pages=128 max_tokens=6 cache_pages=128 max_splits=0"
    assert own["problem"].startswith(
        "page_size=4 num_qo_heads=4 num_kv_heads=2 head_dim_qk=16 head_dim_vo=16 max_kv_len"
    )
    assert own["plan"] == "DecodePlan"
    assert own["device"] == "cpu"
    assert tuple(own["fields"].split()) == attn_ops.DecodePlan._fields
    for name, field in planner.state._asdict().items():
        assert own[f"field.{name}"] == ",".join(map(str, field.shape))
    assert own["workspace"] == str(workspace_size(planner.state))
    assert own["inputs"] == "12"
    assert own["input.0"] == "input x float32 cpu ?,64 64,1 read"
    assert own["input.2"] == "input second float32 cpu 128,2,4,2,16 256,128,32,16,1 write"
    assert own["input.7"] == "plan plan.work int32 cpu 9,8 8,1 read"
    assert own["input.11"] == f"workspace workspace float32 cpu {workspace_size(planner.state)} 1 write"
    assert {name: text for name, text in _metadata(package, "plan").items() if name in ("attn_ops.plan", "model")} == {
        "attn_ops.plan": "DecodePlan"
    }


@pytest.mark.slow
def test_the_plan_of_a_package_is_that_of_the_planner(prefill_package: Package) -> None:
    """Also for prefill, with nested inputs under other names."""
    from torch._inductor.package import load_package

    package, planner, attend, _ = prefill_package
    found = _metadata(package, "model")
    assert found["attn_ops.input.1"] == "input caches[1] float32 cpu 24,4,2,16 128,32,16,1 read"
    assert found["attn_ops.input.3"].startswith("plan state.problem int32 cpu 0,4,4,2,16,16,")
    assert "max_batch=3 max_pages=80 max_tokens=40 cache_pages=0 max_splits=6" in found["attn_ops.capacity"]

    step, fill = load_package(package, "model"), load_package(package, "plan")
    caches = [torch.randn(24, 4, 2, 16) for _ in range(2)]
    for lengths, rows in (([9, 120], [4, 7]), ([3], [3])):  # two splits of 64 tokens, and none
        pages = [-(-n // 4) for n in lengths]
        qo_indptr = torch.tensor([0, *rows]).cumsum(0).int()
        kv_indptr = torch.tensor([0, *pages]).cumsum(0).int()
        indices = torch.randint(24, (80,)).int()
        last = torch.tensor([(n - 1) % 4 + 1 for n in lengths]).int()
        plan = attn_ops.PrefillPlan(*(torch.zeros_like(field) for field in planner.state))
        fill(qo_indptr, kv_indptr, indices, last, plan)
        expected = planner.plan(qo_indptr, kv_indptr, indices, last)
        for name, one, other in zip(plan._fields, plan, expected, strict=True):
            assert torch.equal(one, other), name
        q = torch.randn(sum(rows), 4, 16)
        results = (run(caches, q, plan, planner.workspace) for run in (step, attend))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


class Append(nn.Module):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], plan: attn_ops.DecodePlan, workspace: Tensor
    ) -> Tensor:
        rows = torch.arange(len(k), dtype=torch.int32)
        torch.ops.attn.append_kv(k, v, *caches, rows, plan.kv_len - 1, plan.kv_indices, plan.kv_indptr)
        return torch.ops.attn.batch_decode(q, *caches, plan, workspace)[0]


@pytest.mark.slow
def test_inputs_may_be_views_of_one_tensor(tmp_path: Path) -> None:
    """Here the keys and values of one cache, both of which the step writes."""
    from torch._inductor.package import load_package

    planner = attn_ops.DecodePlanner(
        max_batch=3, max_pages=12, page_size=4, num_qo_heads=4, num_kv_heads=2, head_dim=16
    )
    cache = torch.randn(12, 2, 4, 2, 16)
    before = cache.clone()
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    views = [cache[:, 0], cache[:, 1]]
    inputs = (q, k, v, views, planner.state, planner.workspace)
    package = attn_ops.export_package(Append(), planner, inputs, tmp_path / "step.pt2")
    assert torch.equal(cache, before), "the caller's example is not written"

    plan = planner.plan(torch.tensor([0, 3, 4, 6]), torch.randperm(12), torch.tensor([2, 1, 4]))
    expected_cache = cache.clone()
    expected = Append()(q, k, v, [expected_cache[:, 0], expected_cache[:, 1]], plan, planner.workspace)
    torch.testing.assert_close(load_package(package, "model")(q, k, v, views, plan, planner.workspace), expected)
    assert torch.equal(cache, expected_cache)
    assert not torch.equal(cache, before)


class Layers(nn.Module):
    def forward(self, q: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor, *caches: Tensor) -> Tensor:
        for cache in caches:
            q = torch.ops.attn.batch_decode(q, *cache.unbind(1), plan, workspace)[0]
        return q


@pytest.mark.slow
def test_forward_may_take_any_number_of_caches(tmp_path: Path) -> None:
    from torch._inductor.package import load_package

    planner = attn_ops.DecodePlanner(
        max_batch=3, max_pages=12, page_size=4, num_qo_heads=4, num_kv_heads=2, head_dim=16
    )
    caches = torch.randn(12, 2, 4, 2, 16), torch.randn(9, 2, 4, 2, 16)
    inputs = torch.randn(3, 4, 16), planner.state, planner.workspace, *caches
    shapes = {"q": {0: Dim("batch", min=1, max=3)}, "caches": ({}, {0: Dim("pages", min=2, max=99)})}
    path = tmp_path / "step.pt2"
    package = attn_ops.export_package(Layers(), planner, inputs, path, dynamic_shapes=shapes)
    found = [text for name, text in _metadata(package, "model").items() if text.startswith("input ")]
    assert sorted(found) == [
        "input caches[0] float32 cpu 12,2,4,2,16 256,128,32,16,1 read",
        "input caches[1] float32 cpu ?,2,4,2,16 256,128,32,16,1 read",
        "input q float32 cpu ?,4,16 64,16,1 read",
    ]
    plan = planner.plan(torch.tensor([0, 3, 4]), torch.tensor([7, 0, 8, 2]), torch.tensor([2, 1]))
    q = torch.randn(2, 4, 16)
    expected = Layers()(q, plan, planner.workspace, *caches)
    torch.testing.assert_close(load_package(package, "model")(q, plan, planner.workspace, *caches), expected)


class Scaled(nn.Module):
    def forward(self, q: Tensor, cache: Tensor, scale: float, plan: attn_ops.DecodePlan, workspace: Tensor) -> Tensor:
        return torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, workspace, sm_scale=scale)[0]


def _changed(**changes: Any) -> Callable[[attn_ops.DecodePlanner], dict[str, Any]]:
    """Arguments of a valid call with these changes, each a function of the planner."""

    def arguments(planner: attn_ops.DecodePlanner) -> dict[str, Any]:
        valid = {
            "module": d.decoder(),
            "inputs": (*d.inputs(), planner.state, planner.workspace),
            "path": "step.pt2",
        }
        return valid | {name: change(planner) for name, change in changes.items()}

    return arguments


REFUSALS = {
    "path": (
        _changed(path=lambda p: "step.so"),
        errors.OptionError,
        "export_package: path is 'step.so'; expected a name that ends with .pt2; rename the file",
    ),
    "too few inputs": (
        _changed(inputs=lambda p: (*d.inputs(), p.state)),
        errors.ArgumentError,
        "inputs do not fit forward of Decoder: missing a required argument: 'workspace'",
    ),
    "inputs by name": (
        _changed(inputs=lambda p: {"x": d.inputs()[0], "plan": p.state, "workspace": p.workspace}),
        errors.ArgumentError,
        "export_package: inputs is of type dict; expected a tuple; pass the arguments of forward in its order",
    ),
    "shapes by position": (
        _changed(dynamic_shapes=lambda p: ({}, {}, {})),
        errors.ArgumentError,
        "dynamic_shapes is of type tuple; expected a mapping of names to values or None; pass a mapping of names",
    ),
    "no plan": (
        _changed(inputs=lambda p: (*d.inputs(), attn_ops.DecodePlan(*map(torch.clone, p.state)), p.workspace)),
        errors.ArgumentError,
        "no input is the plan of the planner; expected planner.state as an argument of forward",
    ),
    "another plan": (
        _changed(inputs=lambda p: (*d.inputs()[:2], d.planner().state, p.state, p.workspace)),
        errors.UnsupportedError,
        "second is a plan of another planner; expected one plan; export two packages",
    ),
    "a number": (
        _changed(
            module=lambda p: Scaled(),
            inputs=lambda p: (torch.zeros(2, 4, 16), d.inputs()[1], 0.5, p.state, p.workspace),
        ),
        errors.UnsupportedError,
        "scale has a value of type float; expected tensors; make it an attribute",
    ),
    "a tensor twice": (
        _changed(inputs=lambda p: (d.inputs()[0], *d.inputs()[1:2] * 2, p.state, p.workspace)),
        errors.ArgumentError,
        "second is the same tensor as first; expected an example of its own for each; pass a copy as second",
    ),
    "an unknown name": (
        _changed(dynamic_shapes=lambda p: {"y": {}}),
        errors.ArgumentError,
        "dynamic_shapes has 'y'; expected some of x, first, second, plan, workspace; correct the name",
    ),
    "a dynamic plan": (
        _changed(dynamic_shapes=lambda p: {"plan": p.state}),
        errors.OptionError,
        "dynamic_shapes has 'plan', which is the planner's; expected no entry",
    ),
    "a dynamic workspace": (
        _changed(dynamic_shapes=lambda p: {"workspace": {}}),
        errors.OptionError,
        "dynamic_shapes has 'workspace', which is the planner's; expected no entry",
    ),
    "metadata": (
        _changed(inductor_configs=lambda p: {"aot_inductor.metadata": {"layers": 2}}),
        errors.UnsupportedError,
        "aot_inductor.metadata is {'layers': 2}; expected strings by name; convert keys and values to strings",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_anything_is_compiled(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changed, error, message = REFUSALS[case]
    planner = d.planner()
    arguments = changed(planner)
    with pytest.raises(error) as raised:
        attn_ops.export_package(planner=planner, **arguments)
    assert message in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(torch._inductor.config.cpp, "march"), reason="this torch compiles for the host's CPU")
@pytest.mark.parametrize(
    ("configs", "march"),
    [
        ({"cpp.simdlen": None}, None),
        ({"cpp.simdlen": 512}, "x86-64-v4"),
        ({"cpp.simdlen": 256}, "x86-64-v3"),
        ({"cpp.simdlen": 1}, "x86-64"),
        ({"cpp.simdlen": 256, "cpp.march": "znver1"}, "znver1"),
    ],
    ids=str,
)
def test_the_compiler_uses_no_other_vectors_than_inductor(
    configs: dict[str, Any], march: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C++ API takes a package by the vectors that Inductor says its code has."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *args, options: options)
    program: Any = SimpleNamespace(example_inputs=((), {}), module=lambda check_guards: None)
    with torch._inductor.config.patch({"cpp.march": None}):
        options = packaging._compile(program, configs, {})
    assert options.get("cpp.march") == march
    assert options["cpp.simdlen"] == configs["cpp.simdlen"]
    with torch._inductor.config.patch({"cpp.march": None, "cpp.simdlen": configs["cpp.simdlen"]}):
        assert packaging._compile(program, {}, {}).get("cpp.march") == (march if march != "znver1" else "x86-64-v3")
