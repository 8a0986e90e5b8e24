from grpo_lib.maxtext_rl import main

main()
