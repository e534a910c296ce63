"""Which cases the costly checks are asked on: a few of a list, as a pure function of the case.

By the seed, which is a case's number in its list, and never zero: the shrinker makes every seed zero that it can, and
shrinking another check's finding must not pay for these. May touch: problem. Tests: tests/conformance/test_further.py.
"""

from __future__ import annotations

from conformance.problem import Case

# One case in so many, and its remainder. Odd remainders: such cases do not call attention_with_lse as well.
_ONE_IN = {
    "errors": (32, 5),
    "programs": (32, 3),
    "races": (16, 7),
    "remat": (64, 13),
    "work": (36, 21),
    "compiled work": (144, 21),
    "fresh process": (128, 67),  # some of those of "programs"
}


def asks_lse(case: Case) -> bool:
    """Whether attention_with_lse is called beside attention: a quarter of a list, and whatever is shrunk."""
    return case.seed % 4 == 0


def asks_errors(case: Case) -> bool:
    """Whether problems that no case may have are put to the target beside this case."""
    return _is_designated("errors", case)


def asks_races(case: Case) -> bool:
    """Whether kernels of this case's program that copy by themselves run under the race detector."""
    return _is_designated("races", case)


def asks_remat(case: Case) -> bool:
    """Whether the gradient of this case is also taken under rematerialisation."""
    return _is_designated("remat", case)


def seed_that_asks_remat(number: int) -> int:
    """The seeds for which `asks_remat` is true, by number: for those who want such a case."""
    stride, remainder = _ONE_IN["remat"]
    return number * stride + remainder


def asks_work(case: Case) -> bool:
    """Whether programs for longer sequences than this case's are traced."""
    return _is_designated("work", case)


def compiles_work(case: Case) -> bool:
    """Whether those are compiled too, where a target is judged by it."""
    return _is_designated("compiled work", case)


def asks_programs(case: Case) -> bool:
    """Whether another problem is called after this case, and then the case once more (the check `invariance`)."""
    return _is_designated("programs", case)


def asks_fresh_process(case: Case) -> bool:
    """Whether those programs start in a process that has run no other case: what earlier cases left to be kept may suit
    them by chance. To start one takes two seconds.
    """
    return _is_designated("fresh process", case)


def _is_designated(check: str, case: Case) -> bool:
    stride, remainder = _ONE_IN[check]
    return case.seed % stride == remainder
