"""Which steps are known not to expand distances, as amplification by iteration requires."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Losses whose clipped gradient is the gradient of another convex function that is no less smooth: functions of one
# linear form of the model, where clipping cuts off a slope, and the squared distance, where it gives Huber's function.
CONTRACTIVE = {
    "least-squares": "a loss of one linear form of the model",
    "logistic": "a loss of one linear form of the model",
    "mean": "the squared distance to a point",
    "huber": "Huber's function of the distance to a point",
}


@dataclass(frozen=True)
class Certificate:
    """Whether no step expands distances, and why (not); true or false as a condition."""

    contractive: bool
    reason: str

    def __bool__(self) -> bool:
        return self.contractive


def certify_contractive(
    loss: str, clip: float | None, eta: float, smoothness: float, *, momentum: float = 0.0
) -> Certificate:
    """Whether ``x -> x - eta clip(grad f(x))`` is known to be non-expansive for every record.

    A gradient step on a convex L-smooth function is, for ``eta <= 2/L``. Clipping each record's gradient to a norm can
    spoil it: it does for ``1/2 x^T A x`` with an ill-conditioned A and for softmax regression, whose clipped gradient
    is no gradient. So the certificate is given to a list of losses (`CONTRACTIVE`), alone: whatever else there is, a
    penalty, say, belongs into the proximal step at the epoch's end. Means over a batch of such steps are non-expansive,
    too, also when a short batch is divided by the full number.

    Parameters
    ----------
    loss : its name.
    clip : bound of the norm of each record's gradient, or None; the answer is the same for those on the list.
    eta : step size.
    smoothness : L, the largest of all records, private and public. It must bound those that a client *might* hold, so
        it comes from a public bound of the features' norms, never from the data alone.
    momentum : a step with momentum is no map of the iterate alone; the certificate is refused.
    """
    if momentum:
        return Certificate(False, f"momentum {momentum:g}: a step is no map of the iterate alone")
    if loss not in CONTRACTIVE:
        known = ", ".join(CONTRACTIVE)
        clipped = "clipped " if clip is not None else ""
        return Certificate(False, f"{clipped}steps on the loss {loss!r} are not known not to expand; known are {known}")
    if not 0 < smoothness < np.inf:
        return Certificate(False, f"smoothness {smoothness:g}: no bound of the gradients' Lipschitz constants")
    if not eta > 0:
        return Certificate(False, f"step size {eta:g}: not positive")
    if eta > 2 / smoothness:
        return Certificate(False, f"step size {eta:.6g} exceeds 2/L = {2 / smoothness:.6g}: steps may expand distances")
    return Certificate(True, f"{CONTRACTIVE[loss]}, step size {eta:.6g} <= 2/L = {2 / smoothness:.6g}")
