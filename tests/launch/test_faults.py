"""A few of the faults of tests/faults, the same each time. ``scripts/faults`` runs many."""

from __future__ import annotations

import pytest

from tests.faults.harness import Fault, choose, run
from tests.faults.kinds import KINDS
from tests.support.hosts import why_not

SEED = 12
_QUICK = [kind.name for kind in KINDS.values() if not kind.needs and not kind.patience]
_HOSTS = [kind.name for kind in KINDS.values() if kind.needs == "hosts" and not kind.patience]


@pytest.mark.costly
@pytest.mark.parametrize("fault", choose(SEED, 13, _QUICK, torch=0.0), ids=lambda fault: fault.kind.name)
def test_a_fault_ends_as_it_should(fault: Fault) -> None:
    outcome = run(fault)
    assert outcome.wrong == [], f"{fault}\n{outcome.last_words}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", choose(SEED, 2, _HOSTS, torch=0.0), ids=lambda fault: fault.kind.name)
def test_a_fault_on_several_hosts(fault: Fault) -> None:
    if reason := why_not():
        pytest.skip(reason)
    outcome = run(fault)
    assert outcome.wrong == [], f"{fault}\n{outcome.last_words}"


def test_the_same_seed_gives_the_same_faults() -> None:
    names = list(KINDS)
    assert choose(3, 100, names, 0.5) == choose(3, 100, names, 0.5) != choose(4, 100, names, 0.5)
    assert {fault.kind.name for fault in choose(3, len(names), names, 0.5)} == set(names)
