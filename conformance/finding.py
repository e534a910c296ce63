"""A finding: one answer that is wrong, with everything needed to see it again. Plain frozen data.

May touch: nothing. Tests: tests/conformance/test_finding.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One wrong answer.

    `check`, `tensor` and `signature` name its kind and make its stable id; the rest is this occurrence of it: the
    case's text, the data draw, the rank, the index (batch row, position, head, feature; as many as the tensor has),
    what was expected and got, the allowance of that element, the error as a share of the allowance, and one sentence.
    """

    target: str
    check: str
    tensor: str
    signature: str
    case: str
    reading: str
    draw: int | None = None
    rank: int | None = None
    index: tuple[int, ...] | None = None
    expected: float | str | None = None
    got: float | str | None = None
    allowance: float | None = None
    share: float | None = None
    detail: str = ""

    @property
    def kind(self) -> tuple[str, str, str]:
        """What makes two findings the same kind."""
        return (self.check, self.tensor, self.signature)

    @property
    def id(self) -> str:
        """Ten hexadecimal digits that stay the same while the kind does."""
        return hashlib.sha256("\0".join(self.kind).encode()).hexdigest()[:10]

    def explains(self, other: Finding) -> bool:
        """Whether `other` is the same in a narrower circumstance: wrong "on data draw 1 only" beside plainly wrong."""
        same_place = (self.check, self.tensor) == (other.check, other.tensor)
        return same_place and other.signature.startswith(f"{self.signature}, ")

    def to_json(self) -> dict[str, Any]:
        """The finding for report.json: NaN and infinities as strings, control characters escaped."""
        content = {"id": self.id, **{name: getattr(self, name) for name in self.__dataclass_fields__}}
        return {name: plain(value) for name, value in content.items() if value not in (None, "")}


def plain(value: Any) -> Any:
    """The value as strict JSON can hold it."""
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return str(value)
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value
