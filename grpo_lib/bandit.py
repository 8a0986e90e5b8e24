"""A policy over a few answers: what a step on its logits does to its probabilities; notebooks 02 and 03.

    gradient = policy_gradient(probabilities, rewards)       # of the average reward, for each logit
    probability_changes(probabilities, gradient)             # what that does to each probability, per unit of the step
    after_step(probabilities, gradient, 0.5)                 # the probabilities after a step of that size
    try_or_garbage(right=9.5, wrong=4, garbage=5)            # how a policy of two ways to answer learns, sampled

The first three are exact, and each array has one entry for each answer: [answers]. The two are not the same thing: the
logit of an answer rises if it pays more than the average, and its probability rises if its logit rises more than the
others do.
"""

import numpy as np
from numpy.typing import ArrayLike

TOLERANCE = 1e-6  # of a sum of probabilities


def policy_gradient(probabilities: ArrayLike, rewards: ArrayLike) -> np.ndarray:
    """The derivative of the average reward J with respect to each logit, π_j (r_j − J): [answers].

    It is the mean of r ∇ log π over the policy's own answers (R. J. Williams, 1992), for a softmax.

    Raises:
      ValueError: probabilities that are negative or do not add up to 1, or another number of rewards.
    """
    pi, r = _pair(probabilities, rewards, "rewards")
    return pi * (r - pi @ r)


def probability_changes(probabilities: ArrayLike, logit_changes: ArrayLike) -> np.ndarray:
    """How fast each probability moves when the logits move by g: π_j (g_j − Σ_k π_k g_k).  They add up to 0.

    Raises:
      ValueError: probabilities that are negative or do not add up to 1, or another number of logits.
    """
    pi, g = _pair(probabilities, logit_changes, "logit_changes")
    return pi * (g - pi @ g)


def after_step(probabilities: ArrayLike, logit_changes: ArrayLike, step: float) -> np.ndarray:
    """The probabilities after `step` times the changes was added to the logits: [answers].

    Raises:
      ValueError: probabilities that are negative or do not add up to 1, or another number of logits.
    """
    pi, g = _pair(probabilities, logit_changes, "logit_changes")
    move = step * g
    weights = pi * np.exp(move - move.max())  # the same number off each logit changes no probability
    return weights / weights.sum()


def try_or_garbage(
    right: float,
    wrong: float,
    garbage: float,
    p: float = 0.1,
    divide: bool = True,
    groups: int = 64,
    steps: int = 100,
) -> list[float]:
    """The probability of trying, before each step, of a policy that tries or writes garbage; it begins at 95 %.

    Each step draws groups of eight and follows GRPO's advantages, with or without the division by σ (`divide`).

    Args:
      right, wrong, garbage: what is paid for an attempt that is right, one that is wrong, and garbage.
      p: how often an attempt is right.
    """
    rng, logit, history = np.random.default_rng(0), np.log(0.95 / 0.05), []
    for _ in range(steps):
        trying = 1 / (1 + np.exp(-logit))
        tries, solved = rng.random((groups, 8)) < trying, rng.random((groups, 8)) < p
        paid = np.where(tries, np.where(solved, right, wrong), garbage)
        sigma = paid.std(axis=1, ddof=1, keepdims=True) + 1e-6 if divide else 1.0
        advantage = (paid - paid.mean(axis=1, keepdims=True)) / sigma
        logit += 2.0 * np.mean(advantage * (tries - trying))  # the gradient of log π, times the step
        history.append(float(trying))
    return history


def _pair(probabilities: ArrayLike, values: ArrayLike, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays of floats, checked."""
    pi, others = np.asarray(probabilities, float), np.asarray(values, float)
    if pi.ndim != 1 or (pi < 0).any() or abs(pi.sum() - 1) > TOLERANCE:
        raise ValueError(f"probabilities must be at least 0 and add up to 1; got {pi}")
    if others.shape != pi.shape:
        raise ValueError(f"{name} must have one entry for each of the {len(pi)} answers; got shape {others.shape}")
    return pi, others
