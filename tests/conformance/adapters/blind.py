"""Targets whose mistake ordinary data do not show, or show only in one gradient. Each is right but for one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gathered import Gathered, attend, right, visible
from wrong import one_key_too_many


@dataclass(frozen=True)
class _GradientOf:
    """The right answer, and the gradients of `wrong_inputs` from a target with another mask."""

    wrong_inputs: tuple[str, ...]
    name: str
    empty_rows: str = "zero"

    def supports(self, problem: Any) -> str | None:
        """As the target that it is made of."""
        return right.supports(problem)

    def attention(self, query: Any, key: Any, value: Any, **context: Any) -> Any:
        """out, by the target contract."""
        arrays = {"query": query, "key": key, "value": value}
        still = {name: jax.lax.stop_gradient(array) for name, array in arrays.items()}
        of_right = {name: still[name] if name in self.wrong_inputs else arrays[name] for name in arrays}
        of_wrong = {name: arrays[name] if name in self.wrong_inputs else still[name] for name in arrays}
        out = right.attention(**of_right, **context)
        other = one_key_too_many.attention(**of_wrong, **context)
        return out + (other - jax.lax.stop_gradient(other))  # x - x is exactly zero


def _finite_mask(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    """Hides keys by adding -60: e^-60 is far below what rounding allows."""
    return attend(logits + jnp.where(mask[:, None], 0.0, -60.0), jnp.ones_like(mask), value, sinks)


def _leaks_batch_rows(problem: Any, rank: Any, gathered: Any) -> Any:
    """A billionth of the values of the next batch row."""
    key, value, *others = gathered
    return key, value + 1e-9 * jnp.roll(value, 1, axis=0), *others


def _leaks_heads(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    """A billionth of the values of the next head."""
    return attend(logits, mask, value + 1e-9 * jnp.roll(value, 1, axis=2), sinks)


class _Counts:
    """Right on the first calls of a program, and a hair off from then on: something is kept from call to call."""

    name = "counts"
    empty_rows = "zero"

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}

    def supports(self, problem: Any) -> str | None:
        """Its callback takes one rank."""
        return None if problem.num_devices == 1 else "its callback takes one rank"

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, **optional: Any) -> Any:
        """out, by the target contract."""

        def count(seen: Any) -> np.ndarray:
            self._calls[problem] = self._calls.get(problem, 0) + 1
            return np.float32(1e-7 if self._calls[problem] > 6 else 0.0) * np.ones_like(seen)

        first = jax.lax.stop_gradient(query[0, 0, 0, 0])
        drift = jax.pure_callback(count, jax.ShapeDtypeStruct((), np.float32), first)
        return Gathered().attention(query, key, value, problem=problem, mesh=mesh, **optional) * (1 + drift)


class _KeepsWindow:
    """Remembers the window by the length of the sequence: right in a process of its own."""

    name = "keeps_window"
    empty_rows = "zero"

    def __init__(self) -> None:
        self._windows: dict[int, Any] = {}

    def supports(self, problem: Any) -> str | None:
        """As the target that it is made of."""
        return right.supports(problem)

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, **context: Any) -> Any:
        """out, by the target contract."""
        window = self._windows.setdefault(problem.seq_len, problem.window)
        kept = problem.replace(window=window, sliding_window_size=None)
        return right.attention(query, key, value, problem=kept, **context)


class _WearsOut(_KeepsWindow):
    """Right on the first two traces of a problem: the primal call and the forward of its VJP."""

    name = "wears_out"

    def __init__(self) -> None:
        self._traces: dict[Any, int] = {}

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, **context: Any) -> Any:
        """out, by the target contract."""
        self._traces[problem] = self._traces.get(problem, 0) + 1
        return right.attention(query, key, value, problem=problem, **context) * (1.01 ** (self._traces[problem] > 2))


def _sees_last_key(problem: Any, positions: Any, key_positions: Any, ids: Any, key_ids: Any) -> Any:
    """Query 1 of every row sees the last key too: one pair in the whole mask."""
    extra = (positions[:, :, None] == 1) & (key_positions[:, None, :] == problem.seq_len - 1)
    return visible(problem, positions, key_positions, ids, key_ids) | extra


def _wraps_around(problem: Any, positions: Any, key_positions: Any, ids: Any, key_ids: Any) -> Any:
    """The last key that a query sees is its position plus the right bound, in int32."""
    mask = visible(problem, positions, key_positions, ids, key_ids)
    return mask & (key_positions[:, None, :] <= (positions + problem.window[1])[:, :, None])


dquery_sees_one_more = _GradientOf(("query",), "dquery_sees_one_more")
dkey_sees_one_more = _GradientOf(("key",), "dkey_sees_one_more")
dvalue_sees_one_more = _GradientOf(("value",), "dvalue_sees_one_more")
finite_mask = Gathered(attend=_finite_mask, name="finite_mask")
leaks_batch_rows = Gathered(fetched=_leaks_batch_rows, name="leaks_batch_rows")
leaks_heads = Gathered(attend=_leaks_heads, name="leaks_heads")
sees_last_key = Gathered(mask=_sees_last_key, name="sees_last_key")
wraps_around = Gathered(mask=_wraps_around, name="wraps_around")
counts = _Counts()
keeps_window = _KeepsWindow()
wears_out = _WearsOut()
