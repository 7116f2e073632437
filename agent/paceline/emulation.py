"""The old path of `paceline.core.emulation`. Remove this file with the release after 0.2."""

import warnings

from paceline.core.emulation import *  # noqa: F403

warnings.warn(
    "paceline.emulation has moved to paceline.core.emulation; "
    "the old path works until the next release",
    FutureWarning,  # Python hides a DeprecationWarning of an imported module
    stacklevel=2,
)
