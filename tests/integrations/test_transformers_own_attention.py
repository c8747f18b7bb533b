"""Models of transformers with code of their own for attention, or that reads the mask."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.transformers_models import SIZES, TOLERANCE, tokens

from attn_ops.errors import UnsupportedError


@pytest.mark.parametrize("kind", ["bigbird_pegasus", "nllb-moe"])
def test_models_that_read_the_mask(kind: str, transformers: Any) -> None:
    from transformers.masking_utils import create_bidirectional_mask

    config = transformers.CONFIG_MAPPING[kind]()
    config._attn_implementation = "attn_ops"
    with pytest.raises(UnsupportedError, match=rf"{kind} reads the attention mask in the model's own code.*'eager'"):
        create_bidirectional_mask(config, inputs_embeds=torch.zeros(2, 9, 64), attention_mask=None)
    config.is_encoder_decoder = False  # a decoder alone
    create_bidirectional_mask(config, inputs_embeds=torch.zeros(2, 9, 64), attention_mask=None)


OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    "gpt_neox_japanese": {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    "falcon": {"num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Types of models that do not look the name up, and small sizes of them."""


@pytest.mark.parametrize("by_name", [True, False], ids=["made with the name", "set"])
@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_models_with_attention_of_their_own_keep_it(kind: str, by_name: bool, transformers: Any) -> None:
    """And their masks: bounds of two tokens would broadcast to scores of two tokens."""
    config = transformers.CONFIG_MAPPING[kind](vocab_size=64, hidden_size=64, **OWN_ATTENTION[kind])
    own = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    more = {"attn_implementation": "attn_ops"} if by_name else {}
    found = transformers.AutoModelForCausalLM.from_config(config, **more).eval()
    if not by_name:
        found.set_attn_implementation("attn_ops")
    found.load_state_dict(own.state_dict())
    assert found.config._attn_implementation in ("eager", "sdpa")
    with torch.no_grad():
        for rows in (1, 2, 3, 7):
            ids = tokens()[:, :rows]
            torch.testing.assert_close(found(ids).logits, own(ids).logits, **TOLERANCE)


SOURCE = """
from torch import nn
from transformers import PreTrainedModel
class Attention(nn.Module):
    pass  # {}
class Model(PreTrainedModel):
    pass
"""


@pytest.mark.parametrize(
    ("code", "expected"), [("ALL_ATTENTION_FUNCTIONS[config._attn_implementation]", True), ("softmax", False)]
)
def test_the_source_of_a_model_says_whether_it_looks_attention_up(
    code: str, expected: bool, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"a_model_{expected}"
    (tmp_path / f"{name}.py").write_text(SOURCE.format(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module(name).Model
    made = kind._from_config(transformers.LlamaConfig(**SIZES), attn_implementation="attn_ops")
    assert (made.config._attn_implementation == "attn_ops") is expected


def test_a_model_without_source_has_the_attention_of_its_base(transformers: Any) -> None:
    """As one that is defined in a notebook."""
    config = transformers.LlamaConfig(**SIZES)
    kind = type("Notebook", (transformers.LlamaForCausalLM,), {"__module__": "a notebook"})
    alone = type("Alone", (transformers.PreTrainedModel,), {"__module__": "a notebook"})
    for found in (kind, alone):
        made = found._from_config(copy.deepcopy(config), attn_implementation="attn_ops")
        assert made.config._attn_implementation == "attn_ops"
