"""pytest --pyargs grpo_lib.conformance: the suite itself, and with GRPO_CONFORMANCE=FILE.py:NAME a test for each row.

GRPO_CONFORMANCE=my_loss.py:adapter pytest --pyargs grpo_lib.conformance
"""

import dataclasses
import functools
import os

import numpy as np
import pytest

from grpo_lib.common.errors import CourseError
from grpo_lib.conformance import equations, loading, planted, slips, suite
from grpo_lib.conformance.cases import cases
from grpo_lib.conformance.equations import Variant
from grpo_lib.conformance.rows import ROWS

ADAPTER = os.environ.get("GRPO_CONFORMANCE")


def differing(adapter) -> dict[str, str]:
    return {found.row.name: found.detail for found in suite.check(adapter) if found.status == suite.DIFFERS}


if ADAPTER:

    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
    def test_the_adapter_computes_what_the_row_says(row):
        found = suite.check_row(loading.load(ADAPTER), row)
        if found.status == suite.NOT_OFFERED:
            pytest.skip("not offered")
        assert found.status == suite.AGREES, f"{found.detail}; asked: {row.source}"


def test_an_implementation_by_hand_agrees_in_all_that_it_offers():
    found = [finding.status for finding in suite.check(planted.by_hand)]
    assert suite.DIFFERS not in found
    assert found.count(suite.AGREES) == 20


@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_named(bug):
    assert differing(planted.planted(bug.name)).get(bug.row) == bug.words


@pytest.mark.parametrize(("slip", "row", "words"), planted.SLIPS, ids=[slip for slip, _, _ in planted.SLIPS])
def test_a_slip_of_a_first_loss_is_named(slip, row, words):
    assert differing(functools.partial(planted.ten_lines, slip=slip)).get(row) == words


def test_a_first_loss_without_a_slip_agrees():
    found = [finding.status for finding in suite.check(planted.ten_lines)]
    assert suite.DIFFERS not in found
    assert found.count(suite.AGREES) == 9


def test_a_slip_explains_all_rows_that_it_changes():
    """Also those whose few completions cannot tell it from another by themselves, and in single precision."""

    def in_float32(case, variant):
        answer = planted.ten_lines(case, variant, slip="only the lower bound")
        return answer and {name: np.float32(part) for name, part in answer.items()}

    found = differing(in_float32)
    assert len(found) > 5
    assert all(words.endswith("without the upper bound of the clip") for words in found.values())


@pytest.mark.parametrize("name", ["plain GRPO", "clip: dual", "kl: k3-ratio", "correction: tis", "advantage: std"])
def test_no_two_slips_are_the_same_answer(name):
    """What is named is the slip, and not another that comes before it; bounds of e¹⁰ and 10 have cases of their own."""
    row = next(row for row in ROWS if row.name == name)
    answers = {}
    for change in slips.changes(row):
        if "bounded" in change.words or "up to" in change.words:
            continue
        answers.setdefault(_bits(row, change.of(row.variant)), []).append(change.words)
    answers.pop(_bits(row, row.variant), None)  # what changes nothing here, such as micro-batches
    assert [words for words in answers.values() if len(words) > 1] == []
    assert len(answers) > 10


def _bits(row, variant) -> bytes:
    """The answer to a row's two usual cases, rounded."""
    parts = []
    for case in (cases()[name] for name in ("mixed", "other")):
        if row.compares == "advantages":
            parts.append(equations.advantages(case, variant))
        else:
            parts += [equations.gradient(case, variant), equations.loss(case, variant, case.logps)]
    return b"".join((part.round(9) + 0.0).tobytes() for part in parts)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_another_order_of_summation_is_not_accused(dtype):
    """Token by token from the last to the first, each sum rounded: in float32 by up to a millionth."""

    def backwards(case, variant):
        if set(variant.asks) - {"epsilon_high", "kl"} or variant.kl not in ("none", "k2"):
            return None
        total, gradient = dtype(0), np.zeros(case.mask.shape, dtype)
        counts = case.mask.sum(1)
        for row, place in sorted(zip(*np.nonzero(case.mask), strict=True), reverse=True):
            logp, old, ref = (dtype(one[row, place]) for one in (case.logps, case.old_logps, case.ref_logps))
            ratio, A = np.exp(logp - old), dtype(case.advantages[row])
            weight = dtype(1) / dtype(counts[row] * len(counts))
            high, low = dtype(1 + variant.epsilon_high), dtype(0.8)
            stopped = ratio > high if A > 0 else ratio < low
            term = (high if A > 0 else low) if stopped else ratio
            total -= weight * term * A
            gradient[row, place] = 0 if stopped else -weight * ratio * A
            if variant.kl == "k2":
                total += dtype(variant.beta) * weight * (logp - ref) ** 2 / 2
                gradient[row, place] += dtype(variant.beta) * weight * (logp - ref)
        return {"loss": total, "gradient": gradient}

    found = {finding.row.name: finding for finding in suite.check(backwards)}
    assert {one.status for one in found.values()} == {suite.AGREES, suite.NOT_OFFERED}
    assert found["kl: k2"].status == found["clip: higher"].status == suite.AGREES


def test_every_row_tells_its_variant_from_all_others():
    """No two variants of one comparison have the same answer on the same cases."""
    answers = {}
    for row in ROWS:
        if row.cases != ("mixed", "other") or row.variant.micro_batches == "several":
            continue
        key = []
        for name in row.cases:
            case = cases()[name]
            compared = row.compares == "advantages"
            one = equations.advantages(case, row.variant) if compared else equations.gradient(case, row.variant)
            key.append(one.round(7).tobytes())
        assert answers.setdefault((row.compares, *key), row.name) == row.name
    assert len(answers) > 20


@pytest.mark.parametrize(
    "variant",
    [
        Variant(ratio="sequence", kl="k3-ratio"),
        Variant(clip="dual", aggregation="group-tokens", correction="tis"),
        Variant(epsilon_high=0.28, aggregation="constant", truncated="out", kl="k1"),
    ],
)
def test_the_complex_step_is_the_derivative(variant):
    case = cases()["mixed"]
    numerical = suite.numerical_gradient(lambda logps: equations.loss(case, variant, logps), case.logps)
    np.testing.assert_allclose(equations.gradient(case, variant), numerical, atol=1e-9)


def test_log_probabilities_are_those_of_the_model_with_two_weights():
    """Its slopes are their derivatives, so that a step of the weights is right, too."""
    case = cases()["mixed"]
    weights = np.array([0.9, -0.5])
    for place in range(2):
        moved = weights + 1e-6 * np.eye(2)[place]
        logits = case.scores @ moved
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        there = np.take_along_axis(logps, case.tokens[..., None], -1)[..., 0]
        np.testing.assert_allclose((there - case.logps) / 1e-6, case.slopes()[..., place], atol=1e-5)


def test_by_known_numbers():
    """Ratios 1, 1.5 and 0.5 at ε = 0.2, and the advantages of one right answer among four: computed on paper."""
    case = dataclasses.replace(
        cases()["mixed"],
        mask=np.ones((3, 1), bool),
        advantages=np.ones(3),
        truncated=np.zeros(3, bool),
        groups=np.zeros(3, int),
        old_logps=np.zeros((3, 1)),
    )
    logps = np.log([[1.0], [1.5], [0.5]])
    assert equations.loss(case, Variant(), logps) == pytest.approx(-(1 + 1.2 + 0.5) / 3)
    assert equations.std(np.array([0.0, 0, 0, 1]), np.zeros(4, int), Variant()) == pytest.approx(
        [-0.5, -0.5, -0.5, 1.5], abs=1e-5
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": 1.0}, "returned no gradient for `plain GRPO`"),
        ({"loss": 1.0, "gradient": np.zeros(3)}, r"gradient has shape \(3,\)"),
        ({"loss": 1.0, "gradient": np.zeros((12, 7)), "los": 0}, "returned los"),
    ],
)
def test_what_is_no_answer_is_refused_in_one_line(returned, message):
    with pytest.raises(CourseError, match=message):
        suite.check(lambda case, variant: None if variant.asks else returned)


def test_an_adapter_that_fails_is_an_error_with_its_line():
    def fails(case, variant):
        raise ZeroDivisionError("by nothing")

    line = fails.__code__.co_firstlineno + 1
    found = {(finding.status, finding.detail) for finding in suite.check(fails)}
    assert found == {(suite.ERROR, f"ZeroDivisionError: by nothing (test_conformance.py:{line})")}
