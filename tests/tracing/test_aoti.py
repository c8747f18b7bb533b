"""AOTInductor: the packaged decode step in Python, and in a C++ process without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import decoder as d
import pytest
import torch

from attn_ops.demo.package import build_runner
