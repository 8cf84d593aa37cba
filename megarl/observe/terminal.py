"""Text for a terminal: nothing that a file or a policy wrote can move the cursor, hide text or turn its direction."""

from collections.abc import Iterable, Sequence


def printable(text: object) -> str:
    """`text` on one line, with an escape such as \\x1b for each control, format and direction character."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def table(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Lines of columns that are as wide as their widest cell, aligned to the left except for some at the right end.

    Args:
        rows: printable cells, equally many in each row.
        right: number of columns at the end that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first_right = len(widths) - right
    return [
        "  ".join(
            cell.rjust(width) if number >= first_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_bytes(count: float, digits: int = 1) -> str:
    """`3.2 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(count) >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {units[power]}" if power == 0 else f"{count:.{digits}f} {units[power]}"


def ranges_text(numbers: Iterable[int]) -> str:
    """`1-3,5` of the numbers 1, 2, 3, 5, in any order."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
