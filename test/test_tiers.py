"""The tiers of sessions in memory, without threads; and that what threads share is not touched without the lock."""

import random
import threading

import pytest
import torch

from rwkv_batch.model.state import Snapshot
from rwkv_batch.sessions.shared import Shared
from rwkv_batch.sessions.tiers import Level, ResidentSession, Tiers
from rwkv_batch.sessions.transfer import Copies

STATE = Snapshot(torch.zeros(1, 2, 8, dtype=torch.float16), torch.zeros(1, 1, 8, 8), 3)
MANY = 10**9


def session(name: str, *, due: float | None = None, updated: float = 0.0) -> ResidentSession:
    return ResidentSession(("", name), 1, STATE, 0, updated, due=due)


def names(sessions) -> list[str]:
    return [resident.key[1] for resident in sessions]


def make_tiers(l1: int = 2, l2: int = 2, *, num_bytes: int = MANY, expired: float = -1.0) -> Tiers:
    return Tiers(Level(l1, num_bytes), Level(l2, num_bytes), lambda resident: resident.updated <= expired)


def test_the_oldest_go_down_one_tier_at_a_time_and_what_is_on_disk_is_dropped():
    tiers = make_tiers()
    for name in "abcd":
        assert tiers.put(session(name))[1] == []
    assert (names(tiers.l1.sessions.values()), names(tiers.l2.sessions.values())) == (["c", "d"], ["a", "b"])
    demoted, unwritten = tiers.put(session("e"))
    assert (names(demoted), names(unwritten), names(tiers)) == (["c"], [], ["d", "e", "b", "c"])
    tiers.put(tiers.find(("", "b")))
    assert [tiers.tier_of(("", name)) for name in "bedca"] == ["l1", "l1", "l2", "l2", "db"]


def test_what_is_not_on_disk_leaves_memory_only_when_it_is():
    tiers = make_tiers(1, 1)
    first = session("a", due=5.0)
    tiers.put(first)
    tiers.put(session("b"))
    assert names(tiers.put(session("c", due=5.0))[1]) == ["a"]
    assert tiers.find(first.key) is first
    assert names(tiers.unwritten()) == ["c", "a"]
    tiers.written(first)
    assert (tiers.find(first.key), first.due) == (None, None)
    kept = tiers.find(("", "c"))
    tiers.written(kept)
    assert tiers.find(kept.key) is kept


def test_bytes_count_too():
    tiers = make_tiers(99, 99, num_bytes=2 * STATE.num_bytes)
    for name in "abcdef":
        tiers.put(session(name))
    assert names(tiers) == ["e", "f", "c", "d"]


def test_a_session_put_aside_pushes_no_other_out():
    tiers = make_tiers(1, 0)
    tiers.put(session("a"))
    assert not tiers.put_aside(session("b"))
    assert tiers.put_aside(session("c", due=1.0))
    assert names(tiers) == ["a", "c"]


def test_an_expired_session_is_not_found_and_gone():
    tiers = make_tiers(expired=10.0)
    tiers.put(session("old", updated=9.0))
    tiers.put(session("new", updated=11.0))
    assert (tiers.find(("", "old")), names(tiers)) == (None, ["new"])


@pytest.mark.parametrize("seed", range(5))
def test_each_session_is_in_one_place_and_bytes_are_counted_right(seed):
    rng, tiers = random.Random(seed), make_tiers(3, 2)
    for _ in range(300):
        key = ("", rng.choice("abcdefghi"))
        match rng.randrange(5):
            case 0:
                tiers.drop(key)
                assert tiers.find(key) is None
            case 1:
                found = tiers.find(key)
                if found is not None:
                    tiers.written(found)
            case 2:
                tiers.put_aside(session(key[1], due=rng.choice([None, 1.0])))
            case _:
                tiers.put(session(key[1], due=rng.choice([None, 1.0])))
                assert tiers.tier_of(key) == "l1"
        assert len({resident.key for resident in tiers}) == len(list(tiers))
        for level, limit in ((tiers.l1, 3), (tiers.l2, 2)):
            assert level.num_bytes == sum(resident.snapshot.num_bytes for resident in level.sessions.values())
            assert len(level.sessions) <= limit
        assert all(resident.due is not None for resident in tiers.leaving.values())


def test_what_threads_share_is_not_touched_without_the_lock():
    shared = Shared(make_tiers(), Copies(torch.device("cpu")), "turn")
    with pytest.raises(RuntimeError, match="tiers is used without"):
        _ = shared.tiers
    with pytest.raises(RuntimeError, match="closing is used without"):
        shared.closing = True
    refused = []

    def touch() -> None:
        try:
            shared.put(session("a"))
        except RuntimeError as error:
            refused.append(error)

    with shared.lock:
        shared.put(session("b"))
        other = threading.Thread(target=touch)
        other.start()
        other.join()
        assert (names(shared.tiers), len(refused)) == (["b"], 1)
