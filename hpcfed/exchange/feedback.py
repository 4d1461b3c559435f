"""Error feedback: what rounding took from a client's message is added to its next one.

A client that wants to send ``v`` sends ``C(v + e)`` and keeps ``e <- v + e - C(v + e)`` (Seide et al. 2014; Karimireddy
et al., "Error feedback fixes SignSGD", ICML 2019). This needs a contraction ``|C(m) - m| < |m|``, which an unbiased
quantizer of variance ``q |m|^2`` is only after division by ``1 + q`` (Horvath and Richtarik, ICLR 2021): so
``C = Q / (1 + q)`` here, with the bound on q that the compressor states.

The residuals are state of the clients: saved, resumed, and kept by a client that sits out. A method knows nothing of
them; `ErrorFeedback` wraps it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.federation import Federation, PerClient

Array = NDArray[Any]


@dataclass
class Residuals:
    """The residuals of one round at this rank's clients: for each, those of all its lossy messages, end to end.

    A client's messages of a round are the same in number and size in every round in which it takes part.
    """

    before: Mapping[int, Array]
    after: dict[int, list[Array]] = field(default_factory=dict)

    def correct(self, client: int, value: Array) -> Array:
        """The client's next message with its residual added."""
        place = sum(part.size for part in self.after.get(client, []))
        old = self.before.get(client, np.empty(0))[place : place + value.size]
        return value if old.size == 0 else (value + old.reshape(value.shape)).astype(value.dtype, copy=False)

    def keep(self, client: int, residual: Array) -> None:
        """What the message that was last corrected has lost."""
        self.after.setdefault(client, []).append(residual.reshape(-1))

    def merged(self) -> PerClient[Array]:
        """The residuals after the round, those of clients that sat out as they were."""
        return PerClient({**self.before, **{client: np.concatenate(parts) for client, parts in self.after.items()}})


@dataclass(frozen=True)
class ErrorFeedback:
    """A method with the residuals of its clients' messages in its state. It is an `hpcfed.protocols.Algorithm`."""

    method: Any

    @property
    def state_type(self) -> type:
        return _state_type(self.method.state_type)

    def init(self, fed: Federation, start: Any) -> Any:
        return self._remembering(fed, PerClient({}), lambda own: self.method.init(own, start))

    def round(self, state: Any, fed: Federation) -> Any:
        return self._remembering(fed, state.residuals, lambda own: self.method.round(state.method, own))

    def _remembering(self, fed: Federation, before: PerClient[Array], action: Callable[[Federation], Any]) -> Any:
        residuals = Residuals(before)
        inner = action(dataclasses.replace(fed, residuals=residuals))
        return self.state_type(inner, residuals.merged())

    def forget(self, state: Any, fed: Federation) -> Any:
        forget = getattr(self.method, "forget", lambda inner, fed: inner)
        return dataclasses.replace(state, method=forget(state.method, fed))

    @property
    def tol(self) -> float | None:
        return getattr(self.method, "tol", None)

    def residual(self, state: Any) -> float:
        found: float = self.method.residual(state.method)
        return found

    def solution(self, state: Any) -> Any:
        return self.method.solution(state.method)

    def outputs(self, state: Any) -> Mapping[str, Any]:
        outputs: Mapping[str, Any] = self.method.outputs(state.method)
        return outputs


@cache
def _state_type(inner: type) -> type:
    fields = [("method", inner), ("residuals", PerClient)]
    return dataclasses.make_dataclass(f"{inner.__name__}WithResiduals", fields, frozen=True)
