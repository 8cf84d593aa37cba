"""One rank of a program on the emulated device: `python -m tests.emulator.run MODULE FLAG…`."""

import runpy
import sys

from tests.emulator import device

if __name__ == "__main__":
    device.install()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        device.report()
