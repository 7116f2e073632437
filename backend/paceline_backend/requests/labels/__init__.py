"""What people say of runs: tags, notes, and targets; a run that has ended keeps taking them.

A tag comes and goes by itself, so two people cannot undo each other's, and no revision is needed.
A note is replaced as a whole: who writes it says which revision of the run it is meant for.
"""

from paceline_backend.requests.labels.labelling import annotate, tag, untag

__all__ = ["annotate", "tag", "untag"]
