"""Ranks compare notes through the rendezvous store before they communicate, so that a mismatch is an error, not a hang.

A collective cannot do this: a rank that disagrees may never enter it. Every note is numbered by call, every wait is
bounded, and the first member of the group collects the notes and publishes one verdict, so the store sees O(ranks)
keys.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, Store  # pyright: ignore[reportPrivateImportUsage]

from usp.errors import AgreementError, InputError

Facts = Mapping[str, Hashable]
CHECKS = ("first", "always", "debug", "off")
HEARD_WITHIN = timedelta(seconds=2)
"""How long a rank that failed has for saying whom it waited for: ranks that wait in turn fail almost together."""
GRACE = timedelta(seconds=4)
"""How much longer than its time-outs an exchange over the store may take."""

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """How the ranks of a topology keep in step.

    Attributes:
        check: when they compare the arguments of a call before communicating: "first" (each new combination of shapes,
            dtypes and arguments), "always", "debug" (always, and what is computed must be finite), or "off" (no
            `Agreement` is made). By default what the environment variable USP_CHECK says, else "first".
        timeout: how long they wait for each other, there and for messages.
    """

    check: str = field(default_factory=lambda: os.environ.get("USP_CHECK", "first"))
    timeout: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise InputError(
                f"check (by default what the environment variable USP_CHECK says) is {self.check!r}: it must be one of "
                f"{', '.join(CHECKS)}"
            )
        if self.timeout <= timedelta(0):
            raise InputError(f"timeout is {self.timeout}: it must be above 0")

    @classmethod
    def of(cls, check: str | None, timeout: timedelta | None = None) -> "Options":
        """With what was given, and defaults for the rest."""
        given = {"check": check, "timeout": timeout}
        return cls(**{name: value for name, value in given.items() if value is not None})


class Agreement:
    """What the ranks of one group have agreed on.

    Args:
        store: the rendezvous store all members share.
        name: the same on all members; several agreements of one name are told apart by the order of their creation.
        members: global ranks; the first collects.
        rank: this process's global rank.
        options: when to compare, and how long to wait for the slowest member.
    """

    def __init__(self, store: Store, name: str, members: Sequence[int], rank: int, options: Options) -> None:
        self.members, self.rank, self.options = tuple(members), rank, options
        self._store = store
        self._name = f"usp/{name}/{','.join(map(str, members))}"
        self._name += f"/{store.add(f'{self._name}/{rank}', 1)}"
        self._calls = 0
        self._kept: list[str] = []
        self._seen: set[Hashable] = set()

    def gather(self, note: str) -> list[str]:
        """Every member's note, in the order of `members`.

        Raises:
            AgreementError: a member did not come within the time-out, or published an error; it is named.
        """
        self._calls += 1
        bound = self.options.timeout + 2 * GRACE
        try:
            return _within(bound, lambda: self._gather(note))
        except (TimeoutError, DistNetworkError) as error:
            raise AgreementError(
                "the rendezvous store does not answer: the process that keeps it, torchrun's agent or else rank 0, has "
                f"ended, cannot be reached, or has said nothing for {bound.total_seconds():g} s"
            ) from error

    def _gather(self, note: str) -> list[str]:
        past, self._kept = self._kept, []
        self._put(self.rank, "+" + note)
        self._store.set(f"{self._name}/{self.rank}/last", f"call {self._calls}")
        leader = self.members[0]
        if self.rank == leader:
            verdict = self._collect()
            self._put("verdict", json.dumps(verdict))
        else:
            # The leader's own verdict on who is missing comes first.
            found = self._get(self._key("verdict"), self.options.timeout + GRACE)
            verdict = [f"-{self._missing(leader)}"] if found is None else json.loads(found)
        for key in past:  # a verdict on this call means that every rank is done with the calls before it
            self._store.delete_key(key)
        failures = [f"rank {m}: {text[1:]}" for m, text in zip(self.members, verdict, strict=False) if text[0] == "-"]
        if failures:
            raise AgreementError("; ".join(failures))
        return [text[1:] for text in verdict]

    def confirm(self, facts: Facts) -> None:
        """Compares this call's facts with every other member's.

        Raises:
            AgreementError: some differ; the message names the rank and each fact that differs.
        """
        known = tuple(facts.items())
        if self.options.check == "first" and known in self._seen:
            return
        notes = [json.loads(note) for note in self.gather(json.dumps({k: str(v) for k, v in facts.items()}))]
        first = notes[0]
        differing = [
            f"rank {member} has {name} {note.get(name)} where rank {self.members[0]} has {first.get(name)}"
            for member, note in zip(self.members, notes, strict=True)
            for name in dict.fromkeys([*first, *note])
            if note.get(name) != first.get(name)
        ]
        if differing:
            raise AgreementError("the ranks of one group called with different arguments: " + "; ".join(differing))
        self._seen.add(known)

    def object(self, reason: str) -> None:
        """Tells the members that wait for this rank's note that there will be none, and why. Does not wait."""
        self._calls += 1
        self._put(self.rank, "-" + reason)
        if self.rank == self.members[0]:
            self._put("verdict", json.dumps(["-" + reason]))

    def _collect(self) -> list[str]:
        deadline = time.monotonic() + self.options.timeout.total_seconds()
        notes = []
        for member in self.members:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
            note = self._get(self._key(member), left)
            notes.append(f"-{self._missing(member)}" if note is None else note)
        return notes

    def _missing(self, member: int) -> str:
        last = self._get(f"{self._name}/{member}/last", timedelta(milliseconds=10))
        did = "it has made no call yet" if last is None else f"its last was {last}"
        return f"did not arrive at call {self._calls} within {self.options.timeout.total_seconds():g} s ({did})"

    def _key(self, who: int | str) -> str:
        return f"{self._name}/{self._calls}/{who}"

    def _put(self, who: int | str, value: str) -> None:
        self._kept.append(self._key(who))
        self._store.set(self._kept[-1], value)

    def _get(self, key: str, timeout: timedelta) -> str | None:
        return _read(self._store, key, timeout)


def first_silent(store: Store, rank: int, awaited: Sequence[int]) -> str:
    """Who a failure began with, as far as ranks tell: the first rank of a chain, each of which waited for the next.

    Args:
        store: the rendezvous store of all ranks.
        rank: this process's global rank.
        awaited: whom it waited for in vain.

    Returns:
        A clause that names the rank that is waited for and has not itself failed to hear of another; "" if that is one
        of `awaited`, or if ranks wait for each other.
    """
    try:
        return _within(HEARD_WITHIN + GRACE, lambda: _first_silent(store, rank, awaited))
    except (TimeoutError, RuntimeError):
        return "; nor does the rendezvous store answer, which torchrun's agent keeps, or else rank 0"


def _first_silent(store: Store, rank: int, awaited: Sequence[int]) -> str:
    store.set(f"usp/waited/{rank}", json.dumps(list(awaited)))
    seen, (found, *_) = {rank}, awaited
    while found not in seen:
        seen.add(found)
        told = _read(store, f"usp/waited/{found}", HEARD_WITHIN)
        if told is None:
            return "" if found in awaited else f"; the first of whom nothing is heard is rank {found}"
        found = json.loads(told)[0]
    return ""


def _read(store: Store, key: str, timeout: timedelta) -> str | None:
    """The value of a key; None if it is not there in time. Raises DistNetworkError if the store is gone."""
    try:
        store.wait([key], timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError is one, and a store without processes raises no other
        return None
    return store.get(key).decode()


def _within(bound: timedelta, work: Callable[[], T]) -> T:
    """The result of `work`; TimeoutError if it takes longer. A store's own time-outs wait for its server to answer."""
    found: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            found.append(work())
        except BaseException as failure:  # re-raised below, in the caller's thread
            failures.append(failure)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(bound.total_seconds())
    if failures:
        raise failures[0]
    if not found:
        raise TimeoutError
    return found[0]
