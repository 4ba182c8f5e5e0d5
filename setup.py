"""The compiled half of flodl_fast; everything else about the package stands in pyproject.toml.

Build switches, read from the environment (CONTRIBUTING.md, "Builds of other kinds", shows them in use):

FLODL_FAST_DEBUG=1          no optimisation, full debug information
FLODL_FAST_COVERAGE=1       Cython line tracing, for coverage's Cython plugin
FLODL_FAST_SANITIZE=a,b     gcc and clang sanitizers, for instance address,undefined
"""

import os
from glob import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("FLODL_FAST_DEBUG") == "1"
COVERAGE = os.environ.get("FLODL_FAST_COVERAGE") == "1"
SANITIZE = os.environ.get("FLODL_FAST_SANITIZE", "")

NATIVE = "flodl_fast/_native"


def extension(name: str, kernel: str) -> Extension:
    macros = [
        ("NPY_NO_DEPRECATED_API", "NPY_1_22_API_VERSION"),
        ("NPY_TARGET_VERSION", "NPY_1_22_API_VERSION"),  # so that one build serves NumPy 1.26 and 2.x
    ]
    if COVERAGE:
        macros.append(("CYTHON_TRACE_NOGIL", "1"))
    return Extension(
        f"flodl_fast.{name}",
        sources=[f"flodl_fast/{name}.pyx", f"{NATIVE}/{kernel}.c"],
        depends=glob(f"{NATIVE}/*.h"),
        include_dirs=["flodl_fast", numpy.get_include()],
        define_macros=macros,
    )


class BuildExt(build_ext):
    """Adds the compiler's flags, portable ones only: kernels choose their instructions at run time."""

    def build_extensions(self) -> None:
        compile_flags, link_flags = self.flags(self.compiler.compiler_type)
        for ext in self.extensions:
            ext.extra_compile_args += compile_flags
            ext.extra_link_args += link_flags
        super().build_extensions()

    @staticmethod
    def flags(compiler: str) -> tuple[list[str], list[str]]:
        if compiler == "msvc":
            if SANITIZE:
                raise SystemExit("FLODL_FAST_SANITIZE needs gcc or clang")
            return (["/Od", "/Zi"], ["/DEBUG"]) if DEBUG else (["/O2", "/fp:precise"], [])
        # Contracting a multiply and an add into one rounding would change the bits of a sum.
        compile_flags = ["-ffp-contract=off", "-fvisibility=hidden"]
        # Python's own flags may ask for -g, which makes a wheel five times as large.
        compile_flags += ["-O0", "-g3"] if DEBUG else ["-O1", "-g"] if SANITIZE else ["-O3", "-g0"]
        if not SANITIZE:
            return compile_flags, []
        sanitize = f"-fsanitize={SANITIZE}"
        return [*compile_flags, sanitize, "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"], [sanitize]


setup(
    ext_modules=cythonize(
        [extension("_codec", "sha256"), extension("_round", "fold")],
        build_dir=None if COVERAGE else "build/cython",  # coverage's plugin wants the C beside the .pyx
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "embedsignature": True,
            "binding": True,
            "linetrace": COVERAGE,
        },
    ),
    cmdclass={"build_ext": BuildExt},
)
