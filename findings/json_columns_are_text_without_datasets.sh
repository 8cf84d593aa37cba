#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1: a column of the type Json (values of mixed shape) is stored as the Arrow extension
# `arrow.json`; datasets gives the values back, pyarrow alone their JSON text.
# Output: datasets {'x': 1}; pyarrow '{"x":1}' of type extension<arrow.json>
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need datasets==5.2.0 pyarrow==26.0.1
"$PYTHON" - 2>/dev/null <<'PYTHON'
import datasets
from pyarrow import parquet

kind = datasets.Features({"tools": datasets.Json()})
made = datasets.Dataset.from_dict({"tools": [{"x": 1}, [1, "s"]]}, features=kind)
made.to_parquet("tools.parquet")
theirs = datasets.Dataset.from_parquet("tools.parquet", cache_dir="cache")[0]["tools"]
column = parquet.read_table("tools.parquet")["tools"]
print(f"datasets {theirs!r}; pyarrow {column.to_pylist()[0]!r} of type {column.type}")
assert theirs == {"x": 1} and column.to_pylist() == ['{"x":1}', '[1,"s"]']
assert str(column.type) == "extension<arrow.json>"
PYTHON
