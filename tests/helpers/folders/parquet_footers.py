"""Parquet files with other footers: the footer as a tree of values, some of which are changed.

The format: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Bytes changed at random
leave most footers unreadable; these stay readable, and lie.
"""

import random
import struct
from typing import Any

TRUE, FALSE, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, (9, 10), 12
NUMBERS = [0, 1, -1, 7, 100, 10**6, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)]
TEXTS = [b"", b"\xff" * 8, b"a" * 2**20, b"\n" * 5, b"..."]


def split(data: bytes) -> tuple[bytes, list]:
    """What comes before the footer of a file, and the footer: a struct."""
    start = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    return data[:start], _Reader(data, start).value(STRUCT)


def join(before: bytes, footer: list) -> bytes:
    """A file with this footer."""
    encoded = _encoded(STRUCT, footer)
    return before + encoded + struct.pack("<I", len(encoded)) + b"PAR1"


def field(of: list, number: int) -> list:
    """A field of a struct: [number, type, value]."""
    return next(each for each in of if each[0] == number)


def lying(data: bytes, draw: random.Random) -> bytes:
    """A file of whose footer one to three values are others."""
    before, footer = split(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        holder, place, kind = draw.choice(list(_places(STRUCT, footer)))
        holder[place] = _other(kind, holder[place], draw)
    return join(before, footer)


class _Reader:
    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self) -> int:
        """An unsigned number, 7 bits a byte."""
        found = shift = 0
        while True:
            (byte,) = self.take(1)
            found, shift = found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found

    def signed(self) -> int:
        found = self.number()
        return found >> 1 ^ -(found & 1)

    def value(self, kind: int) -> Any:
        """A number, bytes, a boolean (in lists), a list [type, values] or a struct [[number, type, value], …]."""
        if kind in (TRUE, FALSE, BYTE):
            return self.take(1)[0]
        if kind in INTEGERS:
            return self.signed()
        if kind in (DOUBLE, BINARY):
            return self.take(8 if kind == DOUBLE else self.number())
        return self._list() if kind in LISTS else self._struct()

    def _list(self) -> list:
        (head,) = self.take(1)
        count = head >> 4 if head >> 4 < 15 else self.number()
        return [head & 15, [self.value(head & 15) for _ in range(count)]]

    def _struct(self) -> list:
        fields, number = [], 0
        while head := self.take(1)[0]:
            number = number + (head >> 4) if head >> 4 else self.signed()
            kind = head & 15
            fields.append([number, kind, None if kind in (TRUE, FALSE) else self.value(kind)])
        return fields


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _signed(value: int) -> bytes:
    return _number(value << 1 if value >= 0 else (-value << 1) - 1)


def _encoded(kind: int, value: Any) -> bytes:
    if value is None:
        return b""
    if kind in (TRUE, FALSE, BYTE):
        return bytes([value])
    if kind in INTEGERS:
        return _signed(value)
    if kind in (DOUBLE, BINARY):
        return (_number(len(value)) if kind == BINARY else b"") + value
    if kind in LISTS:
        inner, values = value
        head = bytes([15 << 4 | inner]) + _number(len(values))
        return head + b"".join(_encoded(inner, each) for each in values)
    return b"".join(bytes([inner]) + _signed(number) + _encoded(inner, each) for number, inner, each in value) + b"\0"


def _places(kind: int, value: list):
    """(list, index, type) of every value in a struct or list."""
    inner = value if kind == STRUCT else value[1]
    for place, each in enumerate(inner):
        holder, index, of = (each, 2, each[1]) if kind == STRUCT else (inner, place, value[0])
        if of in LISTS or of == STRUCT:
            yield from _places(of, holder[index])
        yield holder, index, of


def _other(kind: int, value: Any, draw: random.Random) -> Any:
    if kind in INTEGERS:
        return draw.choice([*NUMBERS, value + 1, value - 1, value * 2])
    if kind == BINARY:
        return draw.choice([*TEXTS, value[:-1], value + b"\0"])
    if kind in LISTS and value[1]:
        inner, values = value
        return [inner, draw.choice([[], values[1:], values + values[:1], values * 20, values[::-1]])]
    if kind == STRUCT and value:
        return draw.choice([value[1:], value[:-1], value + value[:1]])
    return value
