"""Where a rank's blocks run, by the executor that drives it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from greenlet import greenlet

from ppcore.vllm.forward_thread import forward_thread

CPU = torch.device("cpu")
RAY, OTHERS = SimpleNamespace(use_ray=True), SimpleNamespace(use_ray=False)


def from_another_thread(function, *args):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function(*args)))
    thread.start()
    thread.join()
    return answers[0]


def test_a_worker_is_resumed_from_whatever_thread_ray_calls_on():
    on_forward_thread = forward_thread(RAY, CPU)

    def begin():
        worker = greenlet(lambda: greenlet.getcurrent().parent.switch("parked"))
        assert worker.switch() == "parked"
        return worker

    worker = from_another_thread(on_forward_thread, begin)
    assert on_forward_thread(worker.switch, "resumed") == "resumed"
    assert worker.dead


def test_other_executors_have_one_thread_and_it_is_kept():
    ident = from_another_thread(forward_thread(OTHERS, CPU), threading.get_ident)
    assert ident != threading.get_ident()
    assert forward_thread(OTHERS, CPU)(threading.get_ident) == threading.get_ident()


def test_an_error_comes_back_to_the_caller():
    with pytest.raises(ZeroDivisionError):
        forward_thread(RAY, CPU)(lambda: 1 / 0)
