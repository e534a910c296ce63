"""Which heads' dsinks are compared of a large case, and that the sums of hosts add up to the answer of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import answers, sink_answers
from conformance.answers import answer_for, precision_of
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.evidence import Evidence
from conformance.inputs import redraw
from conformance.models import MODELS, full_size_case
from conformance.sink_answers import affordable_heads, sink_answer, sink_sums_of
from conformance.target import TargetDescription
from oracle.sinks import NOTHING

_TARGET = TargetDescription("module:target", "target")
_CASE = parse_case(
    "v=1 batch=2 seq_len=64 num_query_heads=4 num_kv_heads=2 sliding_window_size=9 layout=striped "
    "context_parallelism=4 documents=20@1+44/64 padding=1 sinks=true dtype=bfloat16"
)
_GPT_OSS = next(model for model in MODELS if model.name == "gpt-oss-20b")


def test_of_a_published_layer_of_128k_tokens_eight_heads_are_compared_and_of_a_global_one_none() -> None:
    """128 K tokens with 128 keys are 2^24 pairs a head, of which 2^27 are summed up; a GLOBAL head has 2^34."""
    local, whole = (full_size_case(_GPT_OSS, layer) for layer in ("local", "global"))
    heads = affordable_heads(local)
    assert len(heads) == len(set(heads)) == 8, "2^27 / 2^24"
    assert heads != affordable_heads(redraw(local, 1)), "other heads on the other draw"
    assert len(affordable_heads(local, hosts=4)) == 32, "hosts share the work"
    assert affordable_heads(local, hosts=100) == tuple(range(64)), "no more than there are"
    assert affordable_heads(whole) == (), "too dear"


def test_what_cannot_be_afforded_is_withheld_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 64 queries with 9 keys each are 1152 pairs."""
    monkeypatch.setattr(answers, "PROBE_BEYOND_PAIRS", 0)
    monkeypatch.setattr(sink_answers, "SINK_PAIRS", 1151)
    case = _CASE.replace(seed=77)
    answer = answer_for(_TARGET, case, 0, "attention")
    assert "dsinks" not in answer.reference, "no head is affordable"
    reason = "one head has 1152 pairs of a query and a key; at most 1151 are summed up"
    assert answer.withheld == {"dsinks": reason}
    outcome = CHECKS["gradients"].run(Evidence(_TARGET, case, {}, {"0/attention/dsinks": np.zeros(4)}))
    assert (outcome.shares, outcome.withheld) == ({}, {"dsinks": reason}), "nothing is compared, and that is said"


@pytest.mark.parametrize(("with_lse", "defines_empty_rows"), [(False, False), (True, False), (True, True)])
def test_the_sums_of_ranks_add_up_to_the_answer_of_the_whole(with_lse: bool, defines_empty_rows: bool) -> None:
    """Four ranks of striped positions; the cotangent of lse counts at padding where such rows are defined."""
    precision = precision_of(_TARGET, "bfloat16")
    whole = answers._whole(_CASE, with_lse, defines_empty_rows, precision)
    for head in range(4):
        sums = NOTHING
        for rank in range(4):
            queries = [(row, np.arange(rank, 64, 4)) for row in (0, 1)]
            sums = sums.plus(
                sink_sums_of(
                    _CASE,
                    head,
                    queries,
                    with_lse=with_lse,
                    defines_empty_rows=defines_empty_rows,
                    precision=precision,
                )
            )
        expected, allowed = sink_answer(_CASE, sums, precision)
        assert expected == pytest.approx(whole.reference["dsinks"][head], rel=1e-12, abs=1e-12)
        assert allowed == pytest.approx(whole.allowance["dsinks"][head], rel=1e-9)
