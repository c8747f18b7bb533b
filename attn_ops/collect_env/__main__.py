"""``python -m attn_ops.collect_env``."""

from __future__ import annotations

from attn_ops.collect_env import collect_env

print(collect_env())
