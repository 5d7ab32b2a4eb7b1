"""Desired state of one served name, as the rollout coordinator keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embedserve.processes.rollout.messages import (
    AliasSettings,
    Failure,
    LoadState,
    NameStatus,
    Target,
    TargetPhase,
    WorkerStatus,
)
from embedserve_store import ModelVersion


@dataclass(frozen=True)
class RolloutVersion:
    """A version, by its number and folder. Each rollout of it has its own generation.

    Attributes:
        memory: path of the memory of its changed rows; "" if it follows no deltas, or is one that
            the server has started with.
    """

    number: int
    path: str
    generation: int = 0
    memory: str = ""

    @classmethod
    def of(cls, version: ModelVersion) -> RolloutVersion:
        """Returns ``version`` as one that a server starts with: without a generation."""
        return cls(version.manifest.version, str(version.path))


@dataclass
class ServedName:
    """Desired state of a served name, and what may change it.

    Attributes:
        serving: version that all processes serve; number 0 before the first one.
        starts_with: number of the version that forked workers start with.
        store_version: version that the store points to; 0 if that is not known.
        candidate: opened version whose rollout has not begun.
        failure: version that is not served now, and why.
        previous_failure: failure of the attempt before the present one; it is not logged again.
        alias_settings: those of the version that serves, also while the next one is prepared or
            has failed.
        found_alias_settings: those that the store was last found to have.
    """

    serving: RolloutVersion = RolloutVersion(0, "")
    starts_with: int = 0
    store_version: int = 0
    candidate: RolloutVersion | None = None
    failure: Failure | None = None
    previous_failure: Failure | None = None
    alias_settings: AliasSettings | None = None
    found_alias_settings: AliasSettings | None = None

    @property
    def number(self) -> int:
        return self.serving.number

    def update_alias_settings(self) -> None:
        """Adopts the alias settings in the store if their version serves."""
        found = self.found_alias_settings
        if found is not None and found.version in (0, self.number):
            self.alias_settings = found

    def serving_target(self) -> Target:
        """Returns the target of a process that is to serve what the others serve."""
        return Target(
            self.serving.number,
            self.serving.path,
            self.serving.generation,
            TargetPhase.SERVE,
            self.store_version,
            self.failure,
            self.alias_settings,
            self.serving.memory,
            0 if self.candidate is None else self.candidate.number,
        )


@dataclass
class Rollout:
    """A version that the processes prepare.

    Attributes:
        until_s: monotonic time at which the rollout fails.
        exits: number of workers that exited while preparing it.
    """

    name: str
    version: RolloutVersion
    until_s: float
    exits: int = 0

    def is_prepared(self, status: WorkerStatus) -> bool:
        """Returns whether a process with ``status`` has loaded the version, or serves it."""
        one = status.names.get(self.name, NameStatus(0))
        is_loaded = one.state is LoadState.PREPARED and one.generation == self.version.generation
        return is_loaded or one.version == self.version.number

    def target(self, serving: Target) -> Target:
        """Returns the target of a process that serves what ``serving`` says."""
        return replace(
            serving,
            version=self.version.number,
            path=self.version.path,
            generation=self.version.generation,
            phase=TargetPhase.PREPARE,
            memory=self.version.memory,
        )
