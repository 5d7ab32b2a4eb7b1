"""Converts columns and tensors of other libraries to numpy arrays, without importing them.

pyarrow reads the columns and tables of pandas, and of every library with the Arrow PyCapsule
interface (pyarrow, polars). pyarrow is imported only for columns. Values are copied only if Arrow
stores them differently from numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embedserve_client.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa


class ColumnTensor(Protocol):
    """The methods of a torch tensor that the client calls."""

    def detach(self) -> Any: ...
    def cpu(self) -> Any: ...
    def numpy(self) -> Any: ...


class Column(Protocol):
    """A column, or a table of columns, that Arrow can read."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def is_tensor(value: object) -> TypeGuard[ColumnTensor]:
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy"))


def numpy_of(field: str, tensor: ColumnTensor) -> NDArray[Any]:
    """Returns the values of a dense tensor, as float32 if numpy lacks their type, such as bfloat16.
    Raises InvalidRequest for a tensor that numpy cannot hold."""
    try:
        copied = tensor.detach().cpu()
    except NotImplementedError as error:  # a tensor without data
        raise InvalidRequest(f"{field}: {error}", field=field) from error
    try:
        return _numpy(copied)
    except (TypeError, RuntimeError) as error:  # such as of a sparse tensor
        raise InvalidRequest(f"{field}: {error}", field=field) from error


def _numpy(tensor: Any) -> NDArray[Any]:
    """Returns the values of a tensor on the CPU."""
    try:
        array: NDArray[Any] = tensor.numpy()
    except TypeError:
        if not tensor.is_floating_point():
            raise
        array = tensor.float().numpy()  # float32 has all values of bfloat16 and float8
    return array


def is_column(value: object) -> TypeGuard[Column]:
    """Returns whether ``value`` is a column or a table of columns."""
    return (
        hasattr(value, "__arrow_c_stream__")
        or hasattr(value, "__arrow_c_array__")
        or type(value).__module__.partition(".")[0] == "pandas"
    )


def columns_of(table: Any) -> dict[str, Any]:
    """Returns the columns of a table by name. Raises InvalidRequest for a single column, or if two
    columns have the same name."""
    names = _names(table)
    if names is None:
        raise InvalidRequest(
            f"features: {type(table).__name__} is one column: give a mapping, or a table",
            field="features",
        )
    check_distinct(names)
    return {name: table[name] for name in names}


def check_distinct(names: Iterable[object]) -> None:
    """Raises InvalidRequest if two features have the same name."""
    seen = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"features.{name}: named twice", field=f"features.{name}")
        seen.add(name)


def _names(table: Any) -> list[Any] | None:
    """Returns the names of the columns, or None for a single column. The attribute with the names
    differs between pyarrow and other libraries."""
    if type(table).__module__.partition(".")[0] == "pyarrow":
        names = getattr(table, "column_names", None)
    else:
        names = getattr(table, "columns", None)
    return None if names is None else list(names)


def flat_and_lengths(field: str, column: Any) -> tuple[NDArray[Any] | list[Any], NDArray[np.int32]]:
    """Returns (values bag after bag, int32 [B] number of values per example). A null is an empty
    bag."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{field}: columns are read by pyarrow: pip install 'embedserve-client[jobs]'",
            field=field,
        ) from error
    try:
        return _read(field, _array(column))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{field}: {error}", field=field) from error


def _array(column: Any) -> pa.Array:
    """Returns the column as one contiguous Arrow array."""
    import pyarrow as pa

    is_stream = hasattr(column, "__arrow_c_stream__")
    array = pa.chunked_array(column) if is_stream else pa.array(column)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _read(field: str, array: pa.Array) -> tuple[NDArray[Any] | list[Any], NDArray[np.int32]]:
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = array.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = pc.list_value_length(array).fill_null(0)
        flat = array.flatten()
        if flat.null_count:
            raise InvalidRequest(f"{field}: a bag holds a null", field=field)
    else:
        lengths, flat = array.is_valid(), array
    return _values(flat), lengths.to_numpy(zero_copy_only=False).astype(np.int32, copy=False)


def _values(flat: pa.Array) -> NDArray[Any] | list[Any]:
    """Returns the values without nulls: numbers as an array, other types as a list."""
    import pyarrow.types as types

    if types.is_integer(flat.type) or types.is_floating(flat.type):
        array: NDArray[Any] = flat.drop_null().to_numpy(zero_copy_only=False)
        return array
    return [value for value in flat.to_pylist() if value is not None]
