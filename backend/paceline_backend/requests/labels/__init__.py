"""Labels that users give to runs: tags, notes and targets. Ended runs accept them, too.

A tag is added and removed on its own, so two users cannot overwrite each other's tags, and no
revision is needed. A note is replaced as a whole, so its writer passes the revision of the run that
the note is meant for.
"""

from paceline_backend.requests.labels.labelling import annotate, tag, untag

__all__ = ["annotate", "tag", "untag"]
