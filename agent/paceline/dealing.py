"""The old path of `paceline.core.dealing`. Remove this file with the release after 0.2."""

import warnings

from paceline.core.dealing import *  # noqa: F403

warnings.warn(
    "paceline.dealing has moved to paceline.core.dealing; "
    "the old path works until the next release",
    FutureWarning,  # Python hides a DeprecationWarning of an imported module
    stacklevel=2,
)
