"""Draft budgets, and the counts of what became of drafts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neffbuild.grid.acceptance import Acceptance, adaptive_budget, fixed_budget

ROWS = st.lists(st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_fixed_budget_stays(drafts, accepted):
    assert fixed_budget(drafts)(accepted, accepted) == drafts


@given(st.integers(1, 8), st.data())
def test_an_adaptive_budget_is_what_held_and_one_more_where_all_did(spec_tokens, data):
    verified = data.draw(st.integers(0, spec_tokens))
    accepted = data.draw(st.integers(0, verified))
    budget = adaptive_budget(spec_tokens)(verified, accepted)
    assert budget == (accepted if accepted < verified else min(verified + 1, spec_tokens))


def test_an_adaptive_budget_recovers():
    rule, budget, seen = adaptive_budget(3), 3, []
    for right in (0, 0, 9, 9, 9, 9, 1):
        budget = rule(budget, min(right, budget))
        seen.append(budget)
    assert seen == [0, 1, 2, 3, 3, 3, 1]


@given(ROWS)
def test_acceptance_counts_every_position(rows):
    acceptance = Acceptance(5)
    for verified, accepted in rows:
        acceptance.add(verified, accepted)
    for position in acceptance.document():
        at = position["position"]
        assert position["verified"] == sum(verified >= at for verified, _ in rows)
        assert position["accepted"] == sum(accepted >= at for _, accepted in rows)
        if position["verified"]:
            assert position["rate"] == position["accepted"] / position["verified"]
        else:
            assert position["rate"] is None
    assert [position["position"] for position in acceptance.document()] == [1, 2, 3, 4, 5]
