"""Tests of the example of a model: it is a valid request."""

import json
import shlex
from dataclasses import replace

import numpy as np
from server.fake_engine import make_request
from server.fake_models import ruled_info

from embedserve.batching.join import adapt_to_model
from embedserve.batching.validation import find_invalid
from embedserve.codec.json_codec import decode_request
from embedserve.processes.example_request import IDS_MAX, example_features
from embedserve.processes.startup.startup_banner import curl_line
from embedserve_store import Bags
from embedserve_store.ids.string_hashes import hash_strings

RULED = ruled_info()


def golden_bags() -> Bags:
    """Returns three examples: the second is empty, the third has most ids. Ids of user need all 64
    bits."""
    bags: dict[str, list[list[int | str]]] = {
        "user": [[1], [], [2**63 - 1, -(2**63), 0]],
        "movie": [[], [], [1, 2, 3, 4, 5, 6, 7, 8]],
        "tag": [[], [], ["drama"]],
        "day": [[7], [], [2**53 - 1, 2**53]],
        "shelf": [[100], [], [300]],
    }
    request = make_request({feature: bags[feature] for feature in RULED.features})
    assert hash_strings(["drama"])[0] in request.ids
    return Bags(request.ids, request.lengths.reshape(len(RULED.features), 3), None)


def test_example_has_fullest_goldens_and_javascript_safe_integers() -> None:
    example = example_features(RULED.manifest, golden_bags())
    assert example["user"] == [[str(2**63 - 1), str(-(2**63)), 0], [1]]
    assert example["movie"] == [[1, 2, 3, 4, 5, 6, 7, 8][:IDS_MAX], []]
    assert example["tag"] == [["drama", "comédie"]] * 2
    assert example["day"] == [[2**53 - 1, str(2**53)], [7]]
    assert json.loads(json.dumps(example), parse_int=float) == example


def test_curl_line_requests_the_example() -> None:
    model = replace(RULED, example=example_features(RULED.manifest, golden_bags()))
    words = shlex.split(curl_line("http://localhost:8000", model, "-s"))
    assert words[:3] == ["curl", "-s", "http://localhost:8000/models/ruled/embed"]
    request = adapt_to_model(decode_request(words[-1].encode(), ""), model)
    assert find_invalid([request], model) == {}
    assert np.count_nonzero(request.lengths) > 5
