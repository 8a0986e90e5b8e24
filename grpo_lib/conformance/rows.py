"""The rows of the table: what is asked for, on which cases, and which equation says what is right."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_lib.conformance import equations
from grpo_lib.conformance.equations import Variant

BOTH = ("mixed", "other")
NO_TOKEN = ("completions of no token",)

# What a paper leaves open, by the words of the table: whichever an implementation does, it agrees.
ROWS_WITH_TOKENS = {"rows without tokens do not count": {"rows": "with tokens"}}
EPSILONS = {
    "ε 1e-4": {"std_epsilon": 1e-4},
    "ε 1e-5": {"std_epsilon": 1e-5},
    "ε of at most 1e-8": {"std_epsilon": 1e-8},  # and 0, which only groups without variance tell apart
    "ε 1e-6 under the root": {"inside": True},
}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    variant: Variant
    equation: Callable[..., Any]  # its docstring has the equation and the paper
    cases: tuple[str, ...] = BOTH
    compares: str = "loss"  # loss and its gradient; "advantages"; "weights": of the model after one step
    conventions: dict[str, dict[str, Any]] | None = None

    @property
    def source(self) -> str:
        """The equation and its paper, in one line."""
        return " ".join((inspect.getdoc(self.equation) or "").split())


def _advantage(name: str, equation: Callable[..., Any], cases: tuple[str, ...] = BOTH, **asked: Any) -> Row:
    variant = Variant(**asked)
    divides = variant.advantage not in ("mean", "leave-one-out")
    return Row(name, variant, equation, cases, "advantages", EPSILONS if divides else None)


def _loss(name: str, equation: Callable[..., Any], cases: tuple[str, ...] = BOTH, **asked: Any) -> Row:
    return Row(name, Variant(**asked), equation, cases)


_of = equations
ROWS: tuple[Row, ...] = (
    # From rewards to advantages.
    _advantage("advantage: std", _of.std, advantage="std"),
    _advantage("advantage: std-n", _of.std_n, advantage="std-n"),
    _advantage("advantage: std-batch", _of.std_of_batch, advantage="std-batch"),
    _advantage("advantage: mean", _of.mean, advantage="mean"),
    _advantage("advantage: leave-one-out", _of.leave_one_out, advantage="leave-one-out"),
    _advantage("advantage: maxrl", _of.maxrl, advantage="maxrl"),
    _advantage("rewards: each", _of.reward_each, advantage="std", rewards="each"),
    _advantage("rewards: each-batch", _of.reward_each_then_batch, advantage="std", rewards="each-batch"),
    _advantage("kl: reward", _of.kl_in_reward, advantage="leave-one-out", kl="reward"),
    _advantage("groups without variance", _of.std, ("groups without variance",), advantage="std"),
    # From log-probabilities and advantages to the loss and its gradient.
    _loss("plain GRPO", _of.completion_mean, (*BOTH, "on policy")),
    _loss("aggregation: tokens", _of.token_mean, aggregation="tokens"),
    _loss("aggregation: group-tokens", _of.group_token_mean, aggregation="group-tokens"),
    _loss("aggregation: constant", _of.constant, aggregation="constant"),
    _loss("aggregation: completion-sum", _of.completion_sum, aggregation="completion-sum"),
    _loss("ratio: sequence", _of.sequence_ratio, ratio="sequence"),
    _loss("clip: higher", _of.clipped, epsilon_high=0.28),
    _loss("clip: dual", _of.dual_clipped, clip="dual"),
    _loss("clip: cispo", _of.cispo, clip="cispo", aggregation="tokens"),
    _loss("clip: cispo-both", _of.cispo_both, clip="cispo-both", aggregation="tokens"),
    _loss("kl: k1", _of.k1, kl="k1"),
    _loss("kl: k2", _of.k2, kl="k2"),
    _loss("kl: k3", _of.k3, kl="k3"),
    _loss("kl: k3-ratio", _of.k3_times_ratio, kl="k3-ratio"),
    _loss("correction: tis", _of.tis, correction="tis"),
    _loss("correction: mask", _of.masked_correction, correction="mask"),
    Row("truncated: out", Variant(truncated="out"), _of.completion_mean, conventions=ROWS_WITH_TOKENS),
    _loss("truncated: out, tokens", _of.token_mean, truncated="out", aggregation="tokens"),
    _loss("micro-batches", _of.completion_mean, micro_batches="several"),
    _loss("micro-batches: tokens", _of.token_mean, micro_batches="several", aggregation="tokens"),
    # Cases that break code.
    _loss("ratios of 10⁶", _of.clipped, ("ratios of 10⁶",)),
    _loss("ratios of 10⁶: sequence", _of.sequence_ratio, ("ratios of 10⁶",), ratio="sequence"),
    _loss("a far reference", _of.k3, ("a far reference",), kl="k3"),
    _loss("completions of one token", _of.completion_mean, ("completions of one token",)),
    Row("completions of no token", Variant(), _of.completion_mean, NO_TOKEN, conventions=ROWS_WITH_TOKENS),
    _loss("padding on the left", _of.completion_mean, ("padding on the left",)),
    _loss("padding on the right", _of.completion_mean, ("padding on the right",)),
    _loss("padding: sequence", _of.sequence_ratio, ("padding on the left", "padding on the right"), ratio="sequence"),
    # All of it.
    Row("one step", Variant(advantage="std"), _of.step, compares="weights", conventions=EPSILONS),
)  # fmt: skip
