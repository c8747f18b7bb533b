"""Malformed and malicious checkpoints raise DemoError: no other exception, no wrong model, no file outside is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import demo_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from attn_ops.demo import checkpoint
from attn_ops.demo.checkpoint_config import parse_config
from attn_ops.demo.errors import DemoError
from attn_ops.demo.json_fields import MAX_FILE_BYTES

CASE = json.loads(demo_golden.FILE.read_text(encoding="utf-8"))["llama"]
CPU = torch.device("cpu")
SIZES = demo_golden.SIZES | {"model_type": "llama"}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": 6}
QWEN = SIZES | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6}
LLAMA3 = demo_golden.LLAMA3
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
INTEGER = "expected an integer, 1 to"


def tensors() -> dict[str, Tensor]:
    return {name: demo_golden.weight(name, shape) for name, shape in CASE["weights"].items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint, in a folder of its own."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASE["config"]), encoding="utf-8")
    save_file(tensors(), folder / WEIGHTS)
    return folder


def load(folder: Path) -> checkpoint.Checkpoint:
    return checkpoint.load(folder, torch.float32, CPU)


def write_index(folder: Path, shard: object) -> None:
    """An index by which one file holds every weight."""
    text = json.dumps({"weight_map": dict.fromkeys(CASE["weights"], shard)})
    (folder / INDEX).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("value", ["32", 32.0, True, [32], {}, 0, -1, 10**30, math.nan])
@pytest.mark.parametrize("key", [key for key in demo_golden.SIZES if key != "num_key_value_heads"])
def test_a_size_of_a_wrong_type_or_value(key: str, value: object) -> None:
    with pytest.raises(DemoError, match=rf"^{key} of config\.json is .*; {INTEGER} \d+; correct the file"):
        parse_config(SIZES | {key: value})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SIZES | {"hidden_size": None}, f"hidden_size of config.json is None; {INTEGER}"),
        (SIZES | {"num_hidden_layers": 100_000}, f"num_hidden_layers of config.json is 100000; {INTEGER} 1024"),
        (SIZES | {"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        (SIZES | {"num_key_value_heads": 3}, "is 3; expected a divisor of num_attention_heads, which is 4"),
        (SIZES | {"num_key_value_heads": "2"}, "num_key_value_heads of config.json is '2'"),
        (SIZES | {"head_dim": 7}, "head_dim of config.json is 7 "),
        (SIZES | {"head_dim": -2}, "head_dim of config.json is -2"),
        (SIZES | {"hidden_size": 3}, "head_dim of config.json is 0 (hidden_size 3, num_attention_heads 4)"),
        (SIZES | {"rms_norm_eps": "1e-6"}, "rms_norm_eps of config.json is '1e-6'; expected a number"),
        (SIZES | {"rms_norm_eps": math.nan}, "rms_norm_eps of config.json is nan"),
        (SIZES | {"rms_norm_eps": -1.0}, "rms_norm_eps of config.json is -1.0"),
        (SIZES | {"rope_theta": 0}, "rope_theta of config.json is 0"),
        (SIZES | {"rope_theta": math.inf}, "rope_theta of config.json is inf"),
        (SIZES | {"rope_theta": "10000"}, "rope_theta of config.json is '10000'"),
        (SIZES | {"rope_parameters": {"rope_theta": [1]}}, "rope_theta of rope_parameters of config.json is [1]"),
        (
            SIZES | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta is 500000 in rope_parameters of config.json and 10000 in config.json; expected one value",
        ),
        (SIZES | {"rope_scaling": "linear"}, "rope_scaling of config.json is 'linear'; expected a JSON object"),
        (SIZES | {"rope_scaling": {"type": "linear", "factor": 0}}, "factor of rope_scaling of config.json is 0"),
        (SIZES | {"rope_scaling": {"type": ["linear"]}}, "rope scaling ['linear'] is not supported"),
        (SIZES | {"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor of rope_scaling of config.json is '8'"),
        (SIZES | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "expected a number above low_freq_factor"),
        (
            SIZES | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": -1}},
            "original_max_position_embeddings of rope_scaling of config.json is -1",
        ),
        (SIZES | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": LLAMA3}, "and they differ"),
        (SIZES | {"partial_rotary_factor": "half"}, "partial_rotary_factor of config.json is 'half'"),
        (SIZES | {"tie_word_embeddings": "false"}, "tie_word_embeddings of config.json is 'false'; expected true or"),
        (SIZES | {"attention_bias": 1}, "attention_bias of config.json is 1"),
        (SIZES | {"mlp_bias": "no"}, "mlp_bias of config.json is 'no'"),
        (QWEN | {"use_sliding_window": "no"}, "use_sliding_window of config.json is 'no'"),
        (QWEN | {"max_window_layers": -1}, "max_window_layers of config.json is -1"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window of config.json is 0"),
        (MISTRAL | {"sliding_window": "6"}, "sliding_window of config.json is '6'"),
        (MISTRAL | {"layer_types": "full_attention"}, "layer_types of config.json is 'full_attention'"),
        (MISTRAL | {"layer_types": [["full_attention"]] * 3}, "or sliding_attention for each of 3 layers"),
        (MISTRAL | {"layer_types": ["full_attention"] * 4}, "or sliding_attention for each of 3 layers"),
    ],
)
def test_a_field_of_a_wrong_type_or_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoError) as raised:
        parse_config(config)
    assert message in str(raised.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([10**20, -(2**63)])
    | st.floats()
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*LLAMA3, "rope_theta"]), inner),
    max_leaves=6,
)
KEYS = (
    *SIZES,
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "use_sliding_window",
    "tie_word_embeddings",
)


@settings(max_examples=300)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), base=st.sampled_from([SIZES, MISTRAL, QWEN]))
def test_no_other_exception_is_raised(changes: dict[str, Any], base: dict[str, Any]) -> None:
    try:
        config = parse_config(base | changes)
    except DemoError:
        return
    assert len(config.windows) == config.num_layers
    assert config.head_dim % 2 == 0 == config.num_qo_heads % config.num_kv_heads
    assert math.isfinite(config.rope_theta)


def test_absent_windows_are_those_of_the_transformers_library() -> None:
    mistral = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert parse_config(mistral).windows == (4095,) * 3
    assert parse_config(mistral | {"sliding_window": None}).windows == (-1,) * 3
    qwen = {key: value for key, value in QWEN.items() if key != "sliding_window"} | {"num_hidden_layers": 30}
    assert parse_config(qwen).windows == (-1,) * 28 + (4095,) * 2


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "expected a JSON object"),
        (b"null", "is None; expected a JSON object"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"\xff\xfe{\x00}\x00", "is not JSON"),
    ],
    ids=["empty", "array", "null", "deep", "digits", "utf-16"],
)
def test_a_file_that_is_no_json_object(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DemoError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "fifo"])
def test_a_json_file_that_is_no_file(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(DemoError, match=rf"{name} is not a regular file"):
        load(folder)


def test_a_json_file_that_is_too_large(folder: Path) -> None:
    with (folder / "config.json").open("ab") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(DemoError, match=f"config.json has {MAX_FILE_BYTES + 1} bytes; expected .* at most"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "lacks weight_map"),
        ('{"weight_map": []}', r"weight_map of .* is \[\]; expected a JSON object"),
        ('{"weight_map": {}}', "expected an object that gives the file name of each weight"),
        ('{"weight_map": {"a": 3}}', "expected an object that gives the file name of each weight"),
        ('{"weight_map": {"a": ""}}', "expected an object that gives the file name of each weight"),
    ],
)
def test_a_malformed_index(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(DemoError, match=message):
        load(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "sub/../../outside.safetensors", "{absolute}"])
def test_a_shard_outside_of_the_folder(folder: Path, shard: str) -> None:
    outside = folder.parent / "outside.safetensors"
    save_file(tensors(), outside)
    (folder / "sub").mkdir()
    write_index(folder, shard.format(absolute=outside))
    with pytest.raises(
        DemoError, match=r"leads to .*outside of the checkpoint folder .*; expected a file in the folder"
    ):
        load(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_link_to_weights_outside_of_the_folder(folder: Path, indexed: bool) -> None:
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    (folder / WEIGHTS).symlink_to("../outside.safetensors")
    if indexed:
        write_index(folder, WEIGHTS)
    with pytest.raises(DemoError, match="outside of the checkpoint folder"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", INDEX])
def test_a_link_to_a_json_file_outside_of_the_folder(folder: Path, name: str) -> None:
    outside = folder.parent / "outside.json"
    outside.write_text(json.dumps(CASE["config"]), encoding="utf-8")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(DemoError, match="outside of the checkpoint folder"):
        load(folder)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("a\0b", "is not a file name"),
        ("\ud800", "is not a file name"),
        ("x" * 5000, "does not exist"),
        ("loop", "does not exist"),
        (".", "is not a regular file"),
        ("fifo", "is not a regular file"),
    ],
    ids=["null", "surrogate", "long", "loop", "folder", "fifo"],
)
def test_a_shard_that_is_no_file(folder: Path, shard: str, message: str) -> None:
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    write_index(folder, shard)
    with pytest.raises(DemoError, match=message):
        load(folder)


def test_a_snapshot_of_the_hub_s_cache_links_to_its_blobs(folder: Path) -> None:
    """``models--x/snapshots/<revision>/model.safetensors`` is a link to ``models--x/blobs/<hash>``."""
    expected = load(folder)
    blobs, snapshot = folder.parent / "models--x" / "blobs", folder.parent / "models--x" / "snapshots" / "revision"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, name in enumerate(("config.json", WEIGHTS)):
        (folder / name).rename(blobs / str(i))
        (snapshot / name).symlink_to(f"../../blobs/{i}")
    assert torch.equal(load(snapshot).model.lm_head.weight, expected.model.lm_head.weight)
    (snapshot / "generation_config.json").symlink_to("../../../models--y")
    with pytest.raises(DemoError, match="outside of the checkpoint folder"):
        load(snapshot)


@pytest.mark.parametrize("stop", ["2", [2, "3"], -1, 61, True, {"id": 2}, [[2]], 2.0])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_stop_tokens(folder: Path, name: str, stop: object) -> None:
    (folder / name).write_text(json.dumps(CASE["config"] | {"eos_token_id": stop}), encoding="utf-8")
    with pytest.raises(DemoError, match=rf"eos_token_id of {name} is .*; expected a token .* from 0 to 60; correct"):
        load(folder)


def test_a_weight_that_stands_in_two_shards(folder: Path) -> None:
    files = {name: f"{i % 2}.safetensors" for i, name in enumerate(CASE["weights"])}
    for file in set(files.values()):
        save_file(tensors(), folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    with pytest.raises(DemoError, match=r"is in 1\.safetensors and in another file; expected it once"):
        load(folder)


def test_weights_without_an_index_are_those_of_the_one_file(folder: Path) -> None:
    expected = load(folder)
    save_file({name: t + 1 for name, t in tensors().items()}, folder / "consolidated.safetensors")
    assert torch.equal(load(folder).model.lm_head.weight, expected.model.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_that_are_quantized(folder: Path, dtype: torch.dtype) -> None:
    save_file(tensors() | {"lm_head.weight": torch.zeros(61, 32).to(dtype)}, folder / WEIGHTS)
    with pytest.raises(DemoError, match=rf"lm_head.weight in {WEIGHTS} is {dtype}; expected one of torch.float64"):
        load(folder)
