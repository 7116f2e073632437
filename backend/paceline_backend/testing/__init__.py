"""Contract suites for whoever writes a policy, or a backend (`testing.engines`, for pytest).

from paceline_backend.testing import check_policy

def test_contract() -> None:
    check_policy(preset)
"""

from paceline_backend.testing.policies import check_policy

__all__ = ["check_policy"]
