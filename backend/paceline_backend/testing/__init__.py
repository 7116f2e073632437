"""Contract suites for authors of policies and of backends (`testing.engines`, for pytest).

from paceline_backend.testing import check_policy

def test_contract() -> None:
    check_policy(preset)
"""

from paceline_backend.testing.policies import check_policy

__all__ = ["check_policy"]
