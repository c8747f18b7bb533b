"""Where a run's requests come from: a seed, or texts through the checkpoint's tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_ops.demo.engine import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "A paged key-value cache stores the keys and values of a sequence in pages that need not be neighbours, so",
    "Once upon a time",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at a lower temperature, because",
    "1, 1, 2, 3, 5, 8, 13,",
    "In a library that never closes, a reader once asked the night clerk for a book without a title. The clerk "
    "thought for a while, walked to the far end of the third floor and came back with",
    "The three laws of motion are:",
)
PROMPT_TOKENS = (4, 64)
ARRIVALS_PER_TURN = 2


def from_seed(count: int, vocab_size: int, max_new_tokens: int, seed: int) -> list[Request]:
    """``count`` prompts of random tokens and of lengths in :data:`PROMPT_TOKENS`."""
    source = random.Random(seed)
    prompts = [[source.randrange(vocab_size) for _ in range(source.randint(*PROMPT_TOKENS))] for _ in range(count)]
    return arriving(prompts, max_new_tokens)


def from_texts(texts: Sequence[str], tokenizer: Tokenizer, count: int, max_new_tokens: int) -> list[Request]:
    """``count`` prompts, ``texts`` in turn."""
    return arriving([tokenizer.encode(texts[i % len(texts)]).ids for i in range(count)], max_new_tokens)


def arriving(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Request]:
    """Requests that arrive :data:`ARRIVALS_PER_TURN` at a time."""
    return [Request(prompt, max_new_tokens, i // ARRIVALS_PER_TURN) for i, prompt in enumerate(prompts)]
