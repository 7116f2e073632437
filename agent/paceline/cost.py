"""The old path of `paceline.core.cost`. Remove this file with the release after 0.2."""

import warnings

from paceline.core.cost import *  # noqa: F403

warnings.warn(
    "paceline.cost has moved to paceline.core.cost; the old path works until the next release",
    FutureWarning,  # Python hides a DeprecationWarning of an imported module
    stacklevel=2,
)
