"""The numerics that an implementation declares, and the unit roundoffs that follow from them.

Plain data. Nothing below bfloat16 operands with float32 sums can be declared: that is the floor. The formulas that
use these numbers are in softmax_errors.py and error_terms.py. Tested in tests/oracle/test_precision.py.
"""

import dataclasses

# Unit roundoff, half the distance from 1 to the next number, of significands of 8, 24 and 53 bits; and the smallest
# normal number (bfloat16 has float32's exponent).
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST_NORMAL = {"float32": 2.0**-126, "float64": 2.0**-1022}

# float32 operands on a matrix unit that multiplies bfloat16, error of an operand. One pass rounds it to 8 bits. Three
# passes keep two pieces of 8 bits (2^-16), and drop the product of the low ones (2^-16 again, shared by two operands).
# Six passes keep three pieces, which is float32.
PASS_ROUNDOFF = {1: 2.0**-8, 3: 1.5 * 2.0**-16, 6: 0.0}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Declared numerics. Sums, softmax and lse are always float32 (float64 where dtype is float64).

    Attributes:
        dtype: of inputs, outputs and gradients: "bfloat16", "float32", or "float64" (the exact tier).
        rounded_probabilities: probabilities, their cotangent and that of the logits are rounded to bfloat16 before
            they enter a matmul. None = as is usual: yes for bfloat16, no otherwise.
        prescaled_query: the query is multiplied by the scale and rounded to `dtype` before the first matmul.
        rounded_logits: the logits are rounded to bfloat16 on their way to the softmax.
        rounded_partials: results over some of the keys or some of the queries (those of a rank, a chunk, a step of a
            ring) are rounded to `dtype` before they are added up.
        matmul_passes: bfloat16 passes of a float32 matmul: 6 (float32 proper), 3 or 1 (the TPU default precision).
    """

    dtype: str
    rounded_probabilities: bool | None = None
    prescaled_query: bool = False
    rounded_logits: bool = False
    rounded_partials: bool = False
    matmul_passes: int = 6

    def __post_init__(self) -> None:
        """Refuse what no implementation has, or what lies below the floor."""
        if self.dtype not in UNIT_ROUNDOFF:
            raise ValueError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}, got {self.dtype!r}")
        if self.matmul_passes not in PASS_ROUNDOFF:
            allowed = ", ".join(map(str, PASS_ROUNDOFF))
            raise ValueError(f"matmul_passes must be one of {allowed}, got {self.matmul_passes!r}")
        if self.matmul_passes != 6 and self.dtype != "float32":
            raise ValueError(
                f"matmul_passes must be 6 unless dtype is float32, got {self.matmul_passes} for {self.dtype}"
            )
        for name in ("rounded_probabilities", "prescaled_query", "rounded_logits", "rounded_partials"):
            declared = getattr(self, name)
            if not isinstance(declared, bool) and not (declared is None and name == "rounded_probabilities"):
                raise ValueError(f"{name} must be True or False, got {declared!r}")
            if self.dtype == "float64" and declared:
                raise ValueError(f"{name} must not be declared for float64 (the exact tier rounds nothing), got True")

    def __str__(self) -> str:
        """What a verdict prints: the dtype and whatever is not its default."""
        usual = Precision(self.dtype)
        changes = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != getattr(usual, field.name)
        ]
        return " ".join([self.dtype, *changes])

    @property
    def statistics_dtype(self) -> str:
        """The dtype of sums, of lse and of dsinks."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def output_roundoff(self) -> float:
        """Of out, dquery, dkey and dvalue."""
        return UNIT_ROUNDOFF[self.dtype]

    @property
    def stored_roundoff(self) -> float:
        """Of out where the backward reads it, and of a head's share of dkey and dvalue; 0 where a sum's rounding."""
        return UNIT_ROUNDOFF["bfloat16"] if self.dtype == "bfloat16" else 0.0

    @property
    def statistics_roundoff(self) -> float:
        """Of everything that is summed, and of lse and dsinks."""
        return UNIT_ROUNDOFF[self.statistics_dtype]

    @property
    def smallest_normal(self) -> float:
        """Below it, numbers may be flushed to zero."""
        return SMALLEST_NORMAL[self.statistics_dtype]

    @property
    def factor_roundoff(self) -> float:
        """Of probabilities and cotangents of logits as factors of a matmul; 0 where no more than a sum's rounding."""
        rounded = self.dtype == "bfloat16" if self.rounded_probabilities is None else self.rounded_probabilities
        return UNIT_ROUNDOFF["bfloat16"] if rounded else self.input_roundoff

    @property
    def input_roundoff(self) -> float:
        """Of query, key, value and dout as factors of a matmul."""
        return PASS_ROUNDOFF[self.matmul_passes]

    @property
    def query_roundoff(self) -> float:
        """Of the query in the logits, over and above `input_roundoff`."""
        return self.output_roundoff if self.prescaled_query else 0.0

    @property
    def logits_roundoff(self) -> float:
        """Of the logits, over and above that of sums."""
        return UNIT_ROUNDOFF["bfloat16"] if self.rounded_logits else 0.0

    @property
    def partial_roundoff(self) -> float:
        """Of a result over some of the keys or some of the queries, before it is added to the others."""
        return self.output_roundoff if self.rounded_partials else 0.0
