"""``hpcfed private budget`` and ``hpcfed private audit``. Only click is loaded before one of them is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.errors import ConfigError

if TYPE_CHECKING:
    from hpcfed.privacy.audit import Audit
    from hpcfed.privacy.certify import Certificate

ASSUMED = "no step expands distances (assumed: --loss, --step and --smoothness check it)"


@click.group(short_help="Privacy budgets, and an audit of the mechanism.")
def private() -> None:
    """Noise for a privacy budget, and an audit that can show a mechanism to be less private than it claims."""


@private.command(short_help="The noise for a privacy budget, or the budget of a noise.")
@click.option(
    "--method", default="dp-shuffle", help="dp-shuffle | priv-pub | pub-priv | interleaved  [default: dp-shuffle]"
)
@click.option("--epsilon", type=float, help="Budget: find the noise sigma for it.")
@click.option("--sigma", type=float, help="Noise in units of the gradient: find epsilon.")
@click.option("--delta", type=float, required=True, help="Well below 1 over the number of records.")
@click.option("--epochs", type=int, required=True, help="K, the rounds of the run.")
@click.option("--clip", type=float, help="Bound of the norm of each record's gradient.")
@click.option("--samples", type=int, help="n, a client's records in an epoch, private and public.")
@click.option("--private-samples", type=int, help="n_d of interleaved, the private ones among them.")
@click.option("--switch", type=int, help="S of priv-pub and pub-priv, the last epoch before it changes sides.")
@click.option("--batch", type=int, default=1, show_default=True, help="Records in a step; 1 needs the most noise.")
@click.option(
    "--loss", help="least-squares | logistic | mean | huber: check interleaved's steps, not assume them good."
)
@click.option("--step", type=float, help="Step size eta, to be checked.")
@click.option("--smoothness", type=float, help="L of every record that there might be, to be checked against.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plot", type=str, metavar="FILE.png", help="Draw epsilon over the epochs, and sigma against epsilon.")
def budget(
    method: str,
    epsilon: float | None,
    sigma: float | None,
    delta: float,
    epochs: int,
    clip: float | None,
    samples: int | None,
    private_samples: int | None,
    switch: int | None,
    batch: int,
    loss: str | None,
    step: float | None,
    smoothness: float | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Noise sigma for a budget (EPSILON, DELTA), or with --sigma the epsilon that a noise buys.

    The budget protects each record of a client: neighbouring data sets differ in one record, which is replaced. sigma
    is the standard deviation of the noise that each step adds to its clipped gradient, whatever the step size.
    """
    from hpcfed.privacy.schedule import Schedule

    if (epsilon is None) == (sigma is None):
        raise ConfigError("hpcfed private budget: give either --epsilon, for the noise, or --sigma, for the budget")
    schedule = Schedule(method, epochs, samples, private_samples, switch, batch)
    certificate = _certificate(loss, clip, step, smoothness)
    if sigma is None:
        assert epsilon is not None
        sigma = schedule.noise(epsilon, delta, clip, certificate=certificate)
    facts = budget_facts(schedule, delta, clip, sigma, certificate)
    if plot is not None:
        from hpcfed.plots.budget import budget as draw

        facts["picture"] = str(draw(schedule, delta, clip, sigma, certificate, Path(plot)))
    click.echo(json.dumps(facts, allow_nan=False) if as_json else _budget_text(facts))


def budget_facts(
    schedule: Any, delta: float, clip: float | None, sigma: float, certificate: Certificate
) -> dict[str, Any]:
    """What a method with this noise costs, as a table that JSON can hold."""
    from hpcfed.privacy import calibration
    from hpcfed.privacy.accountant import ADJACENCY

    cost = schedule.cost(clip, sigma, certificate=certificate)
    rho = schedule.private_epochs * cost.rho
    exact = cost.amplification == 1
    epsilon = calibration.epsilon_of_rho(rho, delta)
    facts = {
        "method": schedule.method,
        "sigma": sigma,
        "epsilon": epsilon,
        "delta": delta,
        "rho": rho,
        "order": calibration.best_order(rho, delta),
        "epsilon_renyi": calibration.improved_epsilon_of_rho(rho, delta),
        "epsilon_gaussian": calibration.gaussian_epsilon(calibration.mu_of_rho(rho), delta) if exact else None,
        "epochs": schedule.epochs,
        "private_epochs": schedule.private_epochs,
        "clip": clip,
        "batch": schedule.batch,
        "amplification": cost.amplification,
        "reason": cost.reason,
        "adjacency": ADJACENCY,
        "warnings": [],
    }
    if not exact:
        unamplified = calibration.epsilon_of_rho(schedule.private_epochs * cost.unamplified, delta)
        facts |= {"conditions": conditions(certificate), "epsilon_unamplified": unamplified}
    if schedule.samples and delta * schedule.samples >= 1:
        limit = f"1/n = {1 / schedule.samples:g}"
        facts["warnings"] = [
            f"delta = {delta:g} is not below {limit}: publishing one record in full can count as private"
        ]
    return facts


def conditions(certificate: Certificate) -> list[str]:
    """What must be true for an amplified cost."""
    return [
        "the public steps carry the same noise",
        "in every epoch the private steps come first and the public ones last",
        certificate.reason,
        "iterates inside an epoch never leave the client: no trace, no checkpoint, no exchange before its end",
    ]


def _certificate(loss: str | None, clip: float | None, step: float | None, smoothness: float | None) -> Certificate:
    from hpcfed.privacy.certify import Certificate, certify_contractive

    if loss is None:
        if step is not None or smoothness is not None:
            raise ConfigError("--step and --smoothness are checked for a --loss: name it")
        return Certificate(True, ASSUMED)
    if step is None or smoothness is None:
        raise ConfigError(f"--loss {loss} is checked by --step and --smoothness: give both")
    return certify_contractive(loss, clip, step, smoothness)


def _budget_text(facts: dict[str, Any]) -> str:
    exact = facts["epsilon_gaussian"]
    rows = [
        ("sigma", f"{facts['sigma']:.6g}"),
        ("epsilon", f"{facts['epsilon']:.6g} at delta {facts['delta']:g} (order {facts['order']:.4g})"),
        ("Renyi", f"{facts['epsilon_renyi']:.6g} by the improved conversion of the same noise"),
        ("exact", "-" if exact is None else f"{exact:.6g} as the Gaussian mechanism that this is"),
        ("epochs", f"{facts['private_epochs']} of {facts['epochs']} see private records"),
        ("amplified", f"{facts['reason']}; a = {facts['amplification']:.6g}"),
        ("neighbours", facts["adjacency"]),
    ]
    lines = [f"{name:10}  {value}" for name, value in rows]
    if "conditions" in facts:
        lines.append(f"epsilon is {facts['epsilon_unamplified']:.6g} if any of these is not true:")
        lines += [f"  {condition}" for condition in facts["conditions"]]
    lines += [f"WARNING: {warning}" for warning in facts["warnings"]]
    lines += [f"picture {facts['picture']}"] if "picture" in facts else []
    return "\n".join(lines)


@private.command(short_help="Try to show that the mechanism is less private than it claims.")
@click.option("--method", type=click.Choice(["dp-shuffle", "interleaved"]), default="interleaved", show_default=True)
@click.option("--epsilon", type=float, default=2.0, show_default=True, help="What is claimed.")
@click.option("--delta", type=float, default=1e-5, show_default=True, help="What is claimed.")
@click.option("--epochs", type=int, default=20, show_default=True)
@click.option("--public-steps", type=int, default=15, show_default=True, help="Of an epoch of interleaved.")
@click.option("--runs", type=int, default=8000, show_default=True, help="Of each of the two worlds.")
@click.option("--fault", type=str, help="Plant a fault in a simulation of the steps, to be found; all: each in turn.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def audit(
    method: str,
    epsilon: float,
    delta: float,
    epochs: int,
    public_steps: int,
    runs: int,
    fault: str | None,
    seed: int,
    as_json: bool,
) -> int:
    """Play the membership game against the compiled steps that runs take, and test their noise.

    The status is 1 if something contradicts the claim. That nothing does is no proof of privacy.
    """
    import numpy as np

    from hpcfed.privacy.audit import FAULTS, audit, calibrated
    from hpcfed.privacy.audited import Compiled

    for name, value, least in (("--epochs", epochs, 1), ("--public-steps", public_steps, 0), ("--seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name} {value}: choose at least {least}")
    public = public_steps if method == "interleaved" else 0
    faults = [None, *FAULTS] if fault == "all" else [fault]
    found: dict[str, Audit] = {}
    for planted in faults:
        simulated = calibrated(epsilon, delta, epochs, public, fault=planted)
        mechanism = simulated if planted else Compiled.like(simulated)
        found[planted or "no fault"] = audit(mechanism, delta, runs, np.random.default_rng(seed))
    if as_json:
        click.echo(json.dumps({name: each.facts() for name, each in found.items()}, allow_nan=False))
    else:
        click.echo("\n".join(f"{name:20}  {_verdict(each)}" for name, each in found.items()))
    suspect = found["no fault"] if fault == "all" else next(iter(found.values()))
    return int(bool(suspect.contradictions))


def _verdict(found: Audit) -> str:
    bound = f"mu >= {found.mu_found:.4g}, claimed {found.mu_claimed:.4g}"
    if not found.contradictions:
        return f"nothing contradicts the claim ({bound}); that is no proof of privacy"
    return "CONTRADICTED by " + "; ".join(found.contradictions)
