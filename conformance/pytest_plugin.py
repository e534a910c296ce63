"""The suite under pytest: `pytest --halocheck-target my_adapter:attention`, or two lines in a test file of one's own.

    from conformance.pytest_plugin import conformance_test
    test_my_attention = conformance_test("my_adapter:attention")

One test for each check and feature area; under pytest-xdist every process has workers of its own.
May touch: pytest, suite.py; never JAX. Tests: tests/conformance/test_pytest_plugin.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.case_list import STRENGTH
from conformance.devices import DEFAULT_DEVICES, parse_devices
from conformance.suite import NothingTried, Suite, SuiteFailure
from conformance.target import TargetError
from conformance.tpus import PLATFORM

_SUITE = pytest.StashKey[Suite]()


def conformance_test(target: str) -> Callable[..., None]:
    """A test function for one's own test file: the suite on `target` ("module:attribute" or "file.py:attribute").

    It is parametrized by check and area; the options of the command line (`--halocheck-profile`, …) hold for it too.
    """

    @pytest.mark.halocheck
    def test(halocheck_check: str, halocheck_area: str, request: pytest.FixtureRequest) -> None:
        _hold(request.config, target, halocheck_check, halocheck_area)

    return test


class ConformanceItem(pytest.Item):
    """One check on one feature area of a target that the command line names."""

    def __init__(self, *, target: str, check: str, area: str, **of_node: Any) -> None:
        super().__init__(**of_node)
        self.target, self.check, self.area = target, check, area
        self.add_marker(pytest.mark.halocheck)

    def runtest(self) -> None:
        """Runs the area's cases, unless a test before has, and fails on what this check found."""
        _hold(self.config, self.target, self.check, self.area)

    def reportinfo(self) -> tuple[str, None, str]:
        """The heading of a failure."""
        return (self.target, None, f"halocheck {self.target}: {self.check} on {self.area}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite."""
    group = parser.getgroup("halocheck", "sliding-window attention held against the halocheck oracle")
    mesh = f"{DEFAULT_DEVICES.platform}:{DEFAULT_DEVICES.count}"
    for name, options in {
        "target": {"action": "append", "default": [], "metavar": "TARGET", "help": "module:attribute; may be repeated"},
        "profile": {"choices": tuple(STRENGTH), "default": "quick", "help": "which case list (default quick)"},
        "examples": {"type": int, "metavar": "N", "help": "cases in all (default: the profile's)"},
        "seed": {"type": int, "default": 0, "metavar": "S", "help": "seed of the case list (default 0)"},
        "mesh": {"default": mesh, "metavar": "MESH", "help": f"cpu:N simulated devices, or tpu (default {mesh})"},
    }.items():
        group.addoption(f"--halocheck-{name}", **options)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker and reads the options; the list of cases is made when a test needs it."""
    config.addinivalue_line("markers", "halocheck: a check of the halocheck suite on a feature area of a target")
    options = config.option
    for name, value, lowest in (("examples", options.halocheck_examples, 1), ("seed", options.halocheck_seed, 0)):
        if value is not None and value < lowest:
            raise pytest.UsageError(f"--halocheck-{name} must be >= {lowest}, got {value}")
    if options.halocheck_mesh == PLATFORM and _is_distributed(config):
        raise pytest.UsageError("--halocheck-mesh tpu takes one process, without -n: a TPU belongs to one at a time")
    try:
        devices = parse_devices(options.halocheck_mesh)
    except ValueError as error:
        raise pytest.UsageError(f"--halocheck-{error}") from error
    config.stash[_SUITE] = Suite(devices, options.halocheck_profile, options.halocheck_seed, options.halocheck_examples)


def _is_distributed(config: pytest.Config) -> bool:
    """Whether pytest-xdist shares the tests among processes, seen from the first one or from theirs."""
    return hasattr(config, "workerinput") or bool(config.getoption("numprocesses", None))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the workers."""
    if _SUITE in config.stash:
        config.stash[_SUITE].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes what `conformance_test` made."""
    if "halocheck_area" in metafunc.fixturenames:
        pairs = metafunc.config.stash[_SUITE].tests
        metafunc.parametrize(("halocheck_check", "halocheck_area"), pairs, ids=[f"{a}-{check}" for check, a in pairs])


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among them
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the tests of the targets that the command line names."""
    for target in config.option.halocheck_target:
        for check, area in config.stash[_SUITE].tests:
            name = f"halocheck[{target}-{area}-{check}]"
            of_item = {"target": target, "check": check, "area": area}
            items.append(ConformanceItem.from_parent(session, name=name, nodeid=name, **of_item))


def _hold(config: pytest.Config, target: str, check: str, area: str) -> None:
    __tracebackhide__ = True
    try:
        config.stash[_SUITE].hold(target, check, area)
    except NothingTried as error:
        pytest.skip(str(error))
    except TargetError as error:
        pytest.fail(f"{target} does not load\n{error}", pytrace=False)
    except SuiteFailure as error:
        pytest.fail(str(error), pytrace=False)
