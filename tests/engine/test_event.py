import threading

from replica_engine.engine.thread_pool import Event


def test_is_clear_at_first():
    assert not Event().wait(timeout=0)


def test_waiting_consumes_it():
    event = Event()
    event.set()
    assert event.wait(timeout=0)
    assert not event.wait(timeout=0)


def test_set_twice_counts_once():
    event = Event()
    event.set()
    event.set()
    assert event.wait(timeout=0)
    assert not event.wait(timeout=0)


def test_wakes_a_waiter_in_another_thread():
    event, woken = Event(), Event()
    thread = threading.Thread(target=lambda: event.wait() and woken.set())
    thread.start()
    event.set()
    assert woken.wait(timeout=300)
    thread.join()
