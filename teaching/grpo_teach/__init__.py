"""Exercises of the course, checked by students and graded by teachers.  Reading order:

  notebooks   an exercise as the notebooks in teaching/exercises/ hold it, in nbgrader's format
  check       the public cases of one exercise, for students: `grpo check 3.2`
  hand_ins    what may be read of what students hand in, and how their text is shown
  parts       what is graded of an answer, and how values are compared
  worker      the process that runs a student's function; it gets inputs and never an expected value
  limited     starts that process, with limits, and reads its results
  grading     one exercise of one student
  submissions a folder of them: `grpo grade FOLDER`, a CSV and Gradescope's results.json
  leaderboard trains what students hand in, a recipe and a reward: `grpo leaderboard FOLDER`
  train_process  `grpo train` with a student's reward, for the leaderboard
  mutants     wrong answers that must not get full marks
  student     cuts what students get, with nbgrader: `make student`
  cli         the three commands

`student.STUDENTS_KEEP` lists the modules that students get.

What this isolates.  A student's function runs in a process of its own, with limits of time, memory and output.  The
process gets code and inputs; expected values, seeds and solutions stay in the grader's process, and the verdict is made
there.  An audit hook refuses files outside of Python and NumPy, other processes, and the network.  So an accident (an
endless loop, 10 GB, `exit`) costs its exercise and nothing else, and the plain ways to points without work end with 0:
patch NumPy, import the grader, read the solution from the disk.

What it does not isolate.  This is no sandbox against malice.  The process runs as the user who grades, and PEP 578 says
that audit hooks are not a sandbox: a few lines of Python get around this one, and can then read the solutions, change
files and start processes that live on.  macOS does not limit the memory.  Grade the work of people you do not trust in
a container without network that holds this repository, the submissions and nothing else.  That protects the machine,
not the marks: the solutions are in the container, too, so read what earned full points.
"""
