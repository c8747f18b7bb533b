"""A Hugging Face checkpoint folder of a Llama, Mistral, Qwen2 or Qwen3 model, loaded as the demo's model.

It reads ``config.json``, ``*.safetensors`` (one file, or shards with an index), ``generation_config.json`` for the stop
tokens, and ``tokenizer.json``. A checkpoint is untrusted input: no file outside of its folder is opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attn_ops.demo.checkpoint_config import parse_config
from attn_ops.demo.errors import DemoError
from attn_ops.demo.json_fields import Fields, read
from attn_ops.demo.model import LanguageModel, ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Checkpoint(NamedTuple):
    """A loaded checkpoint. ``tokenizer`` is None if the folder has none. ``stop_tokens`` may be empty."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    stop_tokens: frozenset[int]


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Load the checkpoint in ``folder``, with weights of ``dtype`` on ``device``.

    Raises:
        DemoError: a file is absent, malformed or outside of the folder, or the model is not supported.
    """
    if not folder.is_dir():
        raise DemoError(f"--model {folder} is not a folder; give the folder that holds config.json and *.safetensors")
    raw = read(file_in(folder, "config.json"), "config.json of a Hugging Face checkpoint")
    config = parse_config(dict(raw.values))
    stop_tokens = _stop_tokens(folder, raw, config.vocab_size)
    return Checkpoint(_load_model(folder, config, dtype, device), _load_tokenizer(folder), stop_tokens)


def file_in(folder: Path, name: str) -> Path:
    """The path of a file in ``folder``, which need not exist.

    Links may point into the folder and, in a snapshot of the Hugging Face cache, to the blobs of its repository.

    Raises:
        DemoError: the path leads out of these folders.
    """
    try:
        target = Path(os.path.realpath(folder / name))
    except ValueError as error:  # a null character
        raise DemoError(f"{name!r} is not a file name ({error}); is the checkpoint's index correct?") from error
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append((roots[0].parents[1] / "blobs").resolve())
    if not any(target.is_relative_to(root) for root in roots):
        raise DemoError(
            f"{name!r} leads to {target}, outside of the checkpoint folder {folder}; expected a file in the folder; "
            "if you trust it, copy it there, and correct the name in the index"
        )
    return folder / name


def _load_model(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    with torch.device("meta"):
        model = LanguageModel(config)
    expected = model.state_dict()
    weights = _read_weights(folder, set(expected), dtype, device)
    if config.tied_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise DemoError(f"the checkpoint lacks {len(missing)} weights, such as {missing[0]}; is it complete?")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise DemoError(
                f"{name} is {list(weight.shape)} in the checkpoint and {list(expected[name].shape)} by its "
                "config.json; expected the same shape; are config.json and weights of the same checkpoint?"
            )
    model.load_state_dict(weights, assign=True)
    model.tie()
    return model.requires_grad_(False).to(device).eval()


def _read_weights(folder: Path, names: set[str], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The weights of these names. Other tensors of the checkpoint are not used."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise DemoError('--model needs the safetensors package; pip install "attn-ops[demo]"') from error
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            loaded = load_file(path, device=str(device))
        except (SafetensorError, OSError) as error:
            raise DemoError(f"{path} cannot be read ({error}); is the download complete?") from error
        for name in loaded.keys() & names:
            if name in weights:
                raise DemoError(f"{name} is in {path.name} and in another file; expected it once; remove one of them")
            if loaded[name].dtype not in WEIGHT_DTYPES:
                raise DemoError(
                    f"{name} in {path.name} is {loaded[name].dtype}; expected one of "
                    f"{', '.join(map(str, WEIGHT_DTYPES))}; the demo does not support quantized weights"
                )
            weights[name] = loaded[name].to(dtype)
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The shards of the index, else ``model.safetensors``, else every ``*.safetensors``."""
    if (folder / INDEX).exists():
        names = _shards(read(file_in(folder, INDEX), "the index of the shards"))
    elif (folder / WEIGHTS).exists():
        names = [WEIGHTS]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise DemoError(f"{folder} holds no *.safetensors file; the demo reads no other format")
    paths = [file_in(folder, name) for name in names]
    for path in paths:
        if not os.path.exists(path):
            raise DemoError(f"{path} is named in the index and does not exist; is the download complete?")
        if not path.is_file():
            raise DemoError(f"{path} is not a regular file; expected safetensors; is the download complete?")
    return paths


def _shards(index: Fields) -> list[str]:
    index.require("weight_map")
    shards = index.child("weight_map").values.values()
    if not shards or not all(isinstance(shard, str) and shard for shard in shards):
        raise index.wrong("weight_map", "an object that gives the file name of each weight")
    return sorted(set(shards))


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    path = file_in(folder, "tokenizer.json")
    if not path.exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DemoError('tokenizer.json needs the tokenizers package; pip install "attn-ops[demo]"') from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise DemoError(f"{path} cannot be read ({error}); is the download complete?") from error


def _stop_tokens(folder: Path, config: Fields, vocab_size: int) -> frozenset[int]:
    """``eos_token_id`` of ``generation_config.json``, or of ``config.json`` if it is not there: one or several."""
    path = file_in(folder, "generation_config.json")
    generation = read(path, "generation_config.json of a Hugging Face checkpoint") if path.exists() else config
    source = generation if "eos_token_id" in generation.values else config
    stop = source.values.get("eos_token_id")
    tokens = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise source.wrong("eos_token_id", f"a token or a list of tokens, each from 0 to {vocab_size - 1}")
    return frozenset(tokens)
