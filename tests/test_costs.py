"""Learned seconds and learned memory."""

from __future__ import annotations

import random

import pytest

from queueing.costs import CLEAN_CALLS, Costs, MemoryCaps


def learned(count: int, noise: float = 0.0, seed: int = 1) -> Costs:
    """A model of 50 ms + 2 ms a row + 0.1 ms a unit, seen `count` times."""
    rng, costs = random.Random(seed), Costs()
    for _ in range(count):
        rows = rng.randint(1, 8)
        units = rows + rng.randint(0, 200)
        seconds = (0.05 + 0.002 * rows + 0.0001 * units) * rng.uniform(1 - noise, 1 + noise)
        costs.observe("key", 1, rows, units, seconds)
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_parts_of_a_cost_are_found(noise):
    a, c, b, _ = learned(300, noise).coefficients("key")
    assert a == pytest.approx(0.05, rel=0.15 + noise)
    assert c == pytest.approx(0.002, rel=0.25 + 4 * noise)
    assert b == pytest.approx(0.0001, rel=0.25 + 2 * noise)


def test_a_run_of_single_requests_does_not_spoil_the_prediction_of_a_full_call():
    """BentoML's least squares goes rank-deficient here and refuses what could be served."""
    costs = Costs()
    for _ in range(70):
        costs.observe("key", 1, 1, 1, 0.021)
    assert costs.seconds("key", 1, 1, 1) == pytest.approx(0.021, rel=0.01)
    assert costs.seconds("key", 1, 12, 12) < 0.06  # the truth was 0.032; n times one is 0.252


def test_an_unknown_key_has_a_prior_and_the_first_call_scales_it():
    costs = Costs()
    prior = costs.seconds("key", 1, 4, 4)
    costs.observe("key", 1, 4, 4, 10 * prior)
    assert costs.seconds("key", 1, 4, 4) == pytest.approx(10 * prior)


def test_no_coefficient_is_negative_whatever_is_seen():
    rng, costs = random.Random(2), Costs()
    for _ in range(500):
        costs.observe("key", rng.randint(1, 3), rng.randint(1, 8), rng.randint(1, 99), rng.random())
        assert min(costs.coefficients("key")) >= 0


def test_a_change_of_speed_is_learned():
    costs = learned(200)
    for _ in range(200):
        costs.observe("key", 1, 4, 4, 0.5)
    assert costs.seconds("key", 1, 4, 4) == pytest.approx(0.5, rel=0.05)


def test_what_units_look_back_on_is_told_apart_from_the_units():
    costs, behind = Costs(), 0
    while behind < 32_768:  # a prompt in chunks that shrink as it grows, beside two that decode
        units = max(400 - behind // 100, 20)
        depth = units * behind
        costs.observe(
            "key", 1, 3, units + 2, 0.02 + 0.006 + 0.0005 * (units + 2) + 1e-7 * depth, depth
        )
        behind += units
    seconds = costs.seconds("key", 1, 3, 30, 28 * 32_000)
    assert seconds == pytest.approx(0.02 + 0.006 + 0.015 + 0.0896, rel=0.1)


def test_a_cap_is_cut_by_a_fifth_at_least_and_below_what_failed():
    caps = MemoryCaps()
    assert caps.limit("key") == float("inf")
    caps.failed("key", 100)
    assert caps.limit("key") == 80
    caps.failed("key", 2)
    assert caps.limit("key") == 1
    caps.failed("key", 1)
    assert caps.limit("key") == 1


def test_a_cap_regrows_slowly_and_only_by_calls_at_the_cap():
    caps = MemoryCaps()
    caps.failed("key", 6)
    cap = caps.limit("key")
    for _ in range(10 * CLEAN_CALLS):
        caps.passed("key", 2)
    assert caps.limit("key") == cap
    for _ in range(CLEAN_CALLS):
        caps.passed("key", cap)
    assert caps.limit("key") == cap + 1
