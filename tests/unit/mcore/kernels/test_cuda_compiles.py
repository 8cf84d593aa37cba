"""Kernels for CUDA devices compile for an H100, also without one: Triton brings its own assembler.

Compiled kernels of exact rollouts also show in which order they add: by the layouts of their sums over threads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.mcore.recurrence import fused_chunks

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")


def printed(what: str, tmp_path, module: str = "compiled_kernels"):
    """What a module of `tests.helpers.models` prints."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.helpers.models.{module}", what]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_every_kernel_compiles_for_an_h100(tmp_path):
    for size, shared in printed("sizes", tmp_path):
        assert size > 0 and shared <= 227 * 1024  # bytes of shared memory that a block may use


@pytest.mark.nightly
@pytest.mark.skipif(fused_chunks.version() is None, reason="fla-core is not installed: pip install 'megarl[recurrent]'")
def test_kernels_of_flash_linear_attention_compile_for_an_h100(tmp_path):
    found = printed("", tmp_path, "compiled_fla")
    assert len(found) == 14 and all(size > 0 and shared <= 227 * 1024 for _, sizes in found for size, shared in sizes)


@pytest.mark.long
def test_kernels_of_rollout_and_training_add_in_the_same_order(tmp_path):
    """Attention by pages of a cache and by rows, whatever is aligned; log-probs of sampled and of known tokens;
    attention to latents."""
    attention, rows, latents = printed("orders", tmp_path)
    assert all(found == attention[0] for found in attention) and len(attention[0]) == 4
    assert all(found == latents[0] for found in latents) and len(latents[0]) == 5
    for sampled, known in rows:
        layouts = {*sampled, *known}
        assert len(layouts) == 1 and "xf32" in layouts.pop() and len(known) == 2


@pytest.mark.long
def test_no_kernel_leaves_out_a_rounding(tmp_path):
    """To 16 bits, and in rotations to 32: fused, PyTorch's operators that they replace made the first gap on a GPU."""
    found = printed("fused", tmp_path)
    assert {"_rotate_and_store", "_rotate_heads"} <= {name for name, _ in found}
    assert not [(name, fused) for name, fused in found if fused]
