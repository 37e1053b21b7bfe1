"""What a store that several pools use must do, whichever it is. `servers.start()` gives a pool, `servers.folder` a place."""

import queue
import time

import pytest
from test_state_pool import ANSWER, Pool, same, snapshot, take

from rwkv_batch.errors import Conflict, PreconditionFailed, RwkvBatchError
from rwkv_batch.model.state import Snapshot
from rwkv_batch.session_messages import Delete, Export, Fork, Import, Rewind, Session, Status


def log_turn(pool: Pool, name: str, ids: list[int], state: Snapshot | None = None):
    """A turn whose state is ids after the one before, as `durability` log keeps it; it is `state` in memory."""
    lease = pool.lease(name)
    answers: queue.SimpleQueue = queue.SimpleQueue()
    since = [*lease.ids, *ids] if state is None else []
    lease.commit(state or lease.initial() or snapshot(0, tokens=0), 0, ANSWER, answers.put, ids=since, turn=ids)
    return take(answers)


def ids_of(pool: Pool, name: str) -> list[int]:
    lease = pool.lease(name, keep=False)
    ids = lease.ids
    lease.release()
    return ids


def test_a_session_goes_on_wherever_it_is_asked_for(servers):
    a, b = servers.start(), servers.start()
    for turn in range(1, 7):
        assert log_turn((a, b)[turn % 2], "s", [turn]).version == turn
    assert ids_of(a, "s") == ids_of(b, "s") == [1, 2, 3, 4, 5, 6]
    state = snapshot(1)
    assert a.turn("s", state).version == 7
    assert same(b.state("s"), state)


def test_a_session_that_another_server_has_is_waited_for(servers):
    a, b = servers.start(), servers.start(wait_seconds=30.0)
    lease = a.lease("s")
    waiting = b.ask(Session(name="s"))
    with pytest.raises(queue.Empty):
        waiting.get(timeout=0.2)
    a.commit(lease, snapshot(1))
    assert take(waiting).version == 1
    with pytest.raises(Conflict) as caught:
        a.lease("s")
    assert caught.value.code == "session_busy"


def test_a_turn_that_waited_may_take_its_time(servers):
    a, b = servers.start(), servers.start(wait_seconds=0.4)
    lease = a.lease("s")
    waiting = b.ask(Session(name="s"))
    time.sleep(0.1)
    a.commit(lease, snapshot(1))
    turn = take(waiting)
    time.sleep(0.5)
    with pytest.raises(queue.Empty):
        waiting.get_nowait()
    assert b.commit(turn, snapshot(2)).version == 2


def test_a_turn_that_wrote_nothing_lets_go_of_its_session(servers):
    a, b = servers.start(), servers.start(wait_seconds=30.0)
    a.lease("new").release()
    assert log_turn(b, "new", [1]).version == 1
    with pytest.raises(PreconditionFailed):
        a.lease("new", expect_version=7)
    cancelled = a.ask(Session(name="new"))
    take(cancelled).release()
    assert log_turn(b, "new", [2]).version == 2
    assert [entry.name for entry in a.order(Status()).sessions] == ["new"]


def test_a_name_whose_first_turn_failed_is_no_session(servers):
    a, b = servers.start(), servers.start()
    lease = a.lease("s")
    assert b.order(Status()).total == 0
    assert not b.order(Delete(name="s")).found
    with pytest.raises(Conflict):
        a.commit(lease, snapshot(1))
    assert log_turn(b, "s", [1]).version == 1


def test_turns_that_end_together_fail_one_by_one(servers):
    """One of them went on elsewhere: the others are kept."""
    a, b = servers.start(), servers.start()
    leases = [a.lease(f"s{number}") for number in range(4)]
    b.order(Delete(name="s2"))
    with a.pool.shared.lock:
        done = [a.commit_later(lease, snapshot(number)) for number, lease in enumerate(leases)]
    results = [answer.get(timeout=60) for answer in done]
    assert [isinstance(result, RwkvBatchError) for result in results] == [False, False, True, False]
    assert {entry.name for entry in b.order(Status()).sessions} == {"s0", "s1", "s3"}


def test_what_others_deleted_forked_and_rewound_is_seen(servers):
    a, b = servers.start(), servers.start()
    states = [snapshot(number) for number in range(3)]
    for state in states:
        a.turn("s", state)
    b.order(Rewind(name="s", version=2))
    assert same(a.state("s"), states[1])
    b.order(Fork(name="s", copies=["copy"]))
    with pytest.raises(Conflict):
        a.order(Fork(name="s", copies=["copy"]))
    assert same(a.state("copy"), states[1])
    assert b.order(Delete(name="s")).found
    assert not a.order(Delete(name="s")).found  # although a copy is in its memory
    assert a.state("s") is None
    assert a.turn("s", states[0]).version == 1
    assert same(b.state("s"), states[0])
    lease = a.lease("s")
    for change in (Rewind(name="s", version=1), Import(name="s", overwrite=True, path=str(servers.folder / "file"))):
        if isinstance(change, Import):
            a.order(Export(name="copy", path=change.path))
        with pytest.raises(Conflict) as caught:
            b.order(change)
        assert caught.value.code == "session_busy"
    lease.release()


def test_nodes_of_a_dialogue_have_numbers_of_their_own(servers):
    a, b = servers.start(), servers.start()
    leases = [pool.lease("tree", node=0) for pool in (a, b, a, b)]
    nodes = {pool.commit(lease, snapshot(1)).node for pool, lease in zip((a, b, a, b), leases, strict=True)}
    assert nodes == {1, 2, 3, 4}


def test_an_idempotency_key_is_known_to_all(servers):
    a, b = servers.start(), servers.start(wait_seconds=30.0)
    lease = a.lease("s", key="k")
    waiting = b.ask(Session(name="s", key="k"))
    a.commit(lease, snapshot(1))
    again = take(waiting)
    assert (again.replay.text, again.replay.kept.version, again.replay.kept.replayed) == ("said", 1, True)
    again.release()
    both = [pool.lease("s", key="branch", save_as=name) for pool, name in ((a, "left"), (b, "right"))]
    a.commit(both[0], snapshot(2))
    with pytest.raises(Conflict) as caught:
        b.commit(both[1], snapshot(2))
    assert caught.value.code == "turn_running"
