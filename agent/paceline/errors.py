"""One base for all that Paceline raises on purpose."""


class PacelineError(Exception):
    """Something the user or operator can mend; the message names what and how."""
