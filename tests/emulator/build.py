"""Builds the emulator's two libraries, once for each version of its sources and of torch."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from megarl.mcore.kernels.native import own_folder

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
SOURCES = ("runtime.c", "hooks.h", "hidden.h", "order.h", "memory.h", "refusals.h", "operators.cpp")
LIBRARIES = Path(torch.__file__).resolve().parent / "lib"  # not by a link that a checkout has to its environment


def absence() -> str | None:
    """Why the emulator cannot be built here; None: it can."""
    if not (shutil.which("gcc") and shutil.which("g++")):
        return "needs gcc and g++"
    if torch.version.cuda is None or not (LIBRARIES / "libc10_cuda.so").exists():
        return "needs a CUDA build of torch"
    return None if _cuda_headers() else "needs CUDA's headers, which Triton's package has"


def _cuda_headers() -> Path | None:
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else None
    return folder if folder and (folder / "cuda_runtime_api.h").exists() else None


def libraries() -> Path:
    """Folder of libcudart.so, libcuda.so.1 and operators.so; builds them (10 s) if they are not there."""
    digest = hashlib.sha256(f"{torch.__version__} {LIBRARIES}".encode())
    for name in (*SOURCES, Path(__file__).name):
        digest.update((HERE / name).read_bytes())
    folder = own_folder() / "emulator" / digest.hexdigest()[:16]  # as compiled kernels, once for all checkouts
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that begin together build them once
        if not folder.exists():
            made = Path(tempfile.mkdtemp(dir=folder.parent))
            _build(made)
            made.rename(folder)
    return folder


def _build(folder: Path):
    common = ["-shared", "-fPIC", "-O1", "-fexceptions", f"-I{_cuda_headers()}"]
    torch_headers = LIBRARIES.parent / "include"
    includes = [torch_headers, torch_headers / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    linked = [f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}"]
    linked += [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10", "c10_cuda")]
    _run(["gcc", *common, "-o", folder / "libcudart.so", HERE / "runtime.c"])
    shutil.copy(folder / "libcudart.so", folder / "libcuda.so.1")
    module = ["-std=c++20", "-w", "-DTORCH_EXTENSION_NAME=operators", *(f"-I{path}" for path in includes)]
    _run(["g++", *common, *module, HERE / "operators.cpp", "-o", folder / "operators.so", *linked])


def _run(command: list):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulator could not be built: {done.stderr[-3000:]}")


def environment(interprets: bool = False) -> dict[str, str]:
    """Variables of a process that the emulator runs. `interprets`: Triton's kernels, instead of their references."""
    folder, paths = libraries(), [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "LD_PRELOAD": str(folder / "libcudart.so"), "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([*paths, str(folder)]), "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1", "EMULATOR_INTERPRETS": "1" if interprets else "",
        "GPU_CHECK_THROUGH": "tests.emulator.run",
    }  # fmt: skip
