"""The cases: batches of completions as data.  They are made from fixed seeds, once, in float64.

Log-probabilities come from a model with two weights: the logit of word v at a place is scores[v] · weights.  Policy,
old policy, reference and sampler are four settings of these weights.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

WORDS = 5  # of the vocabulary; 0 is padding
WEIGHTS = {"logps": (0.9, -0.5), "old_logps": (0.5, -0.1), "ref_logps": (0.6, -0.1), "sampler_logps": (0.8, -0.4)}


@dataclass(frozen=True, eq=False)
class Case:
    """B completions of at most T tokens, padded.  Log-probabilities, in nats, are anything where there is padding."""

    name: str
    tokens: np.ndarray  # int [B, T], ids; 0 where there is padding
    mask: np.ndarray  # bool [B, T], true for tokens of a completion
    groups: np.ndarray  # int [B], which prompt: completions of a prompt are next to each other
    rewards: np.ndarray  # [B, R], of R reward functions; none is negative
    advantages: np.ndarray  # [B], for all variants but those that compute them
    truncated: np.ndarray  # bool [B], cut off at the maximal length
    logps: np.ndarray  # [B, T], log-probabilities of the tokens under the policy
    old_logps: np.ndarray  # [B, T], under the policy before the step
    ref_logps: np.ndarray  # [B, T], under the reference
    sampler_logps: np.ndarray  # [B, T], under the engine that sampled
    scores: np.ndarray  # [B, T, WORDS, 2], of the model with two weights
    max_length: int  # of completions; may be more than T
    micro_batches: tuple[slice, ...]  # rows of each, where the variant asks for several

    @property
    def group_size(self) -> int:
        return int(np.bincount(self.groups)[0])

    def parts(self) -> "list[Case]":
        """A case for each micro-batch, of its rows alone."""
        arrays = [field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), np.ndarray)]
        found = []
        for rows in self.micro_batches:
            changed = {name: getattr(self, name)[rows] for name in arrays}
            found.append(dataclasses.replace(self, **changed, micro_batches=(slice(None),)))
        return found

    def slopes(self) -> np.ndarray:
        """Derivatives of the log-probabilities with respect to the two weights, [B, T, 2]."""
        probabilities = np.exp(_log_softmax(self.scores @ np.array(WEIGHTS["logps"])))  # [B, T, WORDS]
        mean = (probabilities[..., None] * self.scores).sum(2)  # [B, T, 2]
        return _at(self.scores, self.tokens) - mean


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _at(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Values [B, T, WORDS, ...] of the tokens, [B, T, ...]."""
    rows, places = np.indices(tokens.shape)
    return values[rows, places, tokens]


def _make(name: str, seed: int, prompts: int, group_size: int, length: int, parts: int, more: int = 0) -> Case:
    """`parts` micro-batches of equally many rows; `more`: what the maximal length has beyond the arrays."""
    rng = np.random.default_rng(seed)
    rows = prompts * group_size
    lengths = rng.integers(1, length + 1, rows)
    lengths[:3] = 1, length, length  # the shortest, and the longest
    mask = np.arange(length) < lengths[:, None]
    tokens = np.where(mask, rng.integers(1, WORDS, (rows, length)), 0)
    scores = rng.normal(0, 1.2, (rows, length, WORDS, 2))
    logps = {
        policy: _at(_log_softmax(scores @ np.array(weights)), tokens)  # also where there is padding
        for policy, weights in WEIGHTS.items()
    }
    drawn = rng.normal(0, 1, rows)
    logps["old_logps"] = _with_ratios(logps["logps"], logps["old_logps"], drawn)
    right = rng.random(rows) < 0.5
    right[::group_size], right[1::group_size] = True, False  # each group has both
    rewards = np.stack([right.astype(float), rng.random(rows)], 1)
    groups = np.repeat(np.arange(prompts), group_size)
    truncated = lengths == length
    step = rows // parts
    micro_batches = tuple(slice(start, start + step) for start in range(0, rows, step))
    max_length = length + more
    return Case(
        name, tokens, mask, groups, rewards, drawn, truncated, scores=scores, max_length=max_length,
        micro_batches=micro_batches, **logps,
    )  # fmt: skip


def _with_ratios(logps: np.ndarray, old: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """The old log-probabilities, with ratios that tell clips apart: 1.25 for a good token, 4 for a bad one."""
    old = old.copy()
    better, worse = np.flatnonzero(advantages > 0), np.flatnonzero(advantages < 0)
    old[better[0], 0] = logps[better[0], 0] - np.log(1.25)
    old[worse[0], 0] = logps[worse[0], 0] - np.log(4)
    return old


def _padded(case: Case, left: int, right: int) -> Case:
    """The same completions with more padding, whose log-probabilities are anything."""
    rng = np.random.default_rng(left + 10 * right)
    sides = ((0, 0), (left, right))
    mask = np.pad(case.mask, sides)
    changed = {
        "tokens": np.pad(case.tokens, sides),
        "mask": mask,
        "scores": np.pad(case.scores, (*sides, (0, 0), (0, 0))),
    }
    for policy in WEIGHTS:
        padded = np.pad(getattr(case, policy), sides)
        changed[policy] = np.where(mask, padded, rng.uniform(-9, -1, mask.shape))
    return dataclasses.replace(case, **changed, max_length=max(case.max_length, mask.shape[1]))


def _large_ratios(case: Case) -> Case:
    """Single tokens whose ratio is 10⁶ or 10⁻⁶, for both signs of the advantage."""
    old = case.old_logps.copy()
    better, worse = (np.flatnonzero(sign * case.advantages > 0.3)[:2] for sign in (1, -1))
    distance = np.log(1e6)
    for rows in (better, worse):
        old[rows[0], 0] = case.logps[rows[0], 0] - distance
        old[rows[1], 0] = case.logps[rows[1], 0] + distance
    return dataclasses.replace(case, old_logps=old)


def _far_reference(case: Case) -> Case:
    """Single tokens that the reference finds e⁵ times as likely, or as unlikely, as the policy does."""
    ref = case.ref_logps.copy()
    ref[1, 0] = case.logps[1, 0] + 5
    ref[2, 1] = case.logps[2, 1] - 5
    return dataclasses.replace(case, ref_logps=ref)


def _without_tokens(case: Case, rows: list[int]) -> Case:
    mask = case.mask.copy()
    mask[rows] = False
    return dataclasses.replace(case, mask=mask, tokens=np.where(mask, case.tokens, 0))


def _same_rewards(case: Case) -> Case:
    """A group that earned nothing, and one that earned 1.1 each, which has no exact binary form."""
    rewards = case.rewards.copy()
    rewards[case.groups == 0] = 0.0
    rewards[case.groups == 1] = 0.55
    return dataclasses.replace(case, rewards=rewards)


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by name."""
    mixed = _make("mixed", seed=3, prompts=3, group_size=4, length=7, parts=2, more=2)
    other = _make("other", seed=8, prompts=2, group_size=5, length=6, parts=5)
    made = [
        mixed,
        other,
        dataclasses.replace(mixed, name="on policy", old_logps=mixed.logps),
        dataclasses.replace(_same_rewards(mixed), name="groups without variance"),
        dataclasses.replace(_large_ratios(mixed), name="ratios of 10⁶"),
        dataclasses.replace(_far_reference(mixed), name="a far reference"),
        dataclasses.replace(_without_tokens(mixed, [2, 5]), name="completions of no token"),
        dataclasses.replace(_make("", 21, 3, 4, 1, 2), name="completions of one token"),
        dataclasses.replace(_padded(mixed, 3, 0), name="padding on the left"),
        dataclasses.replace(_padded(mixed, 0, 2), name="padding on the right"),
    ]
    return {case.name: case for case in made}
