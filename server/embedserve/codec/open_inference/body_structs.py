"""Structs that the JSON of the Open Inference Protocol is parsed into."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class SharedMemoryParameters(msgspec.Struct, gc=False):
    shared_memory_region: str | None = None
    shared_memory_byte_size: _Size | None = None
    shared_memory_offset: _Size = 0


class _InputParameters(SharedMemoryParameters, gc=False):
    binary_data_size: _Size | None = None


class Input(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: list[_Size]
    data: list[list[int | float | str] | int | float | str] | None = None
    parameters: _InputParameters | None = None


class _OutputParameters(SharedMemoryParameters, gc=False):
    binary_data: bool | None = None
    classification: int = 0


class Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputParameters | None = None


class Parameters(msgspec.Struct, gc=False):
    binary_data_output: bool = False
    output_dtype: str | None = None
    min_seq: int | None = None


class InferBody(msgspec.Struct, gc=False):
    inputs: list[Input]
    outputs: list[Output] = []
    parameters: Parameters | None = None
    id: str = ""


class _Sized(msgspec.Struct, gc=False):
    name: str
    shape: list[_Size]


class Sizes(msgspec.Struct, gc=False):
    inputs: list[_Sized]
