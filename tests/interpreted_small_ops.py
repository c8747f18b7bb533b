"""Run by ``test_triton_interpreter`` with TRITON_INTERPRET=1: the tests of small ops, on the kernels of triton."""

from __future__ import annotations

import pytest
from redirect import redirected
from test_append import *  # noqa: F403
from test_bits import *  # noqa: F403
from test_far_apart import *  # noqa: F403
from test_merge import *  # noqa: F403
from test_pages import *  # noqa: F403

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
interpreted = redirected("attn_ops.kernels.triton")
