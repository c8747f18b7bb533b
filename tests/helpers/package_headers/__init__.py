"""A header for the C++ code of packages, so that it compiles faster.

PyTorch's header for the wrapper of a package parses the name of a device by a regular expression. Half of the time to
compile a wrapper was that of ``<regex>``. The header ``regex`` of this folder includes it, and takes its code from
libtorch, where that exports it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

EXPORTED = (
    "_ZNSt8__detail9_CompilerINSt7__cxx1112regex_traitsIcEEEC1EPKcS6_RKSt6localeNSt15regex_constants18syntax_option_type"
    "E",
    "_ZNSt8__detail17__regex_algo_implIN9__gnu_cxx17__normal_iteratorIPKcNSt7__cxx1112basic_stringIcSt11char_traitsIcES"
    "aIcEEEEESaINS5_9sub_matchISB_EEEcNS5_12regex_traitsIcEEEEbT_SH_RNS5_13match_resultsISH_T0_EERKNS5_11basic_regexIT1"
    "_T2_EENSt15regex_constants15match_flag_typeENS_20_RegexExecutorPolicyEb",
)
"""Symbols that the header declares."""


def install() -> None:
    """For the compilers that this process starts, and the processes of tests."""
    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    if library.exists() and all(hasattr(ctypes.CDLL(str(library)), name) for name in EXPORTED):
        os.environ["CPLUS_INCLUDE_PATH"] = str(Path(__file__).parent)
