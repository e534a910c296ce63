"""Does what a target computes and holds follow the window, and not the square of the sequence?

Two programs of one problem are compared that differ in the sequence's length alone. Their costs are those of the traced
and compiled program, so that no clock is asked. A finding only for a target that claims `halo`: the others may see the
whole sequence by their nature, and their figures are reported. A loop that turns once for every row, a collective for
every row, and constants with a value for every pair of rows, are findings for whoever claims a strategy: no accelerator
has a use for any of them. What stands in a loop whose number of turns nobody knows counts once: then it can be too
much, and is never said to conform.
May touch: evidence, findings. Tests: tests/conformance/test_checks_work.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding

TENSORS = ("flops", "memory", "program", "loops")
# The sequence is four times as long: what grows in proportion grows fourfold, what grows with its square sixteenfold,
# and halfway between (on the scale where both are powers) is eightfold.
_LENGTH_FACTOR = 4
_HALFWAY = _LENGTH_FACTOR**1.5
# What is traced and handed to XLA should not grow at all; halfway to "in proportion" is twofold.
_PROGRAM_HALFWAY = math.sqrt(_LENGTH_FACTOR)

_MEASURES = (
    ("flops", "matmul_flops", "floating-point operations of its matrix products", _HALFWAY),
    ("memory", "elements", "elements of its intermediate arrays", _HALFWAY),
    ("memory", "temporary_bytes", "bytes of temporary memory", _HALFWAY),
    ("program", "constant_bytes", "bytes of constants built into its program", _HALFWAY),
    ("program", "equations", "equations of its program", _PROGRAM_HALFWAY),
)

# Those that count an equation as often as it runs.
_BY_TURNS = ("matmul_flops", "elements", "longest_loop")
_TURNS_UNKNOWN = "arrays are computed in a loop whose number of turns is not known, so nobody knows what it costs"


def check(evidence: Evidence) -> Outcome:
    """Compares the costs at one length with those at four times that length, and (figures only) at a wider window."""
    shares: dict[str, float] = {}
    findings: dict[tuple[str, str], Finding] = {}
    figures: dict[str, float] = {}
    unknown: dict[str, str] = {}
    for layout, facts in evidence.message.get("work", {}).items():
        if "declined" in facts:
            continue
        for tensor, share, finding in _judged(evidence, layout, facts):
            if share is None:
                unknown[tensor] = _TURNS_UNKNOWN
            else:
                shares[tensor] = max(shares.get(tensor, 0.0), share)
            if finding is not None:
                findings.setdefault((tensor, finding.signature), finding)
        figures |= _figures(layout, facts)
    # One layout that hides its cost is enough: what the other shows is no answer for both.
    shares = {tensor: share for tensor, share in shares.items() if tensor not in unknown}
    return Outcome(shares, tuple(findings.values()), figures=figures, withheld=unknown)


Judged = tuple[str, float | None, Finding | None]


def _judged(evidence: Evidence, layout: str, facts: Mapping[str, Any]) -> Iterator[Judged]:
    """(tensor, share of what is allowed, the finding if it is one) of each cost in one layout; a share is None where a
    loop hides it."""
    judges = evidence.target.communication == "halo"
    if "raised" in facts:
        kind, message = facts["raised"]
        what = f"raises {kind} on a longer sequence"
        fields = {"expected": "an answer", "got": kind}
        found = _finding(evidence, "program", what, f"{message}, in {layout}", fields)
        yield "program", 0.0, found if judges else None
        return
    for tensor, measure, words, limit in _MEASURES:
        if measure not in facts["longer"]:
            continue  # known of compiled programs alone
        growth = _growth(facts, "longer", measure)
        finding = None
        if judges and growth > limit:
            base, longer = facts["base"][measure], facts["longer"][measure]
            how = (
                f"{base:.4g} become {longer:.4g} where only the sequence is {_LENGTH_FACTOR} times as long, in {layout}"
            )
            fields = {"expected": limit * base, "got": longer, "share": growth / limit}
            finding = _finding(evidence, tensor, f"{words} do not follow the window", how, fields)
        yield tensor, None if _is_hidden(facts, measure) else growth / limit, finding
    if evidence.target.communication is not None:
        yield _row_loops(evidence, layout, facts)
        yield _row_messages(evidence, layout, facts)
        yield _pair_constants(evidence, layout, facts)


def _is_hidden(facts: Mapping[str, Any], measure: str) -> bool:
    return measure in _BY_TURNS and facts["longer"]["unknown_loops"] > 0


def _row_loops(evidence: Evidence, layout: str, facts: Mapping[str, Any]) -> Judged:
    """The longest loop as a share of the rows that a rank holds, where it grows with them."""
    turns, rows = facts["longer"]["longest_loop"], facts["rows"]
    grows = _growth(facts, "longer", "longest_loop") > _PROGRAM_HALFWAY
    if not grows or turns < rows:
        share = turns / rows if grows else 0.0
        return "loops", None if _is_hidden(facts, "longest_loop") else share, None
    what = "a loop of its program turns once for every row"
    how = f"{turns} turns where a rank holds {rows} rows, in {layout}"
    fields = {"expected": rows, "got": turns, "share": turns / rows}
    return "loops", turns / rows, _finding(evidence, "loops", what, how, fields)


def _row_messages(evidence: Evidence, layout: str, facts: Mapping[str, Any]) -> Judged:
    """Collectives as a share of the keys in the wider window, where they grow with the window: both windows reach into
    the same chunks, so that one collective can bring as much of each as is needed."""
    base, wider = facts["base"], facts["wider"]
    if "messages" not in wider or wider["messages"] <= _PROGRAM_HALFWAY * max(base["messages"], 1):
        return "loops", 0.0, None
    sent, keys = wider["messages"], facts["wider_window"]
    share = sent / keys
    if share < 1.0:
        return "loops", None if wider["unknown_loops"] else share, None
    what = "sends as many messages as its window has keys"
    how = f"{base['messages']} collectives become {sent} where the window is {keys} keys wide, in {layout}"
    return "loops", share, _finding(evidence, "loops", what, how, {"expected": keys, "got": sent, "share": share})


def _pair_constants(evidence: Evidence, layout: str, facts: Mapping[str, Any]) -> Judged:
    """Constants as a share of one bit for every pair of a rank's rows, where they grow as the pairs do."""
    held, pairs = facts["longer"]["constant_bytes"], facts["rows"] ** 2 / 8
    grows = _growth(facts, "longer", "constant_bytes") > _HALFWAY
    if not grows or held < pairs:
        return "program", held / pairs if grows else 0.0, None
    what = "constants built into its program hold a value for every pair of rows"
    how = f"{held} bytes where a rank holds {facts['rows']} rows, in {layout}"
    fields = {"expected": pairs, "got": held, "share": held / pairs}
    return "program", held / pairs, _finding(evidence, "program", what, how, fields)


def _figures(layout: str, facts: Mapping[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    if "raised" in facts:
        return figures
    for _, measure, _, _ in _MEASURES:
        if measure in facts["longer"]:
            growth = _growth(facts, "longer", measure)
            figures[f"{measure}, sequence {_LENGTH_FACTOR} times as long, {layout}"] = growth
        if measure in facts["wider"] and measure in facts["longer"]:
            growth = _growth(facts, "wider", measure)
            figures[f"{measure}, window {_LENGTH_FACTOR} times as wide, {layout}"] = growth
    return figures


def _growth(facts: Mapping[str, Any], name: str, measure: str) -> float:
    return facts[name][measure] / max(facts["base"][measure], 1)


def _finding(evidence: Evidence, tensor: str, what: str, how: str, fields: Mapping[str, Any]) -> Finding:
    return Finding(
        target=evidence.target.name,
        check="work",
        tensor=tensor,
        signature=what,
        case=evidence.case_text,
        reading=f"{what}: {how}",
        **fields,
    )
