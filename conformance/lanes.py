"""Several targets over one list of cases, each at its own pace, no more at a time than there are cores.

While the workers compute, the parent computes the oracle's answers, which targets on the same case share.
May touch: sessions, the answers' cache; never JAX. Tests: tests/conformance/test_lanes.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from conformance.answers import CASES_CACHED, Answer, answer_for, variant_answer
from conformance.inputs import NUM_DRAWS
from conformance.problem import Case
from conformance.session import CaseResult, Session
from conformance.target import calls_of
from conformance.variants import coded_variants_of

# A worker that declines answers within this; what computes takes longer, and the answers are made meanwhile.
_GLANCE_SECONDS = 0.02
_WAIT_SECONDS = 0.1


class Lane:
    """One session on its way through the cases."""

    def __init__(self, session: Session, cases: Sequence[Case]) -> None:
        self.session = session
        self.num_done = 0
        self.is_running = False
        self._cases = cases
        self._unanswered: list[Callable[[], Answer]] = []

    @property
    def has_more(self) -> bool:
        """Whether a case is left to start."""
        return not self.is_running and self.num_done < len(self._cases)

    def end_at(self, num_cases: int) -> None:
        """Starts no case beyond the first `num_cases`; the one that runs is still judged."""
        self._cases = self._cases[: max(num_cases, self.num_done + self.is_running)]

    def start(self) -> None:
        """Starts the next case."""
        case = self._cases[self.num_done]
        self.session.start(case)
        self.is_running = True
        target = self.session.description
        if target.platform == "tpu" and target.tpu_precision_varies:
            self._unanswered = []  # the numerics that it is held to are known once it has answered
            return
        self._unanswered = [
            functools.partial(answer_for, target, case, draw, call)
            for draw in range(NUM_DRAWS)
            for call in calls_of(target, case)
        ]
        coded = coded_variants_of(case, self.session.check_names)
        self._unanswered += [functools.partial(variant_answer, target, case, variant) for variant in coded]

    def compute_answer(self) -> bool:
        """Has the oracle make one more answer to the case that runs; False if there is none to make."""
        if not self.is_running or not self._unanswered:
            return False
        self._unanswered.pop(0)()
        return True

    def judge(self) -> CaseResult:
        """The result of the case that runs, once its session is ready."""
        result = self.session.judge()
        self.is_running = False
        self.num_done += 1
        return result


def next_judged(lanes: Sequence[Lane]) -> Lane | None:
    """Starts what can start and waits until one lane can be judged; None once every case of every lane is done.

    A lane whose case has to be run once more, alone, comes when no other is running, and none is started before.
    """
    while True:
        running = [lane for lane in lanes if lane.is_running]
        ready = [lane for lane in running if lane.session.ready(_GLANCE_SECONDS)]
        computing = [lane for lane in running if lane not in ready]
        at_once = [lane for lane in ready if not lane.session.needs_quiet]
        if judged := at_once or ([] if computing else ready):
            return judged[0]
        if not ready and _start_one(lanes, len(running)):
            continue
        if not running:
            return None
        if not any(lane.compute_answer() for lane in computing):
            computing[0].session.ready(_WAIT_SECONDS)


def _start_one(lanes: Sequence[Lane], num_running: int) -> bool:
    """Starts the lane that is furthest behind, if there is a core for it and the shared answers are still kept."""
    waiting = [lane for lane in lanes if lane.has_more]
    if not waiting or num_running >= (os.cpu_count() or 1):
        return False
    furthest_behind = min(lane.num_done for lane in lanes if lane.has_more or lane.is_running)
    lane = min(waiting, key=lambda lane: lane.num_done)
    if lane.num_done - furthest_behind >= CASES_CACHED:
        return False
    lane.start()
    return True
