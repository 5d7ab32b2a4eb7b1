"""Writes Arrow streams of columns, and reads responses, with Arrow's own library."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from server.fake_engine import Bags, Weights

from embedserve_proto import embedding_pb2 as pb

ARROW = "application/vnd.apache.arrow.stream"
Layout = Callable[[Any], Any]
"""Function from the type of the values of a column to the type of the column."""


def columns_of(
    bags: Bags,
    weights: Weights | None = None,
    *,
    layout: Layout = pa.list_,
    ids: Any = None,
    weight: Any = None,
) -> Any:
    """Returns a table with these features. Ids are strings if any id of the feature is. Other ids
    are int64 and weights float32, unless the arguments name another type."""
    arrays = {}
    for name, one in bags.items():
        are_strings = any(isinstance(value, str) for bag in one for value in bag or ())
        arrays[name] = pa.array(one, layout(pa.string() if are_strings else ids or pa.int64()))
    for name, one in (weights or {}).items():
        arrays[f"{name}.weights"] = pa.array(one, layout(weight or pa.float32()))
    return pa.table(arrays)


def stream_of(
    table: Any, *, rows: int | None = None, options: Mapping[str, str] | None = None
) -> bytes:
    """Returns ``table`` as a stream with at most ``rows`` rows a batch, and ``options`` as
    metadata."""
    if options is not None:
        table = table.replace_schema_metadata({f"embedserve.{k}": v for k, v in options.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def read_table(body: bytes) -> Any:
    """Returns the table of a response, and validates its arrays in full."""
    with pa.ipc.open_stream(body) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return table


def metadata_in(table: Any) -> dict[str, Any]:
    """Returns the entries of the metadata of a response."""
    entries = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert all(key.startswith("embedserve.") for key in entries)
    entries = {key.removeprefix("embedserve."): value for key, value in entries.items()}
    return {key: value if key == "model" else json.loads(value) for key, value in entries.items()}


def vectors(column: Any) -> np.ndarray:
    """Returns a column of fixed-size lists, or of lists of fixed-size lists, as [n, dim]."""
    array = column.combine_chunks()
    if not pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    flat: np.ndarray = array.flatten().to_numpy()
    return flat.reshape(len(array), array.type.list_size)


def message_of(bags: Bags, weights: Weights | None = None) -> pb.EmbedRequest:
    """Returns these features as a protobuf message; ``string_keys`` names the features with
    strings."""
    request = pb.EmbedRequest(keys=list(bags))
    for name, of_feature in bags.items():
        flat = [one for bag in of_feature for one in bag]
        request.lengths.extend(map(len, of_feature))
        if any(isinstance(one, str) for one in flat):
            request.string_keys.append(name)
            request.string_ids.extend(flat)
        else:
            request.ids.extend(flat)
        if weights:
            given = weights.get(name, [[1.0] * len(bag) for bag in of_feature])
            request.weights.extend(one for bag in given for one in bag)
    return request
