"""Options of publishing a model, with their types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.tables_file import Progress
from embedserve_store.goldens.expected import Expected
from embedserve_store.plans.plan import Plan
from embedserve_store.publishing.publish_source import Choice
from embedserve_store.publishing.resolve_ids import Vocabularies
from embedserve_store.transfer.receive import TransferProgress

if TYPE_CHECKING:
    from embedserve_store.plans.planner_request import Constraints


class PublishOptions(TypedDict, total=False):
    """Keyword arguments of `publish` and `publish_sharded`. All are optional.

    Attributes:
        prefix: dotted path that selects a collection if there are several. It starts at the
            beginning of the keys (for a module: of its state dict's keys). It names the collection
            itself, or a module that holds only that collection. "." is the top level.
        is_weighted: whether callers pass weights. None: as the module or description specifies.
        dtype: dtype in which rows are stored (float32, float16, int8 or int4), for all tables or by
            table. None: as the tables specify, float32 by default.
        ids: rule by table that maps callers' ids to rows. Tables left out keep their own rule.
        vocabularies: vocabulary by table, which implies the rule "map". A vocabulary is a file, an
            int64 array or a sequence of ids (the position is the row), or a mapping from id to row.
        sharding: table_wise, row_wise, column_wise, data_parallel or auto, for all tables or by
            table, or a complete Plan. Tables left out: as the description specifies, else auto.
            None: as the description specifies, else what the constraints allow, else table_wise.
        world_size: number of ranks to plan for. None: the Plan's number, or 1 without a Plan.
        hosts: number of hosts over which the tables are divided by rows, for a model larger than a
            host. Each has ``world_size`` ranks. Above 1, tables without ``sharding`` are "auto".
            None: the Plan's number, or 1.
        constraints: torchrec's ParameterConstraints, by table.
        device_memory_bytes: memory of each rank, which the plan must fit.
        max_error: largest relative L2 error of a table's pooled vectors; a larger error is
            rejected.
        expected: outputs of the training model, as write_expected writes them. The source's rows,
            pooled as described, must give the same outputs. The outputs of the first examples
            become the goldens.
        accept_unchecked: also publish if the inputs of ``expected`` cannot verify the description
            of a feature. Examples are a feature without an id, and a feature without a bag of two
            ids.
        accept_draft: also publish a description with unchecked guesses of `embedserve describe`.
        layout_changed: also publish changes that callers of the previous version would notice:
            other keys, order, widths, tables, pooling, id rules or weights.
        if_changed: publishes nothing if the newest version has the same rows, tables, id rules and
            plan; the result is that version then. Goldens and provenance may differ. A version
            whose files are incomplete counts as changed; one with damaged rows does not.
        meta: strings stored in the manifest, such as the id of the training run.
        who: author recorded in the history. Default: USER@HOST.
        progress: callback for each block of rows written.
        upload_progress: callback for bytes uploaded to a remote store.
    """

    prefix: str
    is_weighted: bool | None
    dtype: Choice | None
    ids: Mapping[str, IdRule] | None
    vocabularies: Vocabularies | None
    sharding: Choice | Plan | None
    world_size: int | None
    hosts: int | None
    constraints: Constraints | None
    device_memory_bytes: int | None
    max_error: float | None
    expected: str | os.PathLike[str] | Expected | None
    accept_unchecked: bool
    accept_draft: bool
    layout_changed: bool
    if_changed: bool
    meta: Mapping[str, str] | None
    who: str | None
    progress: Progress | None
    upload_progress: TransferProgress | None


def check_option_names(options: PublishOptions) -> None:
    """Raises TypeError if a name is no option, as Python does for other functions."""
    for name in options.keys() - PublishOptions.__optional_keys__:
        raise TypeError(f"publish() got an unexpected keyword argument {name!r}")
