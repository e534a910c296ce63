"""oracle/budget.py: every legal algorithm of bench/legal_algorithms.py fits into the allowance."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import oracle
from oracle.budget import Precision, answer_with_allowances, share

SEQ, HEADS, DIMS = 48, (4, 2), (32, 24)


def drawn(draw, kind, dtype):
    """A case of the given kind of values, stored in dtype."""
    case = draw(
        seed=77, seq=SEQ, heads=HEADS, dims=DIMS, window=(20, 0), sinks=np.array([0.5, -2.0, 3.0, 0.0], np.float32),
        attn_logits_soft_cap=5.0 if kind == "capped" else None,
    )  # fmt: skip
    change = {
        "peaked": {"query": 6 * case["query"]},
        "huge": {"query": 30 * case["query"], "key": 30 * case["key"]},
        "tiny": {name: 1e-3 * case[name] for name in ("query", "value", "dout")},
        "uniform": {"query": 0 * case["query"]},
        "cancelling": {"value": case["value"] * np.where(np.arange(SEQ) % 2, 1, -1)[:, None, None]},
        "constant": {name: np.full_like(case[name], 0.7) for name in ("query", "key", "value", "dout", "dlse")},
    }.get(kind, {})
    case.update(change)
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    case.update({name: case[name].astype(stored) for name in ("query", "key", "value", "dout")})
    return {**case, "dlse": case["dlse"].astype(np.float32)}


def largest_shares(module, algorithm, case, precision, structured_values=False):
    """The largest share of the allowance that an algorithm needs, by tensor."""
    answer, allowed = answer_with_allowances(**case, precision=precision, structured_values=structured_values)
    problem = module.Problem(
        **{name: case[name][0].swapaxes(0, 1) for name in ("query", "key", "value", "dout", "dlse")},
        visible=oracle.mask.visible(SEQ, window=case["window"])[0],
        sinks=case["sinks"],
        attn_logits_soft_cap=case["attn_logits_soft_cap"],
        scale=DIMS[0] ** -0.5,
    )
    computed = module.compute(algorithm, problem)._asdict()
    dsinks = computed.pop("dsinks")
    shares = {
        tensor: share(found.swapaxes(0, 1)[None], getattr(answer, tensor), getattr(allowed, tensor)).max()
        for tensor, found in computed.items()
    }
    return {**shares, "dsinks": share(dsinks, answer.dsinks, allowed.dsinks).max()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "capped", "peaked", "huge", "tiny", "uniform", "cancelling", "constant"])
def test_every_legal_algorithm_passes(draw, legal_algorithms, dtype, kind):
    case = drawn(draw, kind, dtype)
    for algorithm in legal_algorithms.zoo(dtype):
        shares = largest_shares(legal_algorithms, algorithm, case, Precision(dtype), kind == "constant")
        assert max(shares.values()) <= 1, f"{algorithm} needs {shares}"


def declared(algorithm):
    """The precision that a member of the declared zoo has to declare."""
    return Precision(
        algorithm.dtype,
        rounded_probabilities=algorithm.rounded_probabilities,
        prescaled_query=algorithm.prescaled_query,
        rounded_logits=algorithm.rounded_logits,
        rounded_partials=algorithm.rounded_partials,
        matmul_passes=algorithm.matmul_passes,
    )


@pytest.mark.parametrize("kind", ["plain", "capped", "peaked"])
def test_declared_numerics_pass_when_declared(draw, legal_algorithms, kind):
    for algorithm in legal_algorithms.declared_zoo():
        shares = largest_shares(legal_algorithms, algorithm, drawn(draw, kind, algorithm.dtype), declared(algorithm))
        assert max(shares.values()) <= 1, f"{algorithm} needs {shares}"


@pytest.mark.parametrize("matmul_passes", [1, 3])
def test_undeclared_bfloat16_passes_of_float32_fail(draw, legal_algorithms, matmul_passes):
    algorithm = legal_algorithms.Algorithm("float32", matmul_passes=matmul_passes)
    shares = largest_shares(legal_algorithms, algorithm, drawn(draw, "peaked", "float32"), Precision("float32"))
    assert shares["out"] > 1, f"{matmul_passes} passes are no float32 matmul: {shares}"


def test_undeclared_rounded_logits_fail(draw, legal_algorithms):
    algorithm = legal_algorithms.Algorithm("bfloat16", rounded_probabilities=True, rounded_logits=True)
    shares = largest_shares(legal_algorithms, algorithm, drawn(draw, "peaked", "bfloat16"), Precision("bfloat16"))
    assert shares["lse"] > 1, f"logits in bfloat16 show in lse: {shares}"


def test_undeclared_rounded_partials_fail(draw, legal_algorithms):
    """Two queries of different ranks read a key, and their shares of dvalue cancel: what is left is rounding."""
    case = drawn(draw, "plain", "bfloat16")
    opposite = case["dout"][:, :1].astype(float) * np.where(np.arange(SEQ) % 2, 1, -1)[:, None, None]
    case |= {"window": (1, 0), "dout": opposite.astype(ml_dtypes.bfloat16)}
    case |= {name: np.repeat(case[name], 2, axis=2) for name in ("key", "value")}  # a kv head each: no sum over heads
    case["query"] = (0.1 * case["query"].astype(float)).astype(ml_dtypes.bfloat16)
    algorithm = legal_algorithms.Algorithm("bfloat16", rounded_probabilities=True, rounded_partials=True, ranks=SEQ)
    undeclared, declared_ = (
        largest_shares(legal_algorithms, algorithm, case, Precision("bfloat16", rounded_partials=is_declared))
        for is_declared in (False, True)
    )
    assert undeclared["dvalue"] > 1, f"partial results in bfloat16 show where they cancel: {undeclared}"
    assert max(declared_.values()) <= 1, f"and are allowed for where declared: {declared_}"


def test_the_zoo_really_differs(draw, legal_algorithms):
    """Two members that round differently give different bits, or the zoo would be one algorithm under many names."""
    case = drawn(draw, "plain", "bfloat16")
    answers = set()
    for algorithm in legal_algorithms.zoo("bfloat16"):
        shares = largest_shares(legal_algorithms, algorithm, case, Precision("bfloat16"))
        answers.add(tuple(shares.values()))
    assert len(answers) >= 20, f"only {len(answers)} different answers"
    assert dataclasses.is_dataclass(legal_algorithms.Algorithm), "members are plain data"
