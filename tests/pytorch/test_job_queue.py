"""The line of jobs behind a process group: order, nesting, errors, time-outs. Without MPI."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch", "2.12")

from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll.errors import CommunicatorBroken, PeerTimeout
from compcoll.gpu import captures
from compcoll.torch.handles import Lasting
from compcoll.torch.job_queue import JobQueue


@pytest.fixture
def jobs() -> Iterator[JobQueue]:
    jobs = JobQueue("test")
    yield jobs
    jobs.close(5.0)


@examples(50)
@given(st.lists(st.tuples(st.sampled_from(["submit", "run", "wait"]), st.integers(0, 5)), max_size=30))
def test_order_of_submission(calls: list[tuple[str, int]]) -> None:
    jobs, seen, works = JobQueue(), [], []
    for number, (how, which) in enumerate(calls):
        if how == "submit":
            works.append(jobs.submit(lambda number=number: seen.append(number)))
        elif how == "run":
            assert jobs.run(lambda number=number: seen.append(number) or number) == number
            assert seen[-1] == number and all(work.done for work in works)
        elif works:
            assert works[which % len(works)].wait()
    for work in works:
        assert work.wait() and work.is_success() and work.exception() is None
    assert seen == [number for number, (how, _) in enumerate(calls) if how != "wait"]
    jobs.close(5.0)


def test_many_threads_each_in_its_order(jobs: JobQueue) -> None:
    seen: list[tuple[int, int]] = []
    running = [0]

    def job(thread: int, number: int) -> None:
        running[0] += 1
        assert running[0] == 1
        seen.append((thread, number))
        time.sleep(1e-5)
        running[0] -= 1

    def work(thread: int) -> None:
        for number in range(200):
            if number % 3 == 0:
                jobs.run(lambda number=number: job(thread, number))
                continue
            last = jobs.submit(lambda number=number: job(thread, number))
            if number % 7 == 0:
                last.wait()
        last.wait()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(seen) == 800
    for thread in range(4):
        assert [number for t, number in seen if t == thread] == list(range(200))


def test_runs_while_the_caller_does_something_else(jobs: JobQueue) -> None:
    ended = threading.Event()
    jobs.submit(ended.set)
    assert ended.wait(10)


def test_jobs_of_callbacks_go_in_front(jobs: JobQueue) -> None:
    """Depth first, however late the thread that ends a job is."""
    for delay in (0.0, 0.01):
        seen: list[str] = []

        def nested(future: object, name: str, seen: list[str] = seen) -> str:
            assert jobs.submit(lambda: seen.append(name + "'")).get_future().wait() is None
            return name

        def job(name: str, delay: float = delay, seen: list[str] = seen) -> None:
            time.sleep(delay)
            seen.append(name)

        futures = []
        for name in "abc":
            future = jobs.submit(lambda name=name: job(name)).get_future()
            futures.append(future.then(lambda f, name=name: nested(f, name)).then(lambda f: f.value() + "!"))
        assert [future.wait() for future in futures] == ["a!", "b!", "c!"]
        assert seen == ["a", "a'", "b", "b'", "c", "c'"]


def test_job_that_submits_and_waits(jobs: JobQueue) -> None:
    assert jobs.submit(lambda: jobs.run(lambda: jobs.submit(lambda: 7).result() + 1) + 1).result() == 9


def test_errors_reach_wait_and_future(jobs: JobQueue) -> None:
    def fail() -> None:
        raise CommunicatorBroken("because")

    work = jobs.submit(fail)
    future = work.get_future()
    for call in (work.wait, work.result, future.wait, work.get_future().wait):
        with pytest.raises(Exception, match="because"):
            call()
    assert isinstance(work.exception(), CommunicatorBroken) and work.is_completed() and not work.is_success()
    with pytest.raises(CommunicatorBroken):
        jobs.run(fail)
    assert jobs.run(lambda: 3) == 3


def test_wait_gives_up(jobs: JobQueue) -> None:
    go_on = threading.Event()
    work = jobs.submit(lambda: go_on.wait(30))
    started = time.monotonic()
    with pytest.raises(PeerTimeout, match=" Timed out "):
        work.wait(timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - started < 10
    go_on.set()
    assert work.wait() and work.value is True


def test_captures_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch uses a GPU, the queue's thread changes its mode of captures once; whoever waits keeps his."""
    calls: list[tuple[str, int]] = []
    exchange = lambda mode: calls.append((threading.current_thread().name, mode._obj.value)) or 0  # noqa: E731
    monkeypatch.setattr(captures, "_exchange", lambda: exchange)
    jobs = JobQueue()
    for used in (False, True, True):
        monkeypatch.setattr("torch.cuda.is_initialized", lambda used=used: used)
        jobs.submit(lambda: None).get_future().wait()
        jobs.submit(lambda: None).wait()
        assert calls == [("compcoll-jobs", 1)] * used
    jobs.close(5.0)


def test_closed(jobs: JobQueue) -> None:
    seen: list[int] = []
    works = [jobs.submit(lambda n=n: (time.sleep(0.01), seen.append(n))) for n in range(5)]
    jobs.close(10.0)
    assert seen == list(range(5)) and all(work.done for work in works)
    with pytest.raises(CommunicatorBroken, match="destroyed"):
        jobs.submit(lambda: None)


def test_nothing_is_lost_between_naps_and_sleep(jobs: JobQueue) -> None:
    """Jobs come while the thread works, looks for more, and sleeps; and just before the end."""
    seen: list[int] = []
    pauses = [0.0, 5e-5, 1e-4, 2e-4, 1e-3, 2e-3, 3e-3, 5e-3]
    for number in range(400):
        work = jobs.submit(lambda number=number: seen.append(number))
        if number % 3 == 0:
            time.sleep(pauses[number // 3 % len(pauses)])
        elif number % 3 == 1:
            assert work.get_future().wait() is None
    jobs.close(10.0)
    assert seen == list(range(400))


def test_thread_only_when_needed_and_gone_afterwards() -> None:
    before = threading.active_count()
    jobs = JobQueue()
    jobs.run(lambda: None)
    assert threading.active_count() == before
    jobs.submit(lambda: None).wait()
    jobs.close(5.0)
    del jobs
    gc.collect()
    assert threading.active_count() == before


def _kinds_of_handles(kind: type = Lasting) -> list[type]:
    below = [each for part in kind.__subclasses__() for each in _kinds_of_handles(part)]
    return below or [kind]


@pytest.mark.parametrize("kind", _kinds_of_handles(), ids=lambda kind: kind.__name__)
def test_a_handle_that_nobody_has_asked_lives_on(kind: type) -> None:
    """C++ may have it: the reducer of DDP, which `Join` gives one, waits for it and asks for its future."""

    class Small(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            Lasting.__init__.__get__(self)()

    for asks, lives in ((lambda handle: None, True), (lambda handle: handle.note_wait(None), False)):
        handle = Small()
        asks(handle)
        there = weakref.ref(handle)
        del handle
        gc.collect()
        assert (there() is not None) == lives


def test_not_more_than_a_few_handles_live_on() -> None:
    queue = JobQueue()
    there = []
    for _ in range(200):
        work = queue.submit(lambda: None)
        queue.finish(work)
        there.append(weakref.ref(work))
        del work
    queue.close()
    gc.collect()
    assert 0 < sum(each() is not None for each in there) <= 64
