import sys

from grpo_lib.course.run_notebooks import main

sys.exit(main())
