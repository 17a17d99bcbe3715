"""What would use idle cores is computed for the instance and the model, and says what stands against it."""

from __future__ import annotations

import pytest

from gemma_neuron.instances import instances
from tests.sharding.test_published_sizes import planned


def test_31b_at_tp_8_leaves_4_of_12() -> None:
    found = planned("31B", 8, context=4096)
    uses = {(use.model, use.tp): use for use in found.idle_uses}
    assert found.idle_cores == 4
    assert "32 query heads" in uses["this model", 12].reason
    three = uses["this model", 4]
    assert (three.replicas, three.cores, three.works) == (3, 12, True)
    beside = next(use for use in found.idle_uses if use.model.startswith("gemma-4-"))
    assert (beside.model, beside.tp, beside.works) == ("gemma-4-26B-A4B", 4, True)


def test_three_replicas_at_tp_4_fit_until_the_context_grows() -> None:
    for context, works in ((4096, True), (65536, False)):
        uses = planned("31B", 8, context=context).idle_uses
        three = next(use for use in uses if (use.model, use.tp) == ("this model", 4))
        assert three.works is works
        assert ("does not fit" in three.reason) is not works
        # the plan itself agrees
        if works:
            assert planned("31B", 4, context=context).chosen.fits


def test_replicas_use_a_larger_instance() -> None:
    found = planned("31B", 8, "inf2.48xlarge")
    assert found.idle_cores == 16
    (use,) = found.idle_uses
    assert (use.model, use.replicas, use.cores) == ("this model", 3, 24)


def test_nothing_is_said_when_nothing_is_idle() -> None:
    assert planned("12B", 2, "inf2.8xlarge").idle_uses == ()


def test_what_is_proposed_can_be_planned() -> None:
    for size in ("E2B", "12B", "26B-A4B"):
        for use in planned(size, 8).idle_uses:
            if use.works:
                other = size if use.model == "this model" else use.model.removeprefix("gemma-4-")
                assert planned(other, use.tp).chosen.fits
                assert use.replicas * use.tp <= 12


@pytest.mark.parametrize("name", instances())
def test_the_table_agrees_with_itself(name: str) -> None:
    """Every listed degree is within the cores; memory and rates are the chips'."""
    where = instances()[name]
    assert all(tp <= where.cores for tp in where.tp_possible)
    assert where.neuroncore == ("NeuronCore-v3" if where.chip == "trainium2" else "NeuronCore-v2")
    per_chip = {"inferentia2": (32, 820), "trainium1": (32, 820), "trainium2": (96, 2700.8)}
    memory, rate = per_chip[where.chip]
    assert where.hbm_gib_per_core * where.cores == memory * where.chips
    assert where.hbm_gib_s_per_core * where.cores == pytest.approx(rate * where.chips, rel=1e-3)
