"""Permutations of bags and their ids for joining requests and splitting results.

Pure functions on numpy arrays of positions; they never see ids or vectors.
"""

from __future__ import annotations

import numpy as np


def feature_major_order(sizes: np.ndarray, features: int) -> np.ndarray:
    """Returns the positions of the requests' bags in feature-major order.

    The requests, one after the other, hold [features, size] bags each, with ``sizes`` in examples.
    The batch holds [features, sum(sizes)]. result[i] is the position of the batch's i-th bag in
    the requests.

    >>> feature_major_order(np.array([1, 2]), 2)
    array([0, 2, 3, 1, 4, 5])
    """
    starts = np.cumsum(sizes * features) - sizes * features
    examples_before = np.cumsum(sizes) - sizes
    # For each example of the batch: its request's first bag, its index in the request, and the
    # request's size.
    first_bag = np.repeat(starts, sizes)
    place = np.arange(sizes.sum()) - np.repeat(examples_before, sizes)
    stride = np.repeat(sizes, sizes)
    order: np.ndarray = np.arange(features)[:, None] * stride
    order += first_bag + place
    return order.reshape(-1)


def request_major_order(sizes: np.ndarray, features: int) -> np.ndarray:
    """Returns the positions of the batch's bags in request order: the inverse permutation.

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
    """Returns the positions of the ids when bags of ``lengths`` are put in ``bag_order``.

    ``ends`` are the cumulative lengths, int64; None to compute them.

    >>> bags_to_ids(np.array([2, 1, 3]), np.array([1, 2, 0]))
    array([2, 3, 4, 5, 0, 1])
    """
    if ends is None:
        ends = lengths.cumsum(dtype=np.int64)
    ordered = lengths[bag_order]
    ordered_ends = ordered.cumsum(dtype=np.int64)
    total = int(ordered_ends[-1]) if ordered_ends.size else 0
    # In place: not every build of Python lets numpy reuse the memory of intermediate results.
    shift = (ends - lengths)[bag_order]
    shift -= ordered_ends
    shift += ordered
    positions: np.ndarray = np.repeat(shift, ordered)
    positions += np.arange(total)
    return positions
