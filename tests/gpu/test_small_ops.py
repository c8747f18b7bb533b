"""Merging, appending, page tables and bits: the tests of the CPU, on the kernels of the triton backend."""

from __future__ import annotations

import pytest
from redirect import ON_GPU, redirected
from test_append import *  # noqa: F403
from test_bits import *  # noqa: F403
from test_merge import *  # noqa: F403
from test_pages import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
on_gpu = redirected(ON_GPU)
