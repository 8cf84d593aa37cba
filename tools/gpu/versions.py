"""What this machine has, and which kernels megarl takes there."""

import importlib.metadata
import platform
import shutil
import subprocess

import torch

from tools.gpu import report

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "flash-attn", "fla-core", "transformers",
            "numpy")  # fmt: skip


def version(package: str) -> str | None:
    """The installed version; None: not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    """Prints versions, the device, and choices."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    has_smi = shutil.which(query[0]) is not None
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if has_smi else None
    report(
        python=platform.python_version(), packages={name: version(name) for name in PACKAGES}, cuda=torch.version.cuda,
        driver=driver, device=properties.name, gib=round(properties.total_memory / 2**30, 1),
        multiprocessors=properties.multi_processor_count,
    )  # fmt: skip
    from megarl.mcore.attention.backends import varlen

    report(flash=varlen.flash_kernel().__qualname__)


if __name__ == "__main__":
    main()
