"""Does an implementation of GRPO compute what its name says?  Cases with exact answers, and a table.

    grpo conformance my_loss.py:adapter

An adapter is a function of a case and a variant that returns what the implementation computes, or None where it does
not offer the variant; docs/conformance.md has one, and the tables of several libraries.

    def adapter(case, variant):                   # case: cases.Case, variant: equations.Variant
        if variant.asks:                          # what differs from plain GRPO, such as {"aggregation": "tokens"}
            return None
        loss, gradient = my_loss(case.logps, case.old_logps, case.advantages, case.mask)
        return {"loss": loss, "gradient": gradient}

Read it in this order:

cases        the cases as data: tokens, masks, groups, log-probabilities, rewards
equations    what is right: one NumPy function per variant, in float64, with its equation and paper
rows         the rows of the table: a variant and the cases that it is tried on
slips        what a wrong answer may equal: other variants, known slips, spoiled batches, factors
naming       which of them it equals
suite        an adapter against the rows
report       the table: for a terminal, Markdown, JSON
loading      an adapter from FILE.py:NAME
planted      bugs that were public once, and slips of a first loss, planted again
"""
