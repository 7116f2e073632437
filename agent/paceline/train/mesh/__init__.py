"""Data-parallel groups in a larger mesh: the ranks of a group share each batch (TP × DP).

A *group* is one worker of the plan: its ranks get the same samples and split the model, as under
tensor parallelism. A *lane* has one rank of each group, those at the same place in it. Gradients
are reduced within a lane. Within a session, rank and world are a group's number and the number of
groups. Lane 0 reports for the groups, and its first rank is the leader::

    meeting = laned(meet(…), mesh)  # by `Session`; `mesh` is the data-parallel part
    meeting.lanes.members           # of this rank's group, by their numbers in the process group
"""
