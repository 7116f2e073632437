"""What launcher and rank agree on for a change of a run's nodes without a lost step.

The launcher of rank 0 makes the file that `VARIABLE` names. The leader sees it before its next
segment and ends the plan there. All ranks leave the loop after the same step, save, make the file
on their own nodes, and exit with `EXIT_CODE`. A code without the file is a failure like any other.
"""

VARIABLE = "PACELINE_REFORM"
EXIT_CODE = 213
