"""Run by ``test_triton_interpreter`` with TRITON_INTERPRET=1: the tests of small ops, on the kernels of triton."""

from __future__ import annotations

import pytest
from attention.test_merge_states import *  # noqa: F403
from attention.test_strided_offsets import *  # noqa: F403
from paging.test_append import *  # noqa: F403
from paging.test_packbits import *  # noqa: F403
from paging.test_page_table import *  # noqa: F403

from helpers.backends import redirected

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
interpreted = redirected("attn_ops.kernels.triton")
