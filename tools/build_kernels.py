"""Compiles megarl's kernels for this processor into a Python environment; launch/setup_env.sh calls it.

    python tools/build_kernels.py SOURCES LIBRARY

SOURCES: the folder of `operators.cpp`. Reads CXX, the compiler (default c++). Prints one line and exits with 1 if there
is no compiler or it fails; megarl then uses PyTorch's operators.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared"]


def command(compiler: str, sources: Path, library: Path) -> list[str]:
    """The compiler's command line."""
    from torch.utils import cpp_extension

    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    # torch's own OpenMP is loaded first, so that both share one pool of threads.
    return [compiler, *FLAGS, *includes, str(sources / "operators.cpp"), *libraries, "-ltorch_cpu", "-lc10", "-o",
            str(library)]  # fmt: skip


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
    done = subprocess.run(command(compiler, sources, made), capture_output=True, text=True)
    if done.returncode:
        made.unlink(missing_ok=True)
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        return f"{compiler} failed: {(errors or ['no message'])[0]}"
    made.rename(library)
    return None


def main() -> int:
    """Builds, and prints one line."""
    reason = build(Path(sys.argv[1]), Path(sys.argv[2]))
    if reason is not None:
        print(f"no compiled kernels, so PyTorch's operators are used: {reason}")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
