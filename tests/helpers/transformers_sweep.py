"""Every architecture of transformers at a small size, with ``"attn_ops"`` against its own attention.

``python -m helpers.transformers_sweep [NAME ...]`` in ``tests/`` prints a line for each, and fails if one computes
other numbers or raises an error that is none of this library's. It takes some minutes: run it for a new release of
transformers.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.errors import AttnOpsError
from attn_ops.integrations.transformers import NAME, register

transformers: Any = importlib.import_module("transformers")
modeling_auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")

MAX_PARAMETERS = 15_000_000
"""A configuration that ignores the small sizes is not built."""

STEPS = 12
TOLERANCE = 2e-4
"""Tolerance relative to the largest logit, or to 1. Models compute in float32."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "hidden_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 256),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 48},
    **{"qk_rope_head_dim": 16, "rotary_dim": 8, "sliding_window": 8, "vocab_size": 97},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"image_size": 32, "patch_size": 8, "num_channels": 3},
}
"""Sizes of a model, by the names that configurations have for them."""

OTHERWISE: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "head_dim": None},
    {"num_hidden_layers": None, "head_dim": None},
)
"""Changes of the sizes, in the order in which they are tried. None leaves a size out."""


class Family(NamedTuple):
    """Architectures of one automatic class, and the calls that are compared.

    mapping  of ``transformers.models.auto.modeling_auto``
    calls    keyword arguments of a model, and which rows of the result count; None for all
    """

    auto: Any
    mapping: str
    calls: Sequence[tuple[dict[str, Tensor], Tensor | None]]


def _families() -> dict[str, Family]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (3, 21), generator=generator)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :5] = 0
    right[1, 15:] = 0
    decoder: dict[str, Tensor] = {"decoder_input_ids": ids[:, :7]}
    text = [({"input_ids": ids}, None), ({"input_ids": ids, "attention_mask": left}, left.bool())]
    masked = [*text, ({"input_ids": ids, "attention_mask": right}, right.bool())]
    translated = [(call | decoder, None) for call, _ in masked]
    images = [({"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}, None)]
    return {
        "causal": Family(transformers.AutoModelForCausalLM, "CAUSAL_LM", text),
        "masked": Family(transformers.AutoModelForMaskedLM, "MASKED_LM", masked),
        "sequence to sequence": Family(transformers.AutoModelForSeq2SeqLM, "SEQ_TO_SEQ_CAUSAL_LM", translated),
        "image": Family(transformers.AutoModelForImageClassification, "IMAGE_CLASSIFICATION", images),
    }


class NotBuiltError(Exception):
    """The architecture has no model of these sizes."""


def _build(family: Family, name: str) -> Any:
    """A model with random weights that computes by its own attention."""
    kind = transformers.CONFIG_MAPPING[name]
    reason = ""
    for changes in OTHERWISE:
        try:
            default, sizes = kind(), SIZES | changes
            numbers = {k for k in sizes if isinstance(getattr(default, k, ()), int | float | None)}
            config = kind(**{k: v for k, v in sizes.items() if k in numbers and v is not None})
            with torch.device("meta"):
                size = sum(p.numel() for p in family.auto.from_config(config).parameters())
            if size > MAX_PARAMETERS:
                raise NotBuiltError(f"{size} parameters")
            torch.manual_seed(0)
            model = family.auto.from_config(config, attn_implementation="eager").eval()
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.15)
            model(**family.calls[0][0])
        except Exception as error:  # whatever transformers says of a configuration that nobody has tried
            reason = f"{type(error).__name__}: {error}"
        else:
            return model
    raise NotBuiltError(reason)


def _results(model: Any, family: Family) -> list[Tensor]:
    results = [model(**call)[0] for call, _ in family.calls]
    if family.mapping == "CAUSAL_LM":
        call, _ = family.calls[1]
        results.append(model.generate(**call, max_new_tokens=STEPS, do_sample=False))
    return results


def _differences(found: list[Tensor], expected: list[Tensor], family: Family) -> Iterator[float]:
    """The difference of each call relative to what is allowed; for generated tokens, infinity if they differ."""
    for a, b, (_, rows) in zip(found, expected, family.calls, strict=False):
        difference = torch.where(a == b, 0.0, a - b).abs().nan_to_num(nan=float("inf"))
        if rows is not None and rows.shape == b.shape[:2]:
            difference = difference[rows]
        largest = b.where(b.isfinite(), 0.0).abs().max().item()
        yield difference.max().item() / (TOLERANCE * max(1.0, largest))
    for a, b in zip(found[len(family.calls) :], expected[len(family.calls) :], strict=True):
        yield 0.0 if torch.equal(a, b) else float("inf")


@torch.no_grad()
def sweep(family: Family, name: str) -> tuple[str, str]:
    """A word for the outcome, and what there is to say of it."""
    try:
        model = _build(family, name)
        expected = _results(model, family)
    except Exception as error:
        return "not built", str(error)
    try:
        model.set_attn_implementation(NAME)
        keeps_its_own = model.config._attn_implementation != NAME
        if keeps_its_own:  # also if it is made with the name
            weights = model.state_dict()
            model = family.auto.from_config(copy.deepcopy(model.config), attn_implementation=NAME).eval()
            model.load_state_dict(weights)
        found = _results(model, family)
    except AttnOpsError as error:
        return "refused", str(error)
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error}"
    worst = max(_differences(found, expected, family))
    if worst > 1 and getattr(model, "_supports_sdpa", False):  # rows of padding may reach others, by a recurrence
        model.set_attn_implementation("sdpa")
        worst = min(worst, max(_differences(found, _results(model, family), family)))
    if worst > 1:
        return "DIFFERENT", f"{worst:.1f} times the tolerance"
    return ("kept its own", "transformers does not replace its attention") if keeps_its_own else ("equal", "")


def main() -> int:
    transformers.logging.set_verbosity_error()
    register()
    total: Counter[str] = Counter()
    for kind, family in _families().items():
        names = getattr(modeling_auto, f"MODEL_FOR_{family.mapping}_MAPPING_NAMES")
        for name in (name for name in names if len(sys.argv) == 1 or name in sys.argv[1:]):
            outcome, text = sweep(family, name)
            total[outcome] += 1
            print(f"{kind}: {name}: {outcome} {' '.join(text.split())[:160]}".rstrip(), flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in total.most_common()))
    return 1 if total["DIFFERENT"] or total["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
