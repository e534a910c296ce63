"""Sums over a mesh axis that stay as wide as their terms, whatever XLA thinks of what becomes of them.

XLA for TPU sums in bfloat16 where it sees a float32 all-reduce rounded to bfloat16 afterwards, and turns some
reduce-scatters into such all-reduces. Tested in tests/impl/wire/test_aot.py, on what it compiles to.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def kept_wide(total: Float[Array, "..."], axis_name: str) -> Float[Array, "..."]:
    """`total`, a sum over `axis_name`, behind a factor of one that the compiler cannot see through.

    An `optimization_barrier` does not do: it is gone before XLA narrows the sum.
    """
    one = jnp.where(lax.axis_index(axis_name) < 0, jnp.zeros((), total.dtype), jnp.ones((), total.dtype))
    return total * one


def summed(terms: Float[Array, "..."], axis_name: str) -> Float[Array, "..."]:
    """The sum over all ranks of `axis_name`, on each of them."""
    return kept_wide(lax.psum(terms, axis_name), axis_name)
