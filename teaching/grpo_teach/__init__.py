"""Exercises of the course, checked by students and graded by teachers.  Reading order:

  notebooks   an exercise as the notebooks in teaching/exercises/ hold it, in nbgrader's format
  check       the public cases of one exercise, for students: `grpo check 3.2`
  hand_ins    what may be read of what students hand in, and how their text is shown
  likeness    hand-ins that are nearly equal, for the teacher
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

What this isolates.  A student's function runs in a process of its own, behind a boundary of the system
(grpo_lib.common.boundary): bubblewrap, or another user where root grades; where there is neither, nothing is graded but
with --no-isolation.  The process gets code and inputs; expected values, seeds and solutions stay in the grader's
process, and the verdict is made there.  An audit hook in the student's process is a second line, and ends plain
attempts with a reason.  What remains possible is in teaching/README.md.
"""
