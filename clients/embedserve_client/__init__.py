"""Clients of an embedserve server: embeddings as numpy arrays, without torch.

    from embedserve_client import EmbedClient, GrpcEmbedClient

    with EmbedClient("http://127.0.0.1:8000") as client:
        result = client.embed({"movie": [[101, 202], [], [303]], "user": np.array([7, 8, 9])})
        result["movie"]             # float32 [3, dim], a view
        result.values               # float32 [3, sum of all dims], as a KeyedTensor's values
        result.unknown_ids          # {"movie": 1} where an id of movie had no row

        rows = client.embed({"history": [[101, 202], [303]]}, model="sequence")  # not pooled
        rows["history"].values      # float32 [3, dim], one row for each id
        rows["history"].lengths     # int32 [2]

        halves = client.embed({"user": [7]}, output_dtype="float16")   # half the bytes
        halves.values               # float16; past its largest, 65504, infinite

    with GrpcEmbedClient("127.0.0.1:8001") as client:
        for answer in client.embed_stream({"user": users} for users in batches):
            rank(answer.result())   # the result, or raises what went wrong with this item

Features are lists, lists of lists, dense arrays or tensors, (ids, lengths) pairs of them, or
columns of pandas, polars and pyarrow; in place of the mapping one KeyedJaggedTensor, or a table.
Ids are integers, or strings where the model's are. `embed_in_batches` asks for very many examples.
AsyncEmbedClient and AsyncGrpcEmbedClient are the same with await. Every failure is an
EmbedServeClientError; see `errors`. Overloaded and Unavailable are worth another try, which
`retries=2` makes, as long as the call's time lasts. Addresses are written alike for all clients:
"HOST:PORT", "http://HOST:PORT" or "https://HOST". `token`, `ca` and `certificate` say who asks and
whom to trust.
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
