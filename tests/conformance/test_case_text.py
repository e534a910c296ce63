"""The text of a case: canonical, complete, safe in a shell; what is no case is refused by key and nearest right key."""

import json
import shlex

import pytest

from conformance.case_text import CaseTextError, case_from_json, case_to_json, format_case, parse_case
from conformance.problem import Case, Document, InvalidCase, Problem, documents_of

EVERY_FIELD = Case(
    Problem(
        batch=2,
        seq_len=16,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=16,
        value_dim=12,
        window=(3, None),
        layout="dual_chunk_swap",
        context_parallelism=4,
        data_parallelism=2,
        tensor_parallelism=2,
        mesh_axes=("tensor", "context", "data"),
        axis_types="mixed",
        device_order="reversed",
        dtype="bfloat16",
        precision="default",
        attn_logits_soft_cap=50.0,
        scale=0.125,
        sinks=True,
        segments=True,
        padding=-1,
    ),
    ((Document(10), Document(6, -1)), (Document(1, 0), Document(15, 7))),
    values="needle",
    seed=2**32 - 1,
)
EVERY_FIELD_TEXT = (
    "v=1 batch=2 seq_len=16 num_query_heads=4 num_kv_heads=2 head_dim=16 value_dim=12 window=3,none "
    "layout=dual_chunk_swap context_parallelism=4 data_parallelism=2 tensor_parallelism=2 "
    "mesh_axes=tensor,context,data axis_types=mixed device_order=reversed dtype=bfloat16 precision=default "
    "attn_logits_soft_cap=50.0 scale=0.125 sinks=true padding=-1 documents=10+6@-1/1@0+15@7 values=needle "
    "seed=4294967295"
)


def test_every_field_has_its_place_in_the_text():
    assert format_case(EVERY_FIELD) == EVERY_FIELD_TEXT, "keys in the order of the fields"
    assert parse_case(EVERY_FIELD_TEXT) == EVERY_FIELD, "and back"


def test_defaults_and_what_follows_from_other_fields_are_left_out():
    assert format_case(Case()) == "v=1", "nothing differs from the defaults"
    case = Case(Problem(seq_len=8, sliding_window_size=3, segments=True), documents_of([[4, 4]]))
    assert format_case(case) == "v=1 seq_len=8 sliding_window_size=3 documents=4+4", "window and segments follow"
    assert format_case(Case(Problem(segments=True))) == "v=1 segments=true", "unless nothing says so"


def test_the_defaults_of_version_1_never_change():
    """A saved text leaves the defaults out, so a changed default would change what it means."""
    assert parse_case("v=1") == Case(
        Problem(
            batch=1,
            seq_len=64,
            num_query_heads=2,
            num_kv_heads=1,
            head_dim=8,
            value_dim=8,
            sliding_window_size=None,
            window=(None, 0),
            layout="contiguous",
            context_parallelism=2,
            ulysses_parallelism=1,
            data_parallelism=1,
            tensor_parallelism=1,
            mesh_axes=("data", "context", "tensor"),
            axis_types="auto",
            device_order="natural",
            dtype="float32",
            precision="highest",
            attn_logits_soft_cap=None,
            scale=None,
            sinks=False,
            segments=False,
            padding=None,
            shared_kv=False,
        ),
        documents=None,
        values="plain",
        seed=0,
    ), "version 1"


def test_the_order_of_keys_and_spaces_does_not_matter():
    shuffled = "  ".join(reversed(EVERY_FIELD_TEXT.split()))
    assert parse_case(f"  {shuffled}\n") == EVERY_FIELD, "pairs in any order"
    assert parse_case("seq_len=32") == parse_case("v=1 seq_len=32"), "the version may be left out"


def test_equal_cases_have_equal_texts():
    for written in ("scale=1", "scale=1.0", "scale=1e0"):
        assert format_case(parse_case(written)) == "v=1 scale=1.0", f"from {written}"
    assert format_case(parse_case("window=4,0")) == "v=1 window=4,0", "a window is not rewritten as a size"
    assert format_case(parse_case("head_dim=16 value_dim=16 window=none,0")) == "v=1 head_dim=16", "what follows"


def test_a_shell_passes_the_text_unchanged():
    assert shlex.split(EVERY_FIELD_TEXT) == EVERY_FIELD_TEXT.split(), "no quotes needed inside a pair"


def test_json_has_the_same_names_and_survives_a_round_trip():
    content = case_to_json(EVERY_FIELD)
    assert list(content) == [pair.split("=")[0] for pair in EVERY_FIELD_TEXT.split()], "the keys of the text"
    assert content["documents"] == [[10, [6, -1]], [[1, 0], [15, 7]]], "a length, or a length and an id"
    assert content["window"] == [3, None], "numbers stay numbers"
    assert case_from_json(json.loads(json.dumps(content))) == EVERY_FIELD, "and back"
    assert case_from_json({}) == Case(), "defaults"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seqlen=64", "unknown key 'seqlen' in the case; the nearest key is 'seq_len'"),
        ("sliding_window=4", "unknown key 'sliding_window' in the case; the nearest key is 'sliding_window_size'"),
        ("q_heads=4", "unknown key 'q_heads' in the case; the nearest key is"),
        ("=4", "unknown key '' in the case; the nearest key is"),
        ("seq_len", "a case is key=value pairs, got 'seq_len'"),
        ("seq_len=64 seq_len=64", "seq_len is given twice"),
        ("seq_len=many", "seq_len cannot be read from 'many'"),
        ("seq_len=none", "seq_len cannot be read from 'none'"),
        ("sinks=yes", "sinks cannot be read from 'yes': must be true or false"),
        ("window=1,b", "window cannot be read from '1,b'"),
        ("documents=10+", "documents cannot be read from '10+'"),
        ("documents=10@x", "documents cannot be read from '10@x'"),
        ("scale=wide", "scale cannot be read from 'wide'"),
        ("v=2", "v must be 1, got 2"),
    ],
)
def test_a_text_that_is_no_case_is_refused_by_its_key(text, message):
    with pytest.raises(CaseTextError) as error:
        parse_case(text)
    assert str(error.value).startswith(message), "key, value, rule"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"seqlen": 64}, "unknown key 'seqlen' in the case; the nearest key is 'seq_len'"),
        ({"window": 5}, "window cannot be read from 5"),
        ({"documents": 64}, "documents cannot be read from 64"),
        ({"documents": [[[1, 2, 3]]]}, "documents cannot be read from [[[1, 2, 3]]]"),
        ({"seq_len": "64"}, "seq_len must be an integer >= 1, got '64'"),
        ({"sliding_window_size": "5"}, "sliding_window_size must be none or >= 1, got '5'"),
        ({"documents": [["64"]]}, "documents lengths must be integers >= 1, got ['64']"),
        ({"mesh_axes": "data"}, "mesh_axes must order data, context, tensor, got ('d', 'a', 't', 'a')"),
        ({"v": 2}, "v must be 1, got 2"),
    ],
    ids=str,
)
def test_json_that_is_no_case_is_refused_by_its_key(content, message):
    with pytest.raises(InvalidCase) as error:
        case_from_json(content)
    assert str(error.value) == message, "key, value, rule"


def test_a_readable_text_that_breaks_a_rule_says_which():
    with pytest.raises(InvalidCase, match="documents must sum to seq_len=64, got 'sum 20'"):
        parse_case("documents=10+10")
    with pytest.raises(InvalidCase, match="scale must be none or a finite number > 0, got inf"):
        parse_case("scale=inf")
