"""oracle/identities.py: the right answer adds up, legal roundings stay within the allowance, a lost key does not."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import oracle
from oracle.budget import Precision
from oracle.identities import KeySide, QuerySide, identities
from oracle.outline import Outline

SEQ = 128
VARIANTS = {
    "full causal": {"window": (None, 0)},
    "window": {"window": (30, 0)},
    "everything": {
        "window": (None, None),
        "sinks": np.array([0.5, -1.0, 2.0, 0.0]),
        "attn_logits_soft_cap": 2.0,
        "scale": 0.3,
        "segment_ids": np.arange(SEQ)[None] // 37 % 3,
    },
}
FLOAT32 = Precision("float32")
ARRAYS = ("query", "key", "value", "dout", "dlse")


def outline_of(case):
    options = {name: value for name, value in case.items() if name not in ARRAYS}
    batch, seq, query_heads, head_dim = case["query"].shape
    return Outline(batch, seq, query_heads, case["key"].shape[2], head_dim, **options)


def flat(array, heads):
    return np.asarray(array)[0, :, heads].astype(np.float64).reshape(-1, array.shape[3])


def found(case, answer, kv_head=0, precision=FLOAT32, change=lambda side: side):
    """The identities of one kv head, of an answer with out, dquery, dkey and dvalue; `change` is made to the keys'."""
    outline = outline_of(case)
    group = outline.num_query_heads // outline.num_kv_heads
    heads, kv_heads = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    dlse = case["dlse"][0, :, heads].astype(np.float64).reshape(-1)
    queries = QuerySide.of(
        flat(case["query"], heads), flat(answer["dquery"], heads), flat(case["dout"], heads),
        flat(answer["out"], heads), dlse,
    )  # fmt: skip
    keys = KeySide.of(
        flat(case["key"], kv_heads), change(flat(answer["dkey"], kv_heads)), flat(case["value"], kv_heads),
        change(flat(answer["dvalue"], kv_heads)),
    )  # fmt: skip
    scale = outline.scale or outline.head_dim**-0.5
    return identities(queries, keys, outline, scale=scale, precision=precision)


def shares(*arguments, **options):
    result = found(*arguments, **options)
    return {name: (np.abs(one.got - one.expected) / one.allowance).max() for name, one in result.items()}


def right_answer(case):
    forward = {name: array for name, array in case.items() if name not in ("dout", "dlse")}
    gradients = oracle.attention_vjp(**case)
    return {"out": oracle.attention(**forward).out, **gradients._asdict()}


def without(*keys):
    def change(side):
        side = side.copy()
        side[list(keys)] = 0.0
        return side

    return change


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_head", [0, 1])
def test_the_right_answer_adds_up(draw, variant, kv_head):
    case = draw(seed=3, seq=SEQ, heads=(4, 2), dims=(8, 6), **VARIANTS[variant])
    answer = right_answer(case)
    for name, one in found(case, answer, kv_head).items():
        np.testing.assert_allclose(one.got, one.expected, rtol=1e-10, atol=1e-10, err_msg=name)
        assert (one.allowance > 0).all(), name
        assert one.expected.shape == {"dkey": (8, 8), "dvalue": (6, 6)}[name], "features by features"
    of_another = found(case, answer, 1 - kv_head)["dvalue"]
    assert not np.allclose(of_another.expected, one.expected), "each kv head has its own sums"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_key_that_nobody_probed_is_missed_and_so_is_one_rank(draw, dtype):
    """128 keys: key 12 has a tenth of them before it; rank 5 of 8 holds keys 80 to 95. Every kv head, six draws."""
    for seed in range(6):
        case = draw(seed=seed, seq=SEQ, heads=(4, 2), dims=(16, 16), window=(None, 0))
        answer = right_answer(case)
        for kv_head in (0, 1):
            options = {"kv_head": kv_head, "precision": Precision(dtype)}
            assert max(shares(case, answer, **options).values()) < 1e-6, "the right answer"
            for lost in ([12], range(80, 96)):
                seen = shares(case, answer, change=without(*lost), **options)
                assert seen["dvalue"] > 1, f"dvalue of {lost}, seed {seed}"
                assert seen["dkey"] > 1 or dtype == "bfloat16", f"dkey of {lost}, seed {seed}"


@pytest.fixture
def oracle_cases(legal_algorithms):
    """The kinds of values of bench/oracle_cases.py (bench is no package)."""
    path = Path(__file__).parents[2] / "bench" / "oracle_cases.py"
    spec = importlib.util.spec_from_file_location("oracle_cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle_cases"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "peaked", "uniform", "tiny", "positive"])
def test_legal_algorithms_add_up_within_the_allowance(legal_algorithms, oracle_cases, dtype, kind):
    """Every sixth of the zoo, and all with declared numerics: no more than 0.6 of it."""
    shape = oracle_cases.Shape(seq=96, head_dim=16, value_dim=12, window=(None, 0), attn_logits_soft_cap=5.0)
    case = oracle_cases.draw(kind, 21, dtype, shape)
    members = [*list(legal_algorithms.zoo(dtype))[::6]]
    members += [member for member in legal_algorithms.declared_zoo() if member.dtype == dtype]
    for member in members:
        problem = legal_algorithms.Problem(
            **{name: case[name][0].swapaxes(0, 1) for name in ARRAYS},
            visible=oracle.mask.visible(96, window=(None, 0))[0],
            sinks=case["sinks"],
            attn_logits_soft_cap=5.0,
            scale=0.25,
        )
        computed = legal_algorithms.compute(member, problem)._asdict()
        answer = {name: computed[name].swapaxes(0, 1)[None] for name in ("out", "dquery", "dkey", "dvalue")}
        used = shares(case, answer, precision=oracle_cases.declared(member))
        assert max(used.values()) < 0.6, f"{used} of {member}"


def test_sides_over_parts_add_up_to_the_whole(draw):
    case = draw(seed=5, seq=SEQ, heads=(1, 1), dims=(8, 8), window=(None, 0))
    random = np.random.default_rng(0)
    rows = [random.normal(size=(SEQ, 8)) for _ in range(4)]
    dlse = random.normal(size=SEQ)
    whole = QuerySide.of(*rows, dlse)
    parts = QuerySide.of(*(r[:50] for r in rows), dlse[:50]).plus(QuerySide.of(*(r[50:] for r in rows), dlse[50:]))
    whole_keys = KeySide.of(*rows)
    parts_keys = KeySide.of(*(r[:50] for r in rows)).plus(KeySide.of(*(r[50:] for r in rows)))
    options = {"outline": outline_of(case), "scale": 0.5, "precision": Precision("bfloat16")}
    for name, one in identities(whole, whole_keys, **options).items():
        other = identities(parts, parts_keys, **options)[name]
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_allowance_grows_as_the_root_of_the_length(draw):
    """Of a window of fixed width, so that every row is alike: four times the rows, twice the allowance."""
    medians = []
    for seq in (256, 1024):
        case = draw(seed=2, seq=seq, heads=(1, 1), dims=(8, 8), window=(15, 0))
        medians.append({name: np.median(one.allowance) for name, one in found(case, right_answer(case)).items()})
    for name in ("dkey", "dvalue"):
        assert 1.6 < medians[1][name] / medians[0][name] < 2.6, name
