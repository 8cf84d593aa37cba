"""Compiles megarl's kernels for this processor, once: `python -m megarl build_kernels`.

    python megarl/mcore/kernels/native/build.py [SOURCES LIBRARY]

SOURCES: the folder of `operators.cpp`; LIBRARY: the file to make; default: those that megarl uses. launch/setup_env.sh
names both and runs this file alone, without megarl on the path. Reads CXX, the compiler (default c++), and
MEGARL_KERNELS_MARCH, its `-march` (default native; `haswell` leaves AVX2 alone); each has a library of its own. Prints
one line and exits with 1 if there is no compiler or it fails; megarl then uses PyTorch's operators.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared"]


def command(compiler: str, sources: Path, library: Path) -> list[str]:
    """The compiler's command line."""
    from torch.utils import cpp_extension

    flags = [*FLAGS, f"-march={os.environ.get('MEGARL_KERNELS_MARCH') or 'native'}"]
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    # torch's own OpenMP is loaded first, so that both share one pool of threads.
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    return [compiler, *flags, *includes, str(sources / "operators.cpp"), *libraries, "-o", str(library)]


def build(sources: Path, library: Path) -> str | None:
    """Compiles; returns why it failed, None after success."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return f"no C++ compiler {os.environ.get('CXX', 'c++')}"
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{library.parent}: {error.strerror}"
    made = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run(command(compiler, sources, made), capture_output=True, text=True, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        return f"{compiler} failed: {(errors or ['no message'])[0]}"
    made.rename(library)
    return None


def main(argv: list[str]) -> int:
    """Builds, and prints one line if it fails or chose the file itself. Returns the exit status, 2 for wrong use."""
    if len(argv) not in (0, 2) or argv[:1] in (["-h"], ["--help"]):
        print("usage: build_kernels [SOURCES LIBRARY]", file=sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    if argv:
        sources, library = map(Path, argv)
    else:
        from megarl.mcore.kernels import native

        sources, library = native.SOURCES, native.library_path()
        if library.exists():
            print(f"compiled kernels for this processor are there: {library}")
            return 0
    reason = build(sources, library)
    if reason is not None:
        print(f"no compiled kernels, so PyTorch's operators are used: {reason}")
    elif not argv:
        print(f"compiled kernels for this processor: {library}")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
