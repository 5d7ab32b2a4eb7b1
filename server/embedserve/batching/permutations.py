"""Where bags and their ids stand when requests are joined and when answers are split.

Pure functions on numpy arrays of positions; they never see ids or vectors.
"""

from __future__ import annotations

import numpy as np


def feature_major_order(sizes: np.ndarray, features: int) -> np.ndarray:
    """Positions of the bags of requests of ``sizes`` examples in feature-major order.

    Requests one after the other hold [features, size] bags each; the batch holds
    [features, sum(sizes)]. result[i] is where the batch's i-th bag stands in the requests.

    >>> feature_major_order(np.array([1, 2]), 2)
    array([0, 2, 3, 1, 4, 5])
    """
    starts = np.cumsum(sizes * features) - sizes * features
    examples_before = np.cumsum(sizes) - sizes
    # For each example of the batch: its request's first bag, size, and its place in the request.
    first_bag = np.repeat(starts, sizes)
    place = np.arange(sizes.sum()) - np.repeat(examples_before, sizes)
    stride = np.repeat(sizes, sizes)
    order: np.ndarray = first_bag + place + np.arange(features)[:, None] * stride
    return order.reshape(-1)


def request_major_order(sizes: np.ndarray, features: int) -> np.ndarray:
    """Positions of the batch's bags in the order of the requests: the way back.

    >>> request_major_order(np.array([1, 2]), 2)
    array([0, 3, 1, 2, 4, 5])
    """
    order = feature_major_order(sizes, features)
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return back


def bags_to_ids(
    lengths: np.ndarray, bag_order: np.ndarray, ends: np.ndarray | None = None
) -> np.ndarray:
    """Positions of the ids when bags of ``lengths`` are put in ``bag_order``.

    ``ends`` are the cumulative lengths, int64, where they are known.

    >>> bags_to_ids(np.array([2, 1, 3]), np.array([1, 2, 0]))
    array([2, 3, 4, 5, 0, 1])
    """
    if ends is None:
        ends = lengths.cumsum(dtype=np.int64)
    ordered = lengths[bag_order]
    ordered_ends = ordered.cumsum(dtype=np.int64)
    shift = (ends - lengths)[bag_order] - (ordered_ends - ordered)
    total = int(ordered_ends[-1]) if ordered_ends.size else 0
    return np.repeat(shift, ordered) + np.arange(total)
