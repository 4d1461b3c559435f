"""What an algorithm, a workload and its problem must be. A new one is one file and one line in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from hpcfed.capabilities import Array
from hpcfed.federation import Federation


class Algorithm(Protocol):
    """A method: a frozen dataclass of hyperparameters with pure functions of an explicit state.

    Attributes
    ----------
    needs : the capabilities that every client must have.
    state_type : the frozen dataclass that `init` and `round` return. Its `PerClient` fields live with their clients,
        all other fields (arrays, numbers, nested dataclasses) are replicated; checkpoints need no other declaration.
    tol, residual(state) : optional, together; the run ends when the residual that the last round found is at most tol.
    sits_out : optional; true where clients keep state that stays right while they sit rounds out.

    It may have three more methods. ``settled(run)`` returns the method with what depends on the options of the run
    filled in, and refuses those that it cannot do with. ``report(state, fed)``, called on every rank when the last
    round is done, returns a `Report`. ``forget(state, fed)`` returns the state once clients have left the federation
    ``fed``, without what they had put into it; where clients keep anything, they can leave only if there is such.
    """

    needs: ClassVar[tuple[type, ...]]
    state_type: ClassVar[type]

    def init(self, fed: Federation, start: Array) -> Any:
        """The state before the first round, from the workload's starting point."""

    def round(self, state: Any, fed: Federation) -> Any:
        """The state after round ``fed.round``; rounds are counted from 1."""

    def solution(self, state: Any) -> Array:
        """The model or image that the state stands for."""

    def outputs(self, state: Any) -> Mapping[str, Array]:
        """What else belongs in ``result.h5``, such as dual variables."""


@dataclass(frozen=True)
class Report:
    """What a method says of a finished run beyond its solution.

    Attributes
    ----------
    text : for the terminal.
    files : texts for the run folder, by file name.
    arrays : datasets for ``result.h5``.
    """

    text: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


class Compressor(Protocol):
    """What may be done to a lossy message: a frozen dataclass with the field ``quantize`` (0 switches it off).

    Attributes
    ----------
    kind : ``"ordered"`` for messages that are decoded and added in client order (`hpcfed.compressors.qsgd` has the
        methods: ``encode``, ``segment_bytes``, ``accumulate``), ``"integer"`` for levels on a common grid that are
        summed as integers (`hpcfed.compressors.grid`: ``scales``, ``level_type``, ``encode``, ``decode``).
    compiled : modules with compiled kernels, imported on one rank of a node before the others.
    """

    kind: ClassVar[str]
    compiled: ClassVar[tuple[str, ...]]
    quantize: int


class Problem(Protocol):
    """A workload with its data in place.

    Attributes
    ----------
    fed : the federation with the clients built.
    hopeless : optional; an objective that no run which converges exceeds: one that does has diverged.
    """

    fed: Federation

    def start(self) -> Array:
        """The starting point, the same on every rank."""

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        """The numbers of a recorded round, replicated. ``objective`` is always among them."""

    def results(self, solution: Array) -> Mapping[str, tuple[Array, Mapping[str, Any]]]:
        """Datasets for ``result.h5``: name to (array, attributes). Called on one rank."""


class Workload(Protocol):
    """A problem class: a frozen dataclass of sizes and data choices.

    Attributes
    ----------
    offers : the capabilities of its clients.
    defaults : run options that differ from the general defaults, and the default ``algorithm`` and ``compressor``.
    presets : optional; by the name of a method, options that differ from these with it.
    pictures : names of functions in ``hpcfed.plots`` that draw a finished run.
    compiled : modules with compiled kernels, imported on one rank of a node before the others.
    clients : number of clients.
    """

    offers: ClassVar[tuple[type, ...]]
    defaults: ClassVar[Mapping[str, Any]]
    pictures: ClassVar[tuple[str, ...]]
    compiled: ClassVar[tuple[str, ...]]
    clients: int

    def build(self, fed: Federation) -> Problem:
        """Read or make the data, each client's on its own rank."""
