"""Which lost gradients of keys the identities of oracle/identities.py see, and what legal algorithms need of them.

    python bench/lost_keys.py [--lengths 256,1024]

Full causal, by dtype, length and kind of values (all but the structured ones): the largest share of the allowance that
any pair of features shows, dkey and dvalue, where nothing is lost (by the first members of the zoo of
legal_algorithms.py) and where the gradients of one key, or of one rank's keys of eight, are 0.
"""

import argparse
import itertools
from typing import Any

import legal_algorithms
import numpy as np
from oracle_cases import KINDS, Shape, declared, draw, is_structured

from oracle.identities import KeySide, QuerySide, identities
from oracle.outline import Outline

TENSORS = ("query", "key", "value", "dout", "dlse")
SHAPE = Shape(query_heads=4, kv_heads=1, head_dim=32, value_dim=32, window=(None, 0))
MEMBERS = 6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,1024", help="of the sequence, comma-separated")
    lengths = [int(length) for length in parser.parse_args().lengths.split(",")]
    for dtype, length, kind in itertools.product(("float32", "bfloat16"), lengths, KINDS):
        if is_structured(kind):
            continue
        case = draw(kind, 31, dtype, Shape(**{**vars(SHAPE), "seq": length}))
        members = list(legal_algorithms.zoo(dtype))
        shares = [lost(case, member, ()) for member in members[:: len(members) // MEMBERS]]
        legal = {tensor: max(share[tensor] for share in shares) for tensor in shares[0]}
        columns = {"nothing": legal}
        columns |= {f"key {key}": lost(case, members[0], [key]) for key in (length // 20, length // 2)}
        for rank in (1, 7):
            columns[f"rank {rank}"] = lost(case, members[0], range(rank * length // 8, (rank + 1) * length // 8))
        print(f"{dtype} S = {length} {kind}:", end="")
        print(*(f" {name} {of['dkey']:.2g} {of['dvalue']:.2g}" for name, of in columns.items()), sep=",", flush=True)


def lost(case: dict[str, Any], member: legal_algorithms.Algorithm, keys: Any) -> dict[str, float]:
    """The largest share by tensor, of what an algorithm computes without the gradients of some keys."""
    _, length, query_heads, head_dim = case["query"].shape
    scale, visible = head_dim**-0.5, np.tril(np.ones((length, length), bool))
    problem = legal_algorithms.Problem(
        **{name: case[name][0].swapaxes(0, 1) for name in TENSORS},
        visible=visible,
        sinks=case["sinks"],
        attn_logits_soft_cap=None,
        scale=scale,
    )
    computed = legal_algorithms.compute(member, problem)
    queries = QuerySide.of(
        rows(problem.query), rows(computed.dquery), rows(problem.dout), rows(computed.out), rows(problem.dlse)[:, 0]
    )
    dkey, dvalue = rows(computed.dkey), rows(computed.dvalue)
    dkey[list(keys)] = dvalue[list(keys)] = 0.0
    side = KeySide.of(rows(problem.key), dkey, rows(problem.value), dvalue)
    outline = Outline(1, length, query_heads, 1, head_dim, window=(None, 0), sinks=case["sinks"])
    found = identities(queries, side, outline, scale=scale, precision=declared(member))
    return {name: float((np.abs(one.got - one.expected) / one.allowance).max()) for name, one in found.items()}


def rows(array: np.ndarray) -> np.ndarray:
    """[heads, seq, dim] as float64 [heads * seq, dim]."""
    return np.asarray(array).astype(np.float64).reshape(array.shape[0] * array.shape[1], -1)


if __name__ == "__main__":
    main()
