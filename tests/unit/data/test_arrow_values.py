"""Types of Arrow: the values of each in plain JSON types, from Parquet and Arrow files, or a refusal that names it."""

import datetime
import json
import uuid

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megarl.data.columns import SFT, Columns
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.texts.refusals import refusal

WHEN = datetime.datetime(2024, 1, 2, 3, 4, 5)


def json_array(values: list) -> pyarrow.Array:
    texts = pyarrow.array([None if value is None else json.dumps(value) for value in values], pyarrow.string())
    return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts)


def stored_json(texts: list[str]) -> pyarrow.Array:
    return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts))


def tensors() -> pyarrow.Array:
    return pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2, 2, 2), np.float32))


def in_struct(array: pyarrow.Array, name: str = "x") -> pyarrow.Array:
    return pyarrow.StructArray.from_arrays([array], [name])


def in_list(array: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays(pyarrow.array(range(len(array) + 1), pyarrow.int32()), array)


def opaque() -> pyarrow.Array:
    return pyarrow.ExtensionArray.from_storage(pyarrow.opaque(pyarrow.string(), "t", "v"), pyarrow.array(["a", "b"]))


def write(path, column: pyarrow.Array, metadata: dict | None = None, field_metadata: dict | None = None) -> str:
    field = pyarrow.field("v", column.type, metadata=field_metadata)
    schema = pyarrow.schema([("prompt", pyarrow.string()), field], metadata=metadata)
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"] * len(column)), column], schema=schema)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return str(path)


MIXED = [{"a": None, "b": [1, "x"]}, "007", None, 2**64, [], "é"]
ids = [uuid.UUID(int=1), uuid.UUID(int=2**127)]
VALUES = {
    "json": (lambda: json_array(MIXED), MIXED),
    "json in a list": (lambda: in_list(json_array(MIXED)), [[value] for value in MIXED]),
    "json in a struct": (lambda: in_struct(json_array(MIXED)), [{"x": value} for value in MIXED]),
    "json in a struct of a list": (
        lambda: in_list(in_struct(json_array(MIXED))), [[{"x": value}] for value in MIXED],
    ),
    "text of a number": (
        lambda: stored_json(["007", "1.50", "1.0", "-0", "NaN"]),
        ["007", "1.50", 1.0, 0, None],
    ),
    "uuid": (
        lambda: pyarrow.array([each.bytes for each in ids], pyarrow.uuid()), [str(each) for each in ids],
    ),
    "bool8": (
        lambda: pyarrow.ExtensionArray.from_storage(pyarrow.bool8(), pyarrow.array([1, 0], pyarrow.int8())),
        [True, False],
    ),
    "dictionary": (lambda: pyarrow.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    "large list": (lambda: pyarrow.array([[1], []], pyarrow.large_list(pyarrow.int8())), [[1], []]),
    "string view": (lambda: pyarrow.array(["a", "b" * 99], pyarrow.string_view()), ["a", "b" * 99]),
    "null": (lambda: pyarrow.nulls(2), [None, None]),
    "map": (
        lambda: pyarrow.array([[(1, 0.5)], []], pyarrow.map_(pyarrow.int8(), pyarrow.float32())), [{"1": 0.5}, {}],
    ),
    "uint64": (lambda: pyarrow.array([2**64 - 1, 0], pyarrow.uint64()), [2**64 - 1, 0]),
    "date": (lambda: pyarrow.array([WHEN.date()]), ["2024-01-02"]),
    "timestamp": (lambda: pyarrow.array([WHEN], pyarrow.timestamp("us")), ["2024-01-02T03:04:05"]),
    "duration": (lambda: pyarrow.array([datetime.timedelta(seconds=90)]), [90.0]),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", VALUES)
def test_values(name, suffix, tmp_path):
    make, expected = VALUES[name]
    prompts = load_prompts(write(tmp_path / f"p.{suffix}", make()))
    assert [(prompt.metadata or {}).get("v") for prompt in prompts] == expected


def test_columns_of_json_by_the_features_of_the_schema(tmp_path):
    """`datasets` decodes texts that its features call JSON; a file that lost the type has these features."""
    texts = pyarrow.array([{"x": json.dumps({"a": 1}), "y": "[2]"}])
    json_type = {"_type": "Json"}
    for feature, expected in (
        ({"x": json_type, "y": {"dtype": "string", "_type": "Value"}}, {"x": {"a": 1}, "y": "[2]"}),
        ({"x": json_type | {"decode": False}, "y": json_type}, {"x": '{"a": 1}', "y": [2]}),
    ):
        features = {"info": {"features": {"v": feature}}}
        (prompt,) = load_prompts(write(tmp_path / "p.parquet", texts, {"huggingface": json.dumps(features)}))
        assert prompt.metadata == {"v": expected}
    for harmful in ("{", "[]", '{"info": 3}', '{"info": {"features": {"v": [[]]}}}', "[" * 100_000):
        (prompt,) = load_prompts(write(tmp_path / "p.parquet", texts, {"huggingface": harmful}))
        assert prompt.metadata == {"v": {"x": '{"a": 1}', "y": "[2]"}}


def test_a_field_inside_a_column_of_json(tmp_path):
    column = json_array([{"ground_truth": 7}, {"ground_truth": "7", "style": "rule"}])
    path = write(tmp_path / "p.parquet", column)
    table = parquet.read_table(path).rename_columns(["prompt", "reward_model"])
    parquet.write_table(table, path)
    prompts = load_prompts(path)
    assert [prompt.answer for prompt in prompts] == ["7", "7"] and "reward_model.ground_truth" in prompts.notes[0]


REFUSED = {
    "tensor": (tensors, "v has the extension type arrow.fixed_shape_tensor"),
    "tensor inside": (lambda: in_list(in_struct(tensors())), "v[].x has the extension type arrow.fixed_shape_tensor"),
    "opaque": (opaque, "v has the extension type arrow.opaque"),
    "map with other keys": (
        lambda: pyarrow.array([[(1.5, 1)]], pyarrow.map_(pyarrow.float64(), pyarrow.int8())), "v has the type map<",
    ),
    "interval": (lambda: pyarrow.array([(1, 2, 3)], pyarrow.month_day_nano_interval()), "v has the type month"),
    "union": (
        lambda: pyarrow.UnionArray.from_dense(
            pyarrow.array([0], pyarrow.int8()), pyarrow.array([0], pyarrow.int32()), [pyarrow.array([1])]
        ), "v has the type dense_union",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_without_a_form_in_json_is_refused_by_name(name, tmp_path):
    make, message = REFUSED[name]
    path = write(tmp_path / ("p.parquet" if name.startswith("tensor") else "p.arrow"), make())
    said = refusal(load_prompts, path)
    assert f"the column {message}" in said and "leave it out" in said


def test_an_extension_type_that_pyarrow_does_not_know(tmp_path):
    name, column = {b"ARROW:extension:name": b"geoarrow.wkt"}, pyarrow.array(["POINT (1 2)"])
    for suffix in ("parquet", "arrow"):
        path = write(tmp_path / f"p.{suffix}", column, field_metadata=name)
        with pytest.raises(UsageError, match=r"the column v has the extension type geoarrow.wkt, which is not read"):
            load_prompts(path)
    array_of_datasets = {b"ARROW:extension:name": b"datasets.features.features.Array2DExtensionType"}
    path = write(tmp_path / "p.arrow", pyarrow.array([[[1.5]]]), field_metadata=array_of_datasets)
    assert load_prompts(path)[0].metadata == {"v": [[1.5]]}
    table = pyarrow.table({"question": ["a"], "answer": ["b"], "v": tensors().slice(0, 1)})
    parquet.write_table(table, tmp_path / "p.parquet")  # a column that the program does not read
    assert load_prompts(str(tmp_path / "p.parquet"), columns=Columns(SFT))[0].response == "b"


def test_a_text_that_is_no_json_is_named(tmp_path):
    for text in ('{"a": ', "[" * 100_000):
        said = refusal(load_prompts, write(tmp_path / "p.parquet", stored_json(['{"a": 1}', text])))
        assert "cannot be read after row 1: v says that it is JSON, but a text in it is none" in said


def test_a_time_is_no_answer(tmp_path):
    """Readers of JSON make times of texts such as 2024-01-02, and nobody knows how the text was."""
    table = pyarrow.table({"question": ["a"], "answer": pyarrow.array([WHEN], pyarrow.timestamp("s"))})
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=r"p\.parquet:1: answer is a time; what its text was is not known"):
        load_prompts(str(tmp_path / "p.parquet"))


def test_one_long_text_of_json_in_many_rows(tmp_path, monkeypatch):
    """Rows that name the same text are read few at a time, so that the limit is reached before memory is taken."""
    monkeypatch.setattr("megarl.data.content_limit.MIN_CONTENT", 2**20)
    table = pyarrow.table({"prompt": ["a"] * 100, "v": json_array(["x" * 2**19] * 100)})
    parquet.write_table(table, tmp_path / "p.parquet", compression="zstd", row_group_size=100)
    with pytest.raises(UsageError, match="expands to more than 1,048,576 bytes"):
        load_prompts(str(tmp_path / "p.parquet"))
