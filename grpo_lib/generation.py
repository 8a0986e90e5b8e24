"""What a sampler gives back for one prompt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One completion as text, without the token that ends the turn.

    `tokens` counts what was sampled, the end token included (None: not known); `truncated` says that the limit came
    first.  `error` says why there is no completion: it is graded as wrong, whatever `text` holds.
    """

    text: str
    tokens: int | None
    truncated: bool
    error: str | None = None
