"""Files that nobody should name, and what a program makes of one: a line, in bounded memory, in bounded time."""

import os
import pickle
import resource
import signal
import struct
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from tests.helpers import worlds
from tests.helpers.forked_programs import redirect

MEMORY = 3 * 2**30  # bytes that a program may take in reading one file
LONGEST = 120  # seconds, of a test that fails
DEPTH = 100_000


def written(content: bytes | str) -> Callable[[Path], object]:
    """A file of this content."""
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def sparse(path: Path):
    """A file of a tebibyte that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(2**40)


def bomb() -> str:
    """YAML whose aliases expand to a million values."""
    lines = ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 6)]
    return "\n".join(lines) + "\n"


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "empty": written(""),
    "a tebibyte": sparse,
    "nulls": written(b"\0" * 5000),
    "not UTF-8": written(b'{"a": "\xff\xfe\x80"}\n'),
    "a pickle": written(pickle.dumps({"a": [1, 2]})),
    "half a file": lambda path: None,  # `damage` cuts it
    "a number of 400 digits": written('{"a": ' + "7" * 400 + "}\n"),
    "a number of 5,000 digits": written('{"a": ' + "7" * 5000 + "}\n"),
    "a float without end": written('{"a": 1e400}\n'),
    "deep lists": written("[" * DEPTH + "]" * DEPTH),
    "deep objects": written('{"a":' * DEPTH + "1" + "}" * DEPTH),
    "a key twice": written('{"a": 1, "a": 2}\n'),
    "a list": written("[1, 2]\n"),
    "a text": written('"text"\n'),
    "a null": written("null\n"),
    "a byte order mark": written(b"\xef\xbb\xbf\xef\xbb\xbf{}"),
    "aliases": written(bomb()),
    "a long header": written(struct.pack("<Q", 2**60) + b"{}"),
}


PLACES = ("a pipe", "a device", "a folder", "a link to nothing", "a link to itself", "a tebibyte")  # no text at all
NO_TEXT = (*PLACES, "not UTF-8")


def damage(path: Path, kind: str):
    """Puts a hostile file in the place of a file, of a folder or of nothing."""
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    if kind == "half a file":
        path.write_bytes(content[: len(content) // 2])


def _child(folder: Path, main, argv: list[str]):
    worlds.die_with_parent()
    redirect(folder)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    raise SystemExit(main(argv))


def outcome(folder: Path, main: Callable, argv: list[str]) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a tool in a fork with bounded memory; status None: it did not end.

    `folder`: of its output; `main`: takes the command line and returns the status.
    """
    worlds.warm()
    process = get_context("fork").Process(target=_child, args=(folder, main, argv))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return None, "", f"still running after {LONGEST} s"
    return process.exitcode, *((folder / name).read_text(errors="replace") for name in ("out", "err"))
