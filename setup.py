"""The compiled part: decode kernels for x86-64 Linux. Everything else is in setup.cfg.

They are optional: without a C compiler the package installs and works, only slower on the CPU.
"""

import platform
import sys

from setuptools import Extension, setup

KERNELS = Extension(
    "actors.worker.model._kernels",
    sources=["actors/worker/model/kernels.c"],
    extra_compile_args=["-O3", "-mavx2", "-mfma", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp"],
    extra_link_args=["-fopenmp", "-lm"],
    optional=True,
)

builds = sys.platform == "linux" and platform.machine() == "x86_64"
setup(ext_modules=[KERNELS] if builds else [])
