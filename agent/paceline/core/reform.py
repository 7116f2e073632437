"""Protocol between launcher and ranks for a change of a run's nodes that loses no step.

The launcher of rank 0 creates the file that `VARIABLE` names. The leader checks for the file before
each segment. If the file exists, the leader plans no further segment, and all ranks leave the loop
after the same step, save a checkpoint, create the file on their own nodes, and exit with
`EXIT_CODE`. A rank that exits with `EXIT_CODE` on a node without the file has failed.
"""

VARIABLE = "PACELINE_REFORM"
EXIT_CODE = 213
