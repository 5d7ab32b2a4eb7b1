"""Python clients of an embedserve server: embeddings as numpy arrays, without torch.

    from embedserve_client import EmbedClient, GrpcEmbedClient

    with EmbedClient("http://127.0.0.1:8000") as client:
        result = client.embed({"movie": [[101, 202], [], [303]], "user": np.array([7, 8, 9])})
        result["movie"]             # float32 [3, dim], a view
        result.values               # float32 [3, sum of all dims], as in a KeyedTensor
        result.unknown_ids          # {"movie": 1} if one id of movie has no row

        rows = client.embed({"history": [[101, 202], [303]]}, model="sequence")  # not pooled
        rows["history"].values      # float32 [3, dim], one row per id
        rows["history"].lengths     # int32 [2], ids per example

        halves = client.embed({"user": [7]}, output_dtype="float16")   # half the bytes
        halves.values               # float16; values beyond 65504 become infinite

    with GrpcEmbedClient("127.0.0.1:8001") as client:
        for answer in client.embed_stream({"user": users} for users in batches):
            rank(answer.result())   # the vectors; raises if this item failed

Clients. `EmbedClient` speaks REST and `GrpcEmbedClient` speaks gRPC. `AsyncEmbedClient` and
`AsyncGrpcEmbedClient` have the same methods for asyncio. All of them accept the same addresses:
"HOST:PORT", "http://HOST:PORT", "https://HOST" or "unix:/PATH".

Features. A mapping holds the ids of each feature as a list, a list of lists, or a dense array or
tensor. It may also hold (ids, lengths) pairs, or columns of pandas, polars or pyarrow. A table or a
TorchRec KeyedJaggedTensor may replace the mapping. Ids are integers, or strings if the model's ids
are strings. `embed_in_batches` splits large inputs into many requests.

Errors. Every failed call raises a subclass of `EmbedServeClientError`, which the module `errors`
lists. `Overloaded` and `Unavailable` are worth retrying: with `retries=2` a client makes up to two
more attempts within the call's timeout.

Security. `token` authenticates the caller, `ca` names the trusted certificate authorities, and
`certificate` is the client's own certificate for mutual TLS.
"""

from embedserve_client.bulk import embed_in_batches
from embedserve_client.core.batch import Features, Weights
from embedserve_client.core.models import IdRule, ModelInfo, ModelList, TableInfo
from embedserve_client.core.result import EmbedResult, JaggedVectors, OutputDType
from embedserve_client.errors import (
    DeadlineExceeded,
    EmbedServeClientError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    ServerError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from embedserve_client.grpc.client import AsyncGrpcEmbedClient, GrpcEmbedClient
from embedserve_client.grpc.stream import StreamAnswer, StreamItem, StreamRequest
from embedserve_client.rest.client import AsyncEmbedClient, EmbedClient

__all__ = [
    "AsyncEmbedClient",
    "AsyncGrpcEmbedClient",
    "DeadlineExceeded",
    "EmbedClient",
    "EmbedResult",
    "EmbedServeClientError",
    "Features",
    "GrpcEmbedClient",
    "IdRule",
    "InvalidRequest",
    "JaggedVectors",
    "ModelInfo",
    "ModelList",
    "OutputDType",
    "Overloaded",
    "PermissionDenied",
    "ServerError",
    "StreamAnswer",
    "StreamItem",
    "StreamRequest",
    "TableInfo",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "Weights",
    "embed_in_batches",
]
