"""The tests that need a CUDA device."""

import sys

import pytest

sys.exit(pytest.main(["-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]))
