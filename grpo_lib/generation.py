"""What a sampler gives back for one prompt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One completion as text, without the token that ends the turn.

    `tokens` counts what was sampled, the end token included; `truncated` says that the limit came first.
    """

    text: str
    tokens: int
    truncated: bool
