"""Merging, appending, page tables and bits: the tests of the CPU, on the kernels of the triton backend."""

from __future__ import annotations

import pytest
from attention.test_merge_states import *  # noqa: F403
from helpers.backends import ON_GPU, redirected
from paging.test_append import *  # noqa: F403
from paging.test_packbits import *  # noqa: F403
from paging.test_page_table import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
on_gpu = redirected(ON_GPU)
