"""Base classes of the clients: the calls that REST and gRPC share, sync and for asyncio.

`operations` builds the calls and `retry_loop` runs them with retries. A transport adds the
connection: it opens it, sends one call, and closes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from embedserve_client.core.batch import Features, Weights
from embedserve_client.core.models import ModelInfo, ModelList
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.core.retry_loop import Operation, run, run_async
from embedserve_client.operations import Operations

T = TypeVar("T")


class BaseClient(ABC):
    """A sync client."""

    _operations: Operations
    _retries: int
    _is_closed = False

    def embed(
        self,
        features: Features,
        *,
        weights: Weights | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        output_dtype: OutputDType = "float32",
        output_keys: Sequence[str] = (),
        routing_key: str | None = None,
        min_seq: int | None = None,
    ) -> EmbedResult:
        """Returns the vectors of a batch.

        Args:
            features: ids of each feature, by feature name; `Features` lists the accepted formats.
            weights: weights of the ids, in the shape of the ids, for any of the features. Other
                features get weights of 1. A KeyedJaggedTensor carries its own.
            model: NAME, or NAME@VERSION or NAME@ALIAS for one of its versions. None selects the
                server's default model.
            timeout_s: time limit of the call in seconds, including retries; None uses the client's.
            output_dtype: "float32" or "float16". float16 halves the bytes; values beyond 65504
                become infinite.
            output_keys: keys to return; empty returns all keys of the model.
            routing_key: identifier of the caller, 1 to 256 printable ASCII characters. Equal keys
                get the same version while several versions share the model's traffic.
            min_seq: smallest `seq` that the rows may have, where the version follows deltas. While
                they are older, the call is retried, or fails with Unavailable.

        Raises:
            EmbedServeClientError: the call failed; the module `errors` lists its subclasses.
        """
        operation = self._operations.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key, min_seq
        )
        return self._run(operation)

    def models(self) -> ModelList:
        """Returns all served models."""
        return self._run(self._operations.models())

    def model(self, name: str) -> ModelInfo:
        """Returns a served model; raises UnknownModel if there is none of that name."""
        return self._run(self._operations.model(name))

    def close(self) -> None:
        """Closes the connections and removes the client's shared-memory files. Calls in flight
        over gRPC end with Unavailable. No call is retried any more."""
        self._is_closed = True
        self._disconnect()
        self._operations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        return run(operation, self._retries, self._send, lambda: self._is_closed)

    @abstractmethod
    def _send(self, call: Any) -> Any:
        """Sends a call and returns its result; raises EmbedServeClientError."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Closes the connections."""


class AsyncBaseClient(ABC):
    """A client for asyncio, with the methods of `BaseClient`."""

    _operations: Operations
    _retries: int
    _is_closed = False

    async def embed(
        self,
        features: Features,
        *,
        weights: Weights | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        output_dtype: OutputDType = "float32",
        output_keys: Sequence[str] = (),
        routing_key: str | None = None,
        min_seq: int | None = None,
    ) -> EmbedResult:
        """Returns the vectors of a batch; arguments as for `EmbedClient.embed`."""
        operation = self._operations.embed(
            features, weights, model, timeout_s, output_dtype, output_keys, routing_key, min_seq
        )
        return await self._run(operation)

    async def models(self) -> ModelList:
        """Returns all served models."""
        return await self._run(self._operations.models())

    async def model(self, name: str) -> ModelInfo:
        """Returns a served model; raises UnknownModel if there is none of that name."""
        return await self._run(self._operations.model(name))

    async def close(self) -> None:
        """Closes the connections and removes the client's shared-memory files. Calls in flight over
        gRPC end with Unavailable. No call is retried any more."""
        self._is_closed = True
        await self._disconnect()
        self._operations.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, operation: Operation[T]) -> T:
        return await run_async(operation, self._retries, self._send, lambda: self._is_closed)

    @abstractmethod
    async def _send(self, call: Any) -> Any:
        """Sends a call and returns its result; raises EmbedServeClientError."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Closes the connections."""
