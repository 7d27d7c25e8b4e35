"""Ranks compare notes through a store: threads stand for ranks, and a store in memory for the rendezvous."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from usp.agreement import Agreement, Options, first_silent
from usp.errors import AgreementError, InputError
from usp.topology import assemble

SOON = timedelta(seconds=1)


class Hasty(HashStore):
    """Waits at most 1 s, however long it is asked to."""

    def wait(self, keys: list[str], timeout: timedelta = SOON) -> None:
        super().wait(keys, min(timeout, SOON))


def agreement(store: HashStore, rank: int, members=(0, 1, 2), name="attention", **options) -> Agreement:
    return Agreement(store, name, members, rank, Options(**{"timeout": timedelta(seconds=10)} | options))


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """Runs one function a rank at the same time; results, or the AgreementErrors they raised."""
    results: list[Any] = [None] * len(ranks)

    def body(index: int) -> None:
        try:
            results[index] = ranks[index]()
        except AgreementError as error:
            results[index] = error

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def group(store: HashStore, members=(0, 1, 2), **how) -> list[Agreement]:
    return [agreement(store, rank, members, **how) for rank in members]


def confirm_all(ranks: list[Agreement], *facts: dict) -> list[Any]:
    """Every rank confirms its own facts, or all the same."""
    each = facts if len(facts) == len(ranks) else facts * len(ranks)
    return together(*(lambda a=a, f=f: a.confirm(f) for a, f in zip(ranks, each, strict=True)))


# ---- agreeing --------------------------------------------------------------------------------------------------------


def test_equal_facts_are_confirmed():
    assert confirm_all(group(HashStore()), {"heads": 8, "dtype": "float32"}) == [None] * 3


def test_gather_gives_everyones_note_in_the_order_of_the_members():
    members = (5, 2, 9)
    ranks = group(HashStore(), members)
    assert (
        together(*(lambda a=a: a.gather(f"note of {a.rank}") for a in ranks))
        == [["note of 5", "note of 2", "note of 9"]] * 3
    )


def test_many_calls_in_a_row_do_not_mix():
    ranks = group(HashStore())
    for call in range(20):
        notes = [f"{call}.{rank}" for rank in range(3)]
        assert together(*(lambda a=a, n=n: a.gather(n) for a, n in zip(ranks, notes, strict=True))) == [notes] * 3


def test_a_rank_may_run_ahead_of_the_others():
    """A note of the next call is not taken for one of this call."""
    ranks = group(HashStore(), (0, 1))

    def several(a: Agreement) -> list[list[str]]:
        return [a.gather(f"{call}.{a.rank}") for call in range(50)]

    assert together(*(lambda a=a: several(a) for a in ranks)) == [[[f"{c}.0", f"{c}.1"] for c in range(50)]] * 2


# ---- disagreeing -----------------------------------------------------------------------------------------------------


def test_a_mismatch_names_the_rank_and_each_fact():
    same = {"heads": 8, "seq_len": 4096, "mask": ":0"}
    errors = confirm_all(group(HashStore()), same, same | {"seq_len": 4095, "mask": ":"}, same)
    assert {str(error) for error in errors} == {
        "the ranks of one group called with different arguments: "
        "rank 1 has seq_len 4095 where rank 0 has 4096; rank 1 has mask : where rank 0 has :0"
    }


def test_all_ranks_that_differ_are_named():
    errors = confirm_all(group(HashStore(), (3, 4, 7)), {"heads": 8}, {"heads": 6}, {"heads": 4})
    for error in errors:
        assert isinstance(error, AgreementError)
        assert "rank 4 has heads 6 where rank 3 has 8" in str(error)
        assert "rank 7 has heads 4 where rank 3 has 8" in str(error)


def test_a_fact_that_one_rank_alone_has_is_a_mismatch():
    for facts in (({"heads": 8}, {"heads": 8, "scale": 2.0}), ({"heads": 8, "scale": 2.0}, {"heads": 8})):
        errors = confirm_all(group(HashStore(), (0, 1)), *facts)
        assert all(isinstance(error, AgreementError) and "scale" in str(error) for error in errors)


def test_after_a_mismatch_the_ranks_can_agree_again():
    ranks = group(HashStore(), (0, 1))
    assert all(isinstance(error, AgreementError) for error in confirm_all(ranks, {"heads": 8}, {"heads": 6}))
    assert confirm_all(ranks, {"heads": 8}) == [None, None]


def test_a_mismatch_is_not_remembered_as_agreed():
    ranks = group(HashStore(), (0, 1))
    for _ in range(2):
        errors = confirm_all(ranks, {"heads": 8}, {"heads": 6})
        assert all(isinstance(error, AgreementError) for error in errors)


# ---- a rank that does not come ---------------------------------------------------------------------------------------


def test_a_missing_rank_is_named_with_what_it_did_last():
    ranks = group(HashStore(), timeout=SOON)
    together(*(lambda a=a: a.gather("here") for a in ranks))
    together(*(lambda a=a: a.gather("here again") for a in ranks))
    start = time.monotonic()
    errors = together(*(lambda a=a: a.gather("and again") for a in ranks if a.rank != 1))
    assert time.monotonic() - start < 5
    assert {str(error) for error in errors} == {"rank 1: did not arrive at call 3 within 1 s (its last was call 2)"}


def test_a_rank_that_never_called_is_named():
    store = HashStore()
    ranks = [agreement(store, rank, timeout=SOON) for rank in (0, 1)]
    errors = together(*(lambda a=a: a.gather("here") for a in ranks))
    assert {str(error) for error in errors} == {"rank 2: did not arrive at call 1 within 1 s (it has made no call yet)"}


def test_all_missing_ranks_are_named_within_one_time_out():
    store, start = HashStore(), time.monotonic()
    with pytest.raises(AgreementError, match=r"^rank 1: did not arrive .*; rank 2: did not .*; rank 3: did not arrive"):
        agreement(store, 0, (0, 1, 2, 3), timeout=SOON).gather("here")
    assert 0.9 < time.monotonic() - start < 2.7


def test_the_first_member_may_be_the_one_that_is_missing():
    with pytest.raises(AgreementError, match=r"^rank 0: did not arrive at call 1 within 1 s \(it has made no call"):
        agreement(Hasty(), 1, timeout=SOON).gather("here")


def test_a_late_rank_learns_that_it_was_given_up():
    ranks = group(HashStore(), (0, 1), timeout=SOON)
    with pytest.raises(AgreementError, match="rank 1: did not arrive"):
        ranks[0].gather("here")
    with pytest.raises(AgreementError, match="rank 1: did not arrive at call 1"):
        ranks[1].gather("late")


# ---- a rank that objects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objector", [0, 1, 2])
def test_an_objection_is_quoted_to_the_others(objector):
    """At once: nobody waits for the time-out."""
    ranks, start = group(HashStore(), timeout=timedelta(minutes=5)), time.monotonic()
    results = together(
        *(lambda a=a: a.object("query has 7 heads") if a.rank == objector else a.confirm({"heads": 8}) for a in ranks)
    )
    assert time.monotonic() - start < 5
    for rank, result in enumerate(results):
        if rank == objector:
            assert result is None
        else:
            assert str(result) == f"rank {objector}: query has 7 heads"


def test_several_objections_do_not_hang_the_rest():
    ranks = group(HashStore(), timeout=timedelta(minutes=5))
    results = together(
        lambda: ranks[0].confirm({"heads": 8}), lambda: ranks[1].object("no"), lambda: ranks[2].object("nor I")
    )
    assert str(results[0]) == "rank 1: no; rank 2: nor I"


def test_after_an_objection_the_ranks_can_agree_again():
    ranks = group(HashStore(), (0, 1))
    together(lambda: ranks[0].object("one head too many"), lambda: ranks[1].confirm({"heads": 8}))
    assert confirm_all(ranks, {"heads": 8}) == [None, None]


# ---- when to compare -------------------------------------------------------------------------------------------------


def test_first_compares_what_is_new_and_nothing_else():
    ranks = group(Hasty(), (0, 1), check="first", timeout=SOON)
    assert confirm_all(ranks, {"heads": 8, "seq_len": 16}) == [None, None]
    ranks[0].confirm({"heads": 8, "seq_len": 16})  # alone, and it does not wait
    for other in ({"heads": 8, "seq_len": 17}, {"heads": 8}, {"heads": "8", "seq_len": 16}):
        with pytest.raises(AgreementError, match="rank 1: did not arrive"):
            ranks[0].confirm(other)


def test_always_compares_every_time():
    ranks = group(Hasty(), (0, 1), check="always", timeout=SOON)
    assert confirm_all(ranks, {"heads": 8}) == [None, None]
    assert confirm_all(ranks, {"heads": 8}) == [None, None]
    with pytest.raises(AgreementError, match="rank 1: did not arrive at call 3"):
        ranks[0].confirm({"heads": 8})


def test_off_makes_no_agreement_at_all():
    """`assemble` is where the topology of a rank is put together."""
    store, grids = HashStore(), (((0, 1),),)
    made = {
        check: assemble(0, grids, ("a", "a"), store, lambda *_: None, Options(check)).agreement
        for check in ("off", "first", "always")
    }
    assert made.pop("off") is None
    assert all(isinstance(agreement, Agreement) for agreement in made.values())
    assert [agreement.options.check for agreement in made.values()] == ["first", "always"]


@pytest.mark.parametrize("check", ["once", "", None, True])
def test_an_unknown_check_is_refused(check):
    with pytest.raises(InputError, match=rf"^check .* is {check!r}: it must be one of first, always, debug, off$"):
        Options(check=check)


def test_the_default_is_first_and_minutes(monkeypatch):
    monkeypatch.delenv("USP_CHECK", raising=False)
    assert Options() == Options.of(None) == Options("first", timedelta(minutes=10))


def test_an_environment_variable_is_the_default_only(monkeypatch):
    monkeypatch.setenv("USP_CHECK", "debug")
    assert Options.of(None).check == "debug"
    assert Options.of("off").check == "off"
    monkeypatch.setenv("USP_CHECK", "on")
    with pytest.raises(InputError, match="USP_CHECK"):
        Options()


def test_a_time_out_is_above_zero():
    with pytest.raises(InputError, match="timeout is 0:00:00"):
        Options(timeout=timedelta(0))


# ---- who a failure began with ----------------------------------------------------------------------------------------


def test_a_chain_of_waits_leads_to_the_rank_that_is_silent(monkeypatch):
    """On a ring of 4 rank 2 is dead: 3 waits for 2, 0 for 3 and 1 for 0."""
    monkeypatch.setattr("usp.agreement.HEARD_WITHIN", SOON)
    store = HashStore()
    assert first_silent(store, 3, [2]) == ""  # it is the one that was awaited
    assert first_silent(store, 0, [3]) == "; the first of whom nothing is heard is rank 2"
    assert first_silent(store, 1, [0]) == "; the first of whom nothing is heard is rank 2"


def test_ranks_that_wait_for_each_other_accuse_nobody(monkeypatch):
    monkeypatch.setattr("usp.agreement.HEARD_WITHIN", SOON)
    store = HashStore()
    first_silent(store, 0, [1])
    assert first_silent(store, 1, [0]) == ""


# ---- the store -------------------------------------------------------------------------------------------------------


def test_notes_are_deleted_afterwards():
    """In "always" mode a training run makes millions of calls."""
    store = HashStore()
    ranks = group(store, check="always")
    keys = []
    for _ in range(30):
        confirm_all(ranks, {"heads": 8})
        keys.append(store.num_keys())
    assert keys[2:] == [keys[2]] * 28


def test_failed_calls_leave_no_notes_either():
    store = HashStore()
    ranks = group(store, (0, 1), check="always")
    keys = []
    for call in range(20):
        confirm_all(ranks, {"heads": 8}, {"heads": 8 + call % 2})
        keys.append(store.num_keys())
    assert keys[2:] == [keys[2]] * 18


@pytest.mark.parametrize("objector", [0, 1])
def test_objections_do_not_fill_the_store(objector):
    """A caller that catches the error of every other batch may go on for long."""
    store = HashStore()
    ranks = group(store, (0, 1), check="always")
    keys = []
    for _ in range(20):
        together(*(lambda a=a: a.object("no") if a.rank == objector else a.confirm({"heads": 8}) for a in ranks))
        confirm_all(ranks, {"heads": 8})
        keys.append(store.num_keys())
    assert keys[-1] <= keys[2] + 1


@pytest.mark.parametrize("other", [{}, {"name": "shard"}, {"members": (0, 1, 2)}], ids=["the same", "name", "members"])
def test_two_agreements_on_one_store_do_not_collide(other):
    store = HashStore()
    first = group(store, (0, 1))
    second = [agreement(store, rank, **{"members": (0, 1)} | other) for rank in other.get("members", (0, 1))]
    for call in range(3):
        for ranks, word in ((first, "first"), (second, "second")):
            notes = [f"{word} {call} {a.rank}" for a in ranks]
            assert together(*(lambda a=a, n=n: a.gather(n) for a, n in zip(ranks, notes, strict=True))) == [
                notes for _ in ranks
            ]
