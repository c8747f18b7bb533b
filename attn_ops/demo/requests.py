"""The requests of a run: random tokens, or texts through the checkpoint's tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_ops.demo.engine import Request
from attn_ops.demo.errors import DemoError

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
"""Shortest and longest random prompt."""

ARRIVALS_PER_ITERATION = 2


def from_seed(count: int, vocab_size: int, max_new_tokens: int, seed: int) -> list[Request]:
    """``count`` prompts of random tokens, with random lengths in :data:`PROMPT_TOKENS`."""
    source = random.Random(seed)
    prompts = [[source.randrange(vocab_size) for _ in range(source.randint(*PROMPT_TOKENS))] for _ in range(count)]
    return arriving(prompts, max_new_tokens)


def from_texts(
    texts: Sequence[str], tokenizer: Tokenizer, vocab_size: int, count: int, max_new_tokens: int
) -> list[Request]:
    """``count`` prompts that repeat ``texts``.

    Raises:
        DemoError: the tokenizer gives a token that is not in the model's vocabulary.
    """
    prompts = [tokenizer.encode(texts[i % len(texts)]).ids for i in range(count)]
    largest = max((token for prompt in prompts for token in prompt), default=0)
    if largest >= vocab_size:
        raise DemoError(
            f"tokenizer.json gives token {largest} and the model has a vocabulary of {vocab_size}; expected tokens "
            "below that; use the tokenizer.json of the same checkpoint"
        )
    return arriving(prompts, max_new_tokens)


def arriving(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Request]:
    """Requests of which :data:`ARRIVALS_PER_ITERATION` arrive in each iteration of the engine."""
    return [Request(prompt, max_new_tokens, i // ARRIVALS_PER_ITERATION) for i, prompt in enumerate(prompts)]
