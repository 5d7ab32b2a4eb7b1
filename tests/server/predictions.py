"""TorchRec's PredictionRequest of given bags, and the parsing of its responses."""

from collections.abc import Sequence

import numpy as np
from server.fake_engine import Bags, Weights

from embedserve_proto import predictor_pb2 as pb


def sparse(bags: Sequence[Sequence[Sequence[int]]], dtype: str = "<i8") -> pb.SparseFeatures:
    """Returns the bags of some features, one feature after the other."""
    all_bags = [bag for of_feature in bags for bag in of_feature]
    return pb.SparseFeatures(
        num_features=len(bags),
        lengths=np.array([len(bag) for bag in all_bags], "<i4").tobytes(),
        values=np.array([one for bag in all_bags for one in bag], dtype).tobytes(),
    )


def weighted(
    bags: Sequence[Sequence[Sequence[int]]], weights: Sequence[Sequence[Sequence[float]]]
) -> pb.SparseFeatures:
    made = sparse(bags)
    flat = [one for of_feature in weights for bag in of_feature for one in bag]
    made.weights = np.array(flat, "<f4").tobytes()
    return made


def prediction_request(
    order: Sequence[str], bags: Bags, weights: Weights | None = None, dtype: str = "<i8"
) -> pb.PredictionRequest:
    """Returns a request of all features in this order. Features in ``weights`` are weighted and
    come last."""
    weights = weights or {}
    batch_size = len(next(iter(bags.values())))
    of = {name: bags.get(name, [[]] * batch_size) for name in order}
    plain = [name for name in order if name not in weights]
    scored = [name for name in order if name in weights]
    assert [*plain, *scored] == list(order)
    request = pb.PredictionRequest(batch_size=batch_size)
    if plain:
        request.id_list_features.CopyFrom(sparse([of[name] for name in plain], dtype))
    if scored:
        request.id_score_list_features.CopyFrom(
            weighted([of[name] for name in scored], [weights[name] for name in scored])
        )
    return request


def predicted(response: pb.PredictionResponse, keys: Sequence[str], batch_size: int) -> np.ndarray:
    """Returns the responses of ``keys`` side by side, float32 [batch_size, sum(dims)]."""
    assert set(response.predictions) == set(keys)
    columns = [np.array(response.predictions[key].data, np.float32) for key in keys]
    return np.concatenate([one.reshape(batch_size, -1) for one in columns], axis=1)
