from grpo_train.maxtext_rl import main

main()
