"""`grpo …`: what the notebooks do, without a notebook.

Every command prints errors on one line and leaves with 2; `--json` puts one JSON object on the last line.
Heavy modules are imported inside the commands, so that `--help` answers at once.

    main.py        the commands put together, and how `grpo` ends
    options.py     what they share
    recipes.py     grpo config, convert            train.py   grpo train
    evaluate.py    grpo evaluate                   runs.py    grpo export, report, compare
    tpu.py         grpo preflight, smoke-test, self-check
    conformance.py grpo conformance
"""

from grpo_train.cli.main import command_line, main

__all__ = ["command_line", "main"]
