"""What checks find, and the report that is made of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report: ``ok``, ``--`` (worth knowing) or ``!!`` (a problem), and what to do about it."""

    mark: Literal["ok", "--", "!!"]
    what: str
    found: str
    remedy: str = ""


def attempt(check: Callable[..., Iterator[Finding]], *args: Any) -> list[Finding]:
    """The findings of a check; its failure is one."""
    findings: list[Finding] = []
    try:
        findings.extend(check(*args))
    except Exception as error:  # whatever is broken, the other checks go on
        text = " ".join(str(error).split()) or "no message"
        findings.append(
            Finding("!!", check.__name__.replace("_", " "), f"check failed: {type(error).__name__}: {text}")
        )
    return findings


def report(findings: Sequence[Finding]) -> str:
    """The findings as an aligned table with the number of problems below."""
    width = max(len(finding.what) for finding in findings)
    indent = " " * (width + 6)
    lines = []
    for finding in findings:
        first = f"{finding.mark}  {finding.what:{width}}  "
        for text, lead in ((finding.found, first), (finding.remedy, indent + "-> ")):
            lines += textwrap.wrap(
                text, 110, initial_indent=lead, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    problems = sum(finding.mark == "!!" for finding in findings)
    lines.append(f"{problems} problem{'s' if problems > 1 else ''}" if problems else "all well")
    return "\n".join(lines)


def merge(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """The findings of all nodes: once what all have found, with the node's name what only some have."""
    hosts: dict[Finding, list[str]] = {}
    for host, findings in by_host:
        for finding in findings:
            hosts.setdefault(finding, []).append(host)
    merged = []
    for finding, names in hosts.items():
        some = "" if len(names) == len(by_host) else f"{', '.join(names)}: "
        merged.append(Finding(finding.mark, finding.what, some + finding.found, finding.remedy))
    return merged
