"""The files that come with megarl beside its code: `configs/` and `tools/`.

In a checkout they are folders of its root; an installed wheel has copies in the folder `_bundle` of the package
(setup.py makes them).
"""

import os
from pathlib import Path

COPIES = "_bundle"


def root() -> Path:
    """The folder that has `configs/` and `tools/`."""
    copies = Path(__file__).with_name(COPIES)
    return copies if copies.is_dir() else Path(__file__).resolve().parents[1]


def find(path: str) -> Path:
    """The file of this path; a relative one below `configs/` that is not in the working directory is megarl's own."""
    given = Path(path)
    if given.parts[:1] == ("configs",) and ".." not in given.parts and not given.exists():
        own = root() / given
        return own if own.is_file() else given
    return given


def install_command(extra: str) -> str:
    """The command that installs an extra of setup.py: that of a checkout, or of an installed wheel."""
    setup = root() / "launch" / "setup_env.sh"
    return f"bash {os.path.relpath(setup)} {extra}" if setup.exists() else f"pip install 'megarl[{extra}]'"


def tools() -> dict[str, Path]:
    """The programs of `tools/` by name."""
    return {path.stem: path for path in sorted((root() / "tools").glob("*.py")) if not path.stem.startswith("_")}
