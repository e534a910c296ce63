"""Loading a target: what a spec may name, what its author reads when it does not load, what the contract refuses."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.problem import Problem
from conformance.target import TargetDescription, TargetError, load_target, make_target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def _attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
    return query


@pytest.mark.parametrize(
    "spec", ["my_adapter:attention", "my_adapter.py:attention", "{folder}/my_adapter.py:attention"]
)
def test_a_function_is_found_by_module_and_by_file_from_the_working_directory(folder: Path, spec: str) -> None:
    (folder / "my_adapter.py").write_text("def attention(query, key, value, **context):\n    return 'mine'\n")
    target = load_target(spec.format(folder=folder))
    assert target.attention(1, 2, 3) == "mine", "the function of that file"


def test_a_file_may_import_its_neighbour(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "kernel_of_mine.py").write_text("def attention(query, key, value, **context):\n    return 7\n")
    (folder / "sub" / "adapter_of_mine.py").write_text("from kernel_of_mine import attention\n")
    assert load_target("sub/adapter_of_mine.py:attention").attention(1, 2, 3) == 7, "as `python sub/…` would"


@pytest.mark.parametrize("spec", ["my_adapter", "my_adapter:", ":attention", ""])
def test_a_spec_of_another_form_is_refused_with_the_form(spec: str) -> None:
    with pytest.raises(TargetError, match=r"a target is module:attribute or path/to/file\.py:attribute, got"):
        load_target(spec)


class _OfInstances:
    def attention(self, query: Any, key: Any, value: Any, **context: Any) -> Any:
        return query


class _OfItself:
    @staticmethod
    def attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
        return query


def test_a_class_is_refused_where_its_attention_needs_an_instance() -> None:
    with pytest.raises(TargetError, match="m:Mine is a class whose `attention` needs an instance"):
        make_target(_OfInstances, "m:Mine")
    assert make_target(_OfInstances(), "m:mine").attention(1, 2, 3) == 1, "an instance has all that it needs"
    assert make_target(_OfItself, "m:Mine").attention(1, 2, 3) == 1, "and so has a class of static functions"


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(TargetError, match=r"no such file: adapters/none\.py"):
        load_target("adapters/none.py:attention")


def test_a_missing_attribute_is_named_with_the_nearest(folder: Path) -> None:
    (folder / "my_adapter.py").write_text("def attention(): pass\n")
    with pytest.raises(TargetError, match="my_adapter has no attribute 'atention'; did you mean 'attention'"):
        load_target("my_adapter:atention")


@pytest.mark.parametrize(
    ("source", "last_line"),
    [
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def helper():\n    return 1 / 0\nhelper()\n", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
    ids=["missing module", "raises", "exits"],
)
def test_a_target_that_does_not_import_shows_its_own_lines_and_none_of_ours(
    folder: Path, source: str, last_line: str
) -> None:
    (folder / "my_adapter.py").write_text(source)
    with pytest.raises(TargetError) as refused:
        load_target("my_adapter:attention")
    assert refused.value.report.splitlines()[-1] == last_line, "what went wrong"
    assert "my_adapter.py" in refused.value.report, "in which file"
    assert "conformance" not in refused.value.report, "no frame of the harness"
    assert "importlib" not in refused.value.report, "no frame of the import machinery"


def test_a_syntax_error_shows_the_line(folder: Path) -> None:
    (folder / "my_adapter.py").write_text("def attention(:\n")
    with pytest.raises(TargetError, match="SyntaxError") as refused:
        load_target("my_adapter.py:attention")
    assert "def attention(:" in refused.value.report, "the user's own line"


def test_a_module_that_does_not_exist_is_told_like_any_import_error(folder: Path) -> None:
    with pytest.raises(TargetError, match="No module named 'no_such_adapter'"):
        load_target("no_such_adapter:attention")


def test_a_plain_function_claims_nothing() -> None:
    target = make_target(_attention, "m:attention")
    assert target.description == TargetDescription("m:attention", "m:attention"), "the contract's defaults"
    expected = (False, None, {}, "undefined", True)
    of = target.description
    assert (of.has_lse, of.communication, of.precision, of.empty_rows, of.lse_grad) == expected, "written out"
    assert target.supports(Problem()) is None, "it supports every problem until it says otherwise"


def test_an_object_says_more_of_itself() -> None:
    candidate = SimpleNamespace(
        attention=_attention,
        attention_with_lse=_attention,
        name="mine",
        supports=lambda problem: "no",
        communication="halo",
        precision={"rounded_probabilities": True, "matmul_passes": 1},
        empty_rows="zero",
        lse_grad=False,
    )
    target = make_target(candidate, "m:mine")
    assert target.description == TargetDescription(
        "m:mine", "mine", True, "halo", {"rounded_probabilities": True, "matmul_passes": 1}, "zero", False
    ), "every attribute of the contract"
    assert target.supports(Problem()) == "no", "its own function"


def test_numerics_that_are_declared_for_a_tpu_hold_there_alone() -> None:
    of_both = make_target(SimpleNamespace(attention=_attention, precision={"rounded_logits": True}), "m:t").description
    on_tpu = dataclasses.replace(of_both, platform="tpu")
    assert of_both.numerics == on_tpu.numerics == {"rounded_logits": True}, "on a TPU as elsewhere"
    other = dataclasses.replace(of_both, tpu_precision={})
    assert other.numerics == {"rounded_logits": True}, "on simulated devices as before"
    assert dataclasses.replace(other, platform="tpu").numerics == {}, "there another kernel"


def test_numerics_of_a_tpu_may_be_for_some_problems_alone() -> None:
    def long_ones(problem: Problem, mesh: Any) -> bool:
        return problem.seq_len > 1024

    candidate = SimpleNamespace(
        attention=_attention, tpu_precision={"rounded_logits": True}, uses_tpu_precision=long_ones
    )
    target = make_target(candidate, "m:t")
    assert target.description.tpu_precision_varies, "the verdict says so"
    assert [target.uses_tpu_precision(Problem(seq_len=rows), None) for rows in (1024, 2048)] == [False, True], "its own"
    on_tpu = dataclasses.replace(target.description, platform="tpu")
    assert on_tpu.of_problem(True).numerics == {"rounded_logits": True}, "a problem that has them"
    assert on_tpu.of_problem(False).numerics == {}, "and one that has not"
    plain = make_target(SimpleNamespace(attention=_attention), "m:t")
    assert (plain.description.tpu_precision_varies, plain.uses_tpu_precision(Problem(), None)) == (False, True)


@pytest.mark.parametrize("candidate", [3, None, "attention", SimpleNamespace(attention=3), SimpleNamespace()])
def test_what_cannot_be_called_is_no_target(candidate: Any) -> None:
    with pytest.raises(TargetError, match="m:t is neither a function nor an object with a callable `attention`"):
        make_target(candidate, "m:t")


@pytest.mark.parametrize(
    ("attribute", "value", "rule"),
    [
        ("tpu_kernels", ("forwards",), "must be a tuple of forward, backward, got"),
        ("communication", "halos", "must be one of halo, all_gather, ring, ulysses, usp, got 'halos'"),
        ("empty_rows", "nan", "must be one of undefined, zero, got 'nan'"),
        ("lse_grad", "no", "must be one of True, False, got 'no'"),
        ("supports", True, "must be a function, got True"),
        ("attention_with_lse", "yes", "must be a function, got 'yes'"),
        ("precision", "bfloat16", "must map fields of oracle.budget.Precision to values, got 'bfloat16'"),
        ("precision", {"rounded_logits": "no"}, "must map fields of oracle.budget.Precision to values"),
    ],
)
def test_an_attribute_outside_the_contract_is_refused_rather_than_read_kindly(
    attribute: str, value: Any, rule: str
) -> None:
    candidate = SimpleNamespace(attention=_attention, **{attribute: value})
    with pytest.raises(TargetError) as refused:
        make_target(candidate, "m:t")
    assert f"m:t.{attribute} {rule}" in refused.value.report, "attribute, rule and value"
