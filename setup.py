"""The extension module of eager calls; everything else of the package is in pyproject.toml.

It needs a C++ compiler and neither CUDA nor torch. Without a compiler the project installs without it, and eager calls
take more host time. It uses Python's limited API: one wheel serves every version from 3.10.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("attn_ops/native")
MODULE = Extension(
    "attn_ops.native._C",
    sources=[str(NATIVE / "launcher.cpp"), *sorted(map(str, (NATIVE / "extension").glob("*.cpp")))],
    depends=sorted(map(str, NATIVE.rglob("*.h"))),
    extra_compile_args=["-std=c++17", "-fvisibility=hidden", "-g0", "-DPy_LIMITED_API=0x030A0000"],
    py_limited_api=True,
    optional=True,
    language="c++",
)

setup(ext_modules=[MODULE], options={"bdist_wheel": {"py_limited_api": "cp310"}})
