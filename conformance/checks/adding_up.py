"""Do the gradients of keys that the oracle cannot afford to answer add up to what the queries say?

A part of the check `gradients`, of large cases under a window without bound or of more than 8,192 keys.
May touch: evidence, findings. Tests: tests/conformance/test_key_identities.py.
"""

from __future__ import annotations

import numpy as np

from conformance.answers import precision_of
from conformance.checks.compare import Comparison, compare
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.inputs import redraw
from conformance.key_identities import has_unprobed_keys, key_identities

_WORDS = {
    "dkey": "the sum of dkey[i] key[j] over the keys, and of query[i] dquery[j] over their readers",
    "dvalue": "the sum of dvalue[i] value[j] over the keys, and of dout[i] out[j] over their readers",
}


def check_keys_add_up(evidence: Evidence) -> Outcome:
    """One finding a tensor, at its worst pair of features. A process that holds a part of the rows asks nothing."""
    if evidence.answers is not None or not has_unprobed_keys(evidence.case):
        return Outcome()
    shares: dict[str, float] = {}
    worst: dict[str, tuple[Comparison, str]] = {}
    for draw, call, _ in evidence.sources_of("dkey"):
        if not evidence.answer(draw, call).places:
            continue
        case = redraw(evidence.case, draw)
        arrays = {
            tensor: evidence.arrays[f"{draw}/{call}/{given}"]
            for tensor, given in (("out", "out of vjp"), ("dquery", "dquery"), ("dkey", "dkey"), ("dvalue", "dvalue"))
            if f"{draw}/{call}/{given}" in evidence.arrays
        }
        precision = precision_of(evidence.target, case.problem.dtype, case.problem.precision)
        found = key_identities(case, arrays, call == "attention_with_lse", precision)
        for (tensor, row, kv_head), identity in found.items():
            comparison = compare(identity.got, identity.expected, identity.allowance, None)
            shares[tensor] = max(comparison.share, shares.get(tensor, 0.0))
            if not comparison.passes and (tensor not in worst or comparison.share > worst[tensor][0].share):
                where = f"in {call}, data draw {draw}, batch row {row}, kv head {kv_head}"
                worst[tensor] = comparison, where
    return Outcome(shares, tuple(_finding(evidence, tensor, *of) for tensor, of in worst.items()))


def _finding(evidence: Evidence, tensor: str, found: Comparison, where: str) -> Finding:
    difference = "is not finite" if not np.isfinite(found.got) else f"is {found.got:.6g} for {found.expected:.6g}"
    i, j = found.index
    return Finding(
        target=evidence.target.name,
        check="gradients",
        tensor=tensor,
        signature="does not add up over all keys",
        case=evidence.case_text,
        reading=f"{tensor} does not add up over all keys: {_WORDS[tensor]} must be equal; with i = {i} and j = {j} the "
        f"former {difference}, {found.share:.3g} times what rounding allows apart",
        expected=found.expected,
        got=found.got,
        allowance=found.allowance,
        share=found.share,
        detail=where,
    )
