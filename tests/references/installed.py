"""Where a package that tests compare with is installed: outside the environment, so that megarl cannot import it."""

import importlib.metadata
import pathlib
import sys

INSTALL = 'python -m pip install --no-deps --ignore-requires-python --target "$VENV/references" {}=={}'


def folder_of(package: str, version: str) -> pathlib.Path:
    """The package's folder, in `references` under the prefix of the running interpreter or on the import path.

    Raises:
        RuntimeError: it is not installed, or in another version.
    """
    places = [str(pathlib.Path(sys.prefix) / "references"), *sys.path]
    found = list(importlib.metadata.distributions(name=package, path=places))
    for distribution in found:
        if distribution.version == version:
            return pathlib.Path(distribution.locate_file(package))
    versions = ", ".join(distribution.version for distribution in found) or "nothing"
    install = INSTALL.format(package, version)
    raise RuntimeError(f"these tests compare with {package} {version}, found {versions}; install it with: {install}")
