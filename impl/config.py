"""What a model says about its attention layers, and what one layer makes of it: strategy, window, layout, numerics.

Plain frozen data and its validation; knows nothing of arrays or meshes (validation.py does).
Tested in tests/impl/test_errors.py.
"""

import difflib
import enum
import math
import numbers
from dataclasses import dataclass

Window = tuple[int | None, int | None]

GLOBAL_STRATEGIES = ("all_gather", "ring", "ulysses", "usp")
LOCAL_STRATEGIES = ("halo", *GLOBAL_STRATEGIES)
LOAD_BALANCED_LAYOUTS = ("dual_chunk_swap", "striped")
AXIS_NAMES = ("context_axis", "data_axis", "tensor_axis", "ulysses_axis")
LOCAL_KERNELS = ("xla", "splash", "pallas_halo")
HALO_TRANSFERS = ("permute", "remote_copy", "remote_copy_or_permute")


class AttentionType(enum.Enum):
    """What kind of attention a layer is; LOCAL_SLIDING layers see a window, GLOBAL ones every key up to their own."""

    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One configuration for all attention layers of a model. Names as in MaxText where it has one.

    context_parallel_strategy: how K and V reach the query in GLOBAL layers.
    local_context_parallel_strategy: the same for LOCAL_SLIDING layers; "" inherits, never applies to GLOBAL.
    context_parallel_load_balance: whether the sequence lies in the layout `context_parallel_reorder_strategy`
        ("dual_chunk_swap" or "striped") rather than contiguously.
    sliding_window_size: keys that a LOCAL_SLIDING query sees, itself included. window: `(left, right)` in its place,
        keys before and after the query, None = unbounded.
    attn_logits_soft_cap: logits become `cap · tanh(logits / cap)`. scale: of the logits, None = 1/sqrt(head_dim).
    local_kernel: "" chooses by the platform of the mesh's devices.
    halo_transfer: how the kernel pallas_halo gets its halo: by XLA's collective "permute", or by a "remote_copy" of
        its own, a `ValueError` for layers that cannot (halo_fetch.py); these get "remote_copy_or_permute" by permute.
    context_axis, data_axis, tensor_axis, ulysses_axis: names of mesh axes; a mesh may lack data and tensor. Where the
        global strategy is "usp" the sequence lies on (context, ulysses), in local layers too: these then exchange
        heads over the ulysses axis and run their own strategy over the context axis.
    """

    context_parallel_strategy: str = "all_gather"
    local_context_parallel_strategy: str = ""
    context_parallel_load_balance: bool = False
    context_parallel_reorder_strategy: str = "dual_chunk_swap"
    sliding_window_size: int | None = None
    window: Window | None = None
    attn_logits_soft_cap: float | None = None
    scale: float | None = None
    local_kernel: str = ""
    halo_transfer: str = "permute"
    context_axis: str = "context"
    data_axis: str = "data"
    tensor_axis: str = "tensor"
    ulysses_axis: str = "ulysses"


@dataclass(frozen=True)
class ResolvedLayer:
    """What one layer runs: its strategy by name, its window, and the layout its sequence lies in."""

    strategy: str
    window: Window
    layout: str


def resolve(config: AttentionConfig, attention_type: AttentionType) -> ResolvedLayer:
    """Chooses strategy, window and layout of a layer. `ValueError` names the argument, its value and the rule."""
    if not isinstance(config, AttentionConfig):
        raise ValueError(f"config must be an AttentionConfig, got {config!r}")
    if not isinstance(attention_type, AttentionType):
        raise ValueError(f"attention_type must be an AttentionType, got {attention_type!r}")
    _check_strategies(config)
    _check_numerics(config)
    layout = _layout(config)
    if attention_type is AttentionType.GLOBAL:
        return ResolvedLayer(config.context_parallel_strategy, (None, 0), layout)
    strategy = config.local_context_parallel_strategy or config.context_parallel_strategy
    if strategy == "halo" and layout == "striped":
        raise ValueError(
            "local_context_parallel_strategy 'halo' needs a layout with chunks, "
            "got context_parallel_reorder_strategy 'striped'"
        )
    return ResolvedLayer(strategy, _local_window(config), layout)


def one_of(name: str, value: object, allowed: tuple[str, ...], note: str = "") -> None:
    """Raises a `ValueError` that names the nearest allowed value unless `value` is one of them."""
    if value in allowed:
        return
    nearest = difflib.get_close_matches(str(value), [choice for choice in allowed if choice], n=1, cutoff=0.5)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{note}{meant}")


def _check_strategies(config: AttentionConfig) -> None:
    if config.context_parallel_strategy == "halo":
        raise ValueError(
            "context_parallel_strategy must not be 'halo': a GLOBAL layer sees keys beyond any halo; "
            "set local_context_parallel_strategy='halo' for the LOCAL_SLIDING layers"
        )
    one_of("context_parallel_strategy", config.context_parallel_strategy, GLOBAL_STRATEGIES)
    one_of("local_context_parallel_strategy", config.local_context_parallel_strategy, ("", *LOCAL_STRATEGIES))
    if config.local_context_parallel_strategy == "usp" != config.context_parallel_strategy:
        raise ValueError(
            "local_context_parallel_strategy must not be 'usp' unless context_parallel_strategy is: it puts every "
            f"layer's sequence on two mesh axes, got context_parallel_strategy {config.context_parallel_strategy!r}"
        )
    one_of("local_kernel", config.local_kernel, ("", *LOCAL_KERNELS))
    one_of("halo_transfer", config.halo_transfer, HALO_TRANSFERS)
    if config.halo_transfer != "permute" and config.local_kernel != "pallas_halo":
        raise ValueError(
            f"halo_transfer {config.halo_transfer!r} is done by the kernel 'pallas_halo' alone, "
            f"got local_kernel {config.local_kernel!r}"
        )
    for name in AXIS_NAMES:
        if not isinstance(getattr(config, name), str):
            raise ValueError(f"{name} must be the name of a mesh axis, got {getattr(config, name)!r}")
    axes = tuple(getattr(config, name) for name in AXIS_NAMES)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{', '.join(AXIS_NAMES)} must differ, got {axes}")


def _check_numerics(config: AttentionConfig) -> None:
    cap, scale = config.attn_logits_soft_cap, config.scale
    if cap is not None and not (_is_finite_number(cap) and cap > 0):
        raise ValueError(f"attn_logits_soft_cap must be None or a finite number > 0, got {cap!r}")
    if scale is not None and not _is_finite_number(scale):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")


def _layout(config: AttentionConfig) -> str:
    if not isinstance(config.context_parallel_load_balance, bool):
        raise ValueError(f"context_parallel_load_balance must be a bool, got {config.context_parallel_load_balance!r}")
    one_of("context_parallel_reorder_strategy", config.context_parallel_reorder_strategy, LOAD_BALANCED_LAYOUTS)
    return config.context_parallel_reorder_strategy if config.context_parallel_load_balance else "contiguous"


def _local_window(config: AttentionConfig) -> Window:
    if config.window is not None:
        return _checked_window(config.window)
    size = config.sliding_window_size
    if size is None:
        raise ValueError("sliding_window_size must be set for a LOCAL_SLIDING layer, got None")
    if not _is_int(size):
        raise ValueError(f"sliding_window_size must be an int, got {size!r}")
    if size < 1:
        raise ValueError(f"sliding_window_size must be >= 1, got {size}")
    return int(size) - 1, 0


def _checked_window(window: Window) -> Window:
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(f"window must be a tuple (left, right), got {window!r}")
    left, right = window
    for name, reach in (("left", left), ("right", right)):
        if reach is not None and (not _is_int(reach) or reach < 0):
            raise ValueError(f"window must hold None or ints >= 0, got {name} = {reach!r}")
    return None if left is None else int(left), None if right is None else int(right)


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
