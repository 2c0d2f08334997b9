"""Errors that name what was probably meant."""

from __future__ import annotations

import pytest

from repro.names import unknown

KNOWN = ["equal_token", "dual_constraint", "balanced", "wan-uniform"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("balancd", "no policy 'balancd'; nearest: balanced"),
        ("dual-constraint", "no policy 'dual-constraint'; nearest: dual_constraint"),
        ("WAN_UNIFORM", "no policy 'WAN_UNIFORM'; nearest: wan-uniform"),
        ("xyz", "no policy 'xyz'; known: equal_token, dual_constraint, balanced, wan-uniform"),
    ],
)
def test_the_nearest_names_or_all(name: str, told: str) -> None:
    assert unknown("policy", name, KNOWN).startswith(told)


def test_nothing_known() -> None:
    assert unknown("device", "acme", []) == "no device 'acme'; known: none"
