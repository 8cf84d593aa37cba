#!/usr/bin/env bash
# pyarrow 26.0.1: read_json turns a string that looks like a time into a timestamp.
# It turns an integer of 2^64 into a double.
# So the type of an answer depends on the reader: Python's json gives the text and all digits.
# Output: datetime.datetime(2024, 1, 2, 3, 4, 5) 1.8446744073709552e+19
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need pyarrow==26.0.1
"$PYTHON" - <<'PYTHON'
import datetime
import io

from pyarrow import json

line = b'{"time": "2024-01-02 03:04:05", "count": 18446744073709551616}\n'
found = json.read_json(io.BytesIO(line)).to_pylist()[0]
print(repr(found["time"]), found["count"])
assert found["time"] == datetime.datetime(2024, 1, 2, 3, 4, 5) and isinstance(found["count"], float)
PYTHON
