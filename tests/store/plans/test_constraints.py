"""Tests of constraints: torchrec's, except for constraints that serving cannot satisfy."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import BoundsCheckMode, CacheParams
from torchrec.modules.embedding_configs import DataType

from embedserve_store.errors import StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import NOT_HONOURED, TableConstraints, read_constraints
from embedserve_store.plans.planner_request import from_torchrec

TABLE = TableSpec("t", 10, 8, ("x", "y"), "sum", "float32")
ALL = TableConstraints(
    ("row_wise",), 8, (1.0, 2.5), (1.0, 1.0), (64, 128), True, ("quant", "quant_uvm")
)


def test_all_fields_of_torchrec_constraints_are_handled() -> None:
    ours = {field.name for field in fields(TableConstraints)}
    theirs = {field.name for field in fields(ParameterConstraints)}
    assert theirs == ours | NOT_HONOURED.keys() | {"feature_names"}


def test_json_round_trip() -> None:
    assert TableConstraints.from_json(json.loads(json.dumps(ALL.to_json())), "here") == ALL
    assert TableConstraints().to_json() == {}
    assert TableConstraints.from_json({}, "here") == TableConstraints()


def test_torchrec_default_constraints_are_empty() -> None:
    assert from_torchrec(ParameterConstraints(), TABLE, "here") == TableConstraints()
    harmless = ParameterConstraints(
        enforce_hbm=False, feature_names=["y", "x"], output_dtype=DataType.FP32
    )
    assert from_torchrec(harmless, TABLE, "here") == TableConstraints()


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (ParameterConstraints(cache_params=CacheParams(load_factor=0.2)), "cache_params cannot"),
        (ParameterConstraints(enforce_hbm=True), "enforce_hbm cannot"),
        (ParameterConstraints(stochastic_rounding=True), "stochastic_rounding cannot"),
        (ParameterConstraints(bounds_check_mode=BoundsCheckMode.FATAL), "bounds_check_mode cannot"),
        (ParameterConstraints(output_dtype=DataType.FP16), "answers are float32"),
        (ParameterConstraints(device_group="cuda"), "device_group cannot"),
        (ParameterConstraints(use_virtual_table=True), "use_virtual_table cannot"),
        (ParameterConstraints(feature_names=["x"]), r"feature_names is \['x'\], the table has"),
    ],
)
def test_unsupported_constraints_are_rejected_by_name(
    constraints: ParameterConstraints, message: str
) -> None:
    with pytest.raises(StoreError, match=f"here: .*{message}"):
        from_torchrec(constraints, TABLE, "here")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected the fields of ParameterConstraints"),
        ({"colour": 1}, "unknown field 'colour', there are sharding_types"),
        ({"sharding_types": []}, r"sharding_types is \[\], expected a list"),
        ({"sharding_types": "row_wise"}, "sharding_types is 'row_wise', expected a list"),
        ({"min_partition": 6}, "min_partition is 6, expected a multiple of 4 columns"),
        ({"min_partition": True}, "min_partition is True"),
        ({"pooling_factors": [1, -2]}, r"pooling_factors is .*numbers above 0"),
        ({"num_poolings": [True]}, "num_poolings is"),
        ({"batch_sizes": [1.5]}, "batch_sizes is .*integers above 0"),
        ({"is_weighted": "yes"}, "is_weighted is 'yes', expected true or false"),
        ({"compute_kernels": ["quant", "dense"]}, r"compute_kernels is \['quant', 'dense'\], exp"),
        ({"compute_kernels": "quant"}, "compute_kernels is 'quant', expected a list of quant, qu"),
        ({"compute_kernels": []}, r"compute_kernels is \[\], expected a list of quant, quant_uvm"),
    ],
)
def test_invalid_constraint_value_is_named(data: Any, message: str) -> None:
    with pytest.raises(StoreError, match=f"here: {message}"):
        TableConstraints.from_json(data, "here")


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_constraints_are_read_from_yaml_and_json(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"constraints{suffix}"
    data = {"t": ALL.to_json(), "u": {"min_partition": 32}}
    path.write_text(
        json.dumps(data)
        if suffix == ".json"
        else "t: {sharding_types: [row_wise], min_partition: 8, pooling_factors: [1.0, 2.5],\n"
        "  num_poolings: [1.0, 1.0], batch_sizes: [64, 128], is_weighted: true,\n"
        "  compute_kernels: [quant, quant_uvm]}\n"
        "u:\n  min_partition: 32\n"
    )
    assert read_constraints(path) == {"t": ALL, "u": TableConstraints(min_partition=32)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a mapping from table to constraints"),
        ("{", "cannot be parsed"),
        ("!!python/object/apply:os.getcwd []", "cannot be parsed"),
        ("t: {min_partition: 32}\nt: {}", "cannot be parsed: line 2: key 't' is there twice"),
        ("t: {enforce_hbm: true}", "table 't': enforce_hbm cannot be honoured"),
    ],
)
def test_invalid_constraints_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_text(text)
    with pytest.raises(StoreError, match=f"constraints.yaml: {message}") as error:
        read_constraints(path)
    assert "\n" not in str(error.value)
    with pytest.raises(StoreError, match=r"other\.yaml: cannot be read: No such file"):
        read_constraints(tmp_path / "other.yaml")
