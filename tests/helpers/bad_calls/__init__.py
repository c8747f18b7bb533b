"""The table of wrong calls of ops: what is wrong with each, and what the error must say."""

from helpers.bad_calls.attention import ATTENTION
from helpers.bad_calls.base import ROWS, TOKENS, Bad, longer
from helpers.bad_calls.others import OTHERS
from helpers.bad_calls.plans import PLANS
from helpers.bad_calls.tensors import TENSORS

BAD = [*TENSORS, *ATTENTION, *PLANS, *OTHERS]

__all__ = ["BAD", "ROWS", "TOKENS", "Bad", "longer"]
