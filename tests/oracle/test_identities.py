"""Identities that attention must satisfy whatever the formulas: symmetries, conservation laws, limits.

None of them needs a reference, so they would notice a mistake that the oracle and every reference here shared.
"""

import numpy as np
import pytest

import oracle

ARRAYS = ("query", "key", "value", "dout", "dlse")
VARIANTS = {
    "plain": {},
    "capped": {"attn_logits_soft_cap": 1.5},
    "sunk": {"sinks": np.array([0.3, -1.0, 2.0, 0.7])},
    "documents": {"segment_ids": np.array([[3, 3, 1, 1, 1, 3, 3, 3, 0, 0, 1, 3]]), "padding_segment_id": 0},
}
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(params=VARIANTS)
def case(draw, request):
    return draw(seed=21, seq=12, heads=(4, 2), dims=(5, 3), window=(4, 1), **VARIANTS[request.param])


def forward(case):
    return oracle.attention(**{name: value for name, value in case.items() if name not in ("dout", "dlse")})


def gradients(case):
    return {name: value for name, value in oracle.attention_vjp(**case)._asdict().items() if value is not None}


def test_probabilities_and_the_sinks_share_add_up_to_one(case):
    case = {**case, "value": np.ones_like(case["value"])}
    out, lse = forward(case)
    share = np.exp(case["sinks"] - lse) if "sinks" in case else np.zeros_like(lse)
    is_read = np.isfinite(lse)
    np.testing.assert_allclose((out[..., 0] + share)[is_read], 1.0, **EXACT)


def test_shifting_every_key_shifts_lse_and_nothing_else(case):
    """q.(k + c) = q.k + q.c: a constant on every logit of a row (no cap and no sink, which would notice)."""
    if "attn_logits_soft_cap" in case or "sinks" in case:
        case = {name: value for name, value in case.items() if name not in ("attn_logits_soft_cap", "sinks")}
    shift = np.array([0.5, -1.0, 0.25, 2.0, -0.75])
    before, after = forward(case), forward({**case, "key": case["key"] + shift})
    np.testing.assert_allclose(after.out, before.out, **EXACT)
    np.testing.assert_allclose(after.lse, before.lse + case["query"] @ shift / np.sqrt(5), **EXACT)


def test_shifting_every_key_orthogonally_to_the_query_changes_nothing(case):
    """With a cap and with sinks too: the logits stay as they are."""
    case["query"][..., 0] = 0.0
    shift = np.array([3.0, 0.0, 0.0, 0.0, 0.0])
    for before, after in zip(forward(case), forward({**case, "key": case["key"] + shift}), strict=True):
        np.testing.assert_allclose(after, before, **EXACT)


def test_a_rotation_of_query_and_key_rotates_their_gradients(case):
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0]
    turned = {**case, "query": case["query"] @ rotation, "key": case["key"] @ rotation}
    before, after = gradients(case), gradients(turned)
    for tensor in ("dquery", "dkey"):
        np.testing.assert_allclose(after[tensor], before[tensor] @ rotation, **EXACT)
    np.testing.assert_allclose(after["dvalue"], before["dvalue"], **EXACT)


def test_scale_query_and_key_trade_places(case):
    """Doubling the scale, the query or the key is the same thing; gradients of what was doubled are halved."""
    doubled_scale = gradients({**case, "scale": 2 / np.sqrt(5)})
    doubled_query = gradients({**case, "query": 2 * case["query"]})
    doubled_key = gradients({**case, "key": 2 * case["key"]})
    np.testing.assert_allclose(doubled_query["dquery"], doubled_scale["dquery"] / 2, **EXACT)
    np.testing.assert_allclose(doubled_query["dkey"], doubled_scale["dkey"], **EXACT)
    np.testing.assert_allclose(doubled_key["dkey"], doubled_scale["dkey"] / 2, **EXACT)


def test_out_is_linear_in_the_values(case):
    other = np.random.default_rng(2).normal(size=case["value"].shape)
    mixed = forward({**case, "value": 2 * case["value"] - 3 * other}).out
    np.testing.assert_allclose(mixed, 2 * forward(case).out - 3 * forward({**case, "value": other}).out, **EXACT)


def test_query_and_key_gradients_balance(case):
    """Turning every query by I + eB and every key by I - eB^T moves no logit: sum dq (x) q = (sum dk (x) k)^T."""
    found = gradients(case)
    for kv_head in range(2):
        heads = slice(2 * kv_head, 2 * kv_head + 2)
        by_query = np.einsum("bqhi,bqhj->ij", found["dquery"][:, :, heads], case["query"][:, :, heads])
        by_key = np.einsum("bki,bkj->ij", found["dkey"][:, :, kv_head], case["key"][:, :, kv_head])
        np.testing.assert_allclose(by_query, by_key.T, **EXACT)


def test_value_gradients_and_outputs_balance(case):
    """A linear map of the values' features maps out alike: sum dv (x) v = sum dout (x) out."""
    found, out = gradients(case), forward(case).out
    for kv_head in range(2):
        heads = slice(2 * kv_head, 2 * kv_head + 2)
        by_value = np.einsum("bki,bkj->ij", found["dvalue"][:, :, kv_head], case["value"][:, :, kv_head])
        np.testing.assert_allclose(
            by_value, np.einsum("bqhi,bqhj->ij", case["dout"][:, :, heads], out[:, :, heads]), **EXACT
        )


def test_cotangents_of_logits_add_up_to_the_cotangent_of_lse(draw):
    """Adding a constant to every logit of a row, and to the sink, adds it to lse. With the query constantly 1 the shift
    of all keys is such a constant: sum dkey / scale + dsinks = sum dlse."""
    case = draw(seed=5, seq=9, heads=(2, 2), dims=(1, 3), window=(3, 0), sinks=np.array([0.2, -0.4]))
    case["query"] = np.ones_like(case["query"])
    found = gradients(case)
    np.testing.assert_allclose(
        found["dkey"].sum(axis=(0, 1, 3)) + found["dsinks"], case["dlse"].sum(axis=(0, 1)), **EXACT
    )


def test_heads_keep_to_themselves(case):
    """Reversing the heads reverses every answer."""
    reversed_case = {**case, **{name: case[name][:, :, ::-1] for name in ARRAYS}}
    if "sinks" in case:
        reversed_case["sinks"] = case["sinks"][::-1]
    for before, after in zip(gradients(case).values(), gradients(reversed_case).values(), strict=True):
        np.testing.assert_allclose(after, before[..., ::-1] if before.ndim == 1 else before[:, :, ::-1], **EXACT)


def test_batch_rows_keep_to_themselves(draw):
    case = draw(seed=3, batch=3, seq=7, segment_ids=np.arange(21).reshape(3, 7) // 4)
    swapped = {**case, **{name: case[name][[2, 0, 1]] for name in (*ARRAYS, "segment_ids")}}
    for before, after in zip(oracle.attention_vjp(**case)[:3], oracle.attention_vjp(**swapped)[:3], strict=True):
        np.testing.assert_array_equal(after, before[[2, 0, 1]])


def test_a_document_is_a_sequence_of_its_own(draw):
    """And so documents may change places."""
    case = draw(seed=9, seq=11, heads=(4, 2), window=(3, 2), segment_ids=np.array([[0] * 4 + [1] * 7]))
    whole = gradients(case)
    for part in (slice(0, 4), slice(4, 11)):
        alone = {**case, **{name: case[name][:, part] for name in ARRAYS}, "segment_ids": None}
        for tensor, expected in gradients(alone).items():
            np.testing.assert_allclose(whole[tensor][:, part], expected, err_msg=tensor, **EXACT)


def test_renaming_segments_changes_nothing(case):
    if "segment_ids" not in case:
        case = {**case, "segment_ids": np.repeat([[4, 9]], 6, axis=1)}
    renamed = np.vectorize({0: 0, 1: -7, 3: 100, 4: 2**31 - 1, 9: -1}.get)(case["segment_ids"])
    for before, after in zip(
        gradients(case).values(), gradients({**case, "segment_ids": renamed}).values(), strict=True
    ):
        np.testing.assert_array_equal(after, before)


def test_padding_in_front_translates_positions(draw):
    """Windows count distances: five padding tokens before the sequence move every answer by five positions."""
    case = draw(seed=13, seq=10, heads=(2, 1), window=(3, 1), sinks=np.array([0.0, 1.0]))
    padded = {name: np.concatenate([np.full_like(case[name][:, :5], 7.0), case[name]], axis=1) for name in ARRAYS[:4]}
    padded["dlse"] = np.concatenate([np.zeros((1, 5, 2)), case["dlse"]], axis=1)
    ids = np.array([[9] * 5 + [0] * 10])
    moved = gradients({**case, **padded, "segment_ids": ids, "padding_segment_id": 9})
    for tensor, expected in gradients(case).items():
        np.testing.assert_allclose(moved[tensor] if tensor == "dsinks" else moved[tensor][:, 5:], expected, **EXACT)


def test_reversing_positions_swaps_left_and_right(case):
    mirrored = {**case, **{name: case[name][:, ::-1] for name in ARRAYS}, "window": case["window"][::-1]}
    if "segment_ids" in case:
        mirrored["segment_ids"] = case["segment_ids"][:, ::-1]
    before, after = gradients(case), gradients(mirrored)
    for tensor, expected in before.items():
        np.testing.assert_allclose(after[tensor] if tensor == "dsinks" else after[tensor][:, ::-1], expected, **EXACT)


def test_a_wider_window_sees_more_and_lse_grows(case):
    windows = [(0, 0), (1, 0), (1, 1), (4, 1), (4, 6), (11, 11)]
    masks = [oracle.mask.visible(12, window=window)[0] for window in windows]
    answers = [forward({**case, "window": window}).lse for window in windows]
    for index in range(1, len(windows)):
        assert (masks[index] >= masks[index - 1]).all(), f"{windows[index]} shows what {windows[index - 1]} shows"
        assert (answers[index] >= answers[index - 1]).all(), f"lse under {windows[index]}"


@pytest.mark.parametrize("window", [(11, 11), (99, 11), (10**9, 10**9)])
def test_a_window_longer_than_the_sequence_is_no_window(case, window):
    unbounded = gradients({**case, "window": (None, None)})
    for tensor, found in gradients({**case, "window": window}).items():
        np.testing.assert_array_equal(found, unbounded[tensor], tensor)


def test_a_huge_cap_is_no_cap_and_a_tiny_one_makes_every_logit_equal(draw):
    case = draw(seed=6, seq=8)
    plain = forward(case)
    np.testing.assert_allclose(forward({**case, "attn_logits_soft_cap": 1e6}).out, plain.out, rtol=1e-9, atol=1e-9)
    uniform = forward({**case, "query": 0 * case["query"]})
    np.testing.assert_allclose(forward({**case, "attn_logits_soft_cap": 1e-9}).out, uniform.out, rtol=1e-8, atol=1e-8)


def test_grouped_heads_are_repeated_kv_heads(case):
    repeated = {**case, **{name: np.repeat(case[name], 2, axis=2) for name in ("key", "value")}}
    grouped, apart = gradients(case), gradients(repeated)
    np.testing.assert_allclose(grouped["dquery"], apart["dquery"], **EXACT)
    for tensor in ("dkey", "dvalue"):
        summed = apart[tensor].reshape(1, 12, 2, 2, -1).sum(axis=3)
        np.testing.assert_allclose(grouped[tensor], summed, err_msg=tensor, **EXACT)


def test_a_sink_is_a_key_of_value_zero_that_everybody_sees(draw):
    """Put it at position 0 with a feature of its own, which every query has as 1: its logit is scale * sink / scale."""
    sink, case = 0.8, draw(seed=11, seq=7, heads=(1, 1), window=(None, 0), scale=0.5)
    with_sink = oracle.attention_vjp(**case, sinks=np.array([sink]))
    extended = {name: np.concatenate([np.zeros_like(case[name][:, :1]), case[name]], axis=1) for name in ARRAYS}
    extra = np.zeros((1, 8, 1, 1))
    extra[0, 0] = sink / 0.5
    extended["key"] = np.concatenate([extended["key"], extra], axis=3)
    extended["query"] = np.concatenate([extended["query"], np.ones((1, 8, 1, 1))], axis=3)
    as_key = oracle.attention_vjp(**{**case, **extended})
    np.testing.assert_allclose(as_key.dquery[:, 1:, :, :2], with_sink.dquery, **EXACT)
    np.testing.assert_allclose(as_key.dkey[:, 1:, :, :2], with_sink.dkey, **EXACT)
    np.testing.assert_allclose(as_key.dvalue[:, 1:], with_sink.dvalue, **EXACT)
    np.testing.assert_allclose(as_key.dkey[0, 0, 0, 2] / 0.5, with_sink.dsinks[0], **EXACT)


def test_a_very_negative_sink_is_no_sink(draw):
    case = draw(seed=2, seq=8)
    for left, right in zip(
        oracle.attention_vjp(**case)[:3], oracle.attention_vjp(**case, sinks=np.full(2, -1e4))[:3], strict=True
    ):
        np.testing.assert_array_equal(left, right)
