"""python -m grpo_train.cli …: as `grpo …`, for an environment whose programs are not on PATH."""

from grpo_train.cli.main import main

main()
