"""Ranks compare notes through the rendezvous store before they communicate, so that a mismatch is an error, not a hang.

A collective cannot do this: a rank that disagrees may never enter it. Every note is numbered by call, every wait is
bounded, and the first member of the group collects the notes and publishes one verdict, so the store sees O(ranks)
keys.
"""

import json
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from usp.errors import AgreementError, InputError

Facts = Mapping[str, Hashable]


@dataclass(frozen=True)
class Options:
    """How the ranks of a topology keep in step.

    Attributes:
        check: when they compare the arguments of a call before communicating: "first" (each new combination of shapes,
            dtypes and arguments), "always", or "off" (no `Agreement` is made).
        timeout: how long they wait for each other there.
    """

    check: str = "first"
    timeout: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        if self.check not in ("first", "always", "off"):
            raise InputError(f"check is {self.check!r}: it must be 'first', 'always' or 'off'")


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
        past, self._kept = self._kept, []
        self._calls += 1
        self._put(self.rank, "+" + note)
        self._store.set(f"{self._name}/{self.rank}/last", f"call {self._calls}")
        leader = self.members[0]
        if self.rank == leader:
            verdict = self._collect()
            self._put("verdict", json.dumps(verdict))
        else:
            grace = timedelta(seconds=10)  # the leader's own verdict on who is missing comes first
            found = self._get(self._key("verdict"), self.options.timeout + grace)
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
            raise AgreementError(
                "the ranks of one sequence group called with different arguments: " + "; ".join(differing)
            )
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
        try:
            self._store.wait([key], timeout)
        except RuntimeError:  # DistStoreError is one: the store has no time-out error of its own before torch 2.6
            return None
        return self._store.get(key).decode()
