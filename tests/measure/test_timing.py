"""Timing: enough samples, cold caches, calls rotated, right units. No assertion depends on how fast this machine is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from repro.measure import timing  # noqa: E402

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GPU = pytest.param(CUDA, marks=pytest.mark.gpu)


def doubling(count: int, device: torch.device, elements: int = 1000) -> list[timing.Call]:
    inputs = [torch.randn(elements, device=device) for _ in range(count)]
    return [lambda x=x: (x * 2,) for x in inputs]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_at_least_thirty_positive_samples_however_short_the_budget(device: torch.device) -> None:
    timed = timing.device_time(doubling(2, device), device, seconds=0.0)
    assert len(timed.samples_us) == timing.MIN_SAMPLES and min(timed.samples_us) > 0
    assert (timed.method, timed.calls) == ("clock" if device.type == "cpu" else "graph", 2)
    assert len(timing.device_time(doubling(2, device), device, seconds=10).samples_us) == timing.MAX_SAMPLES
    called = timing.called_time([c for c in doubling(2, device)], device, seconds=0.0)
    assert len(called.samples_us) == timing.MIN_SAMPLES and min(called.samples_us) > 0


def test_a_sample_is_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks one second a call: a pass of three calls takes three, a sample is one."""
    now = 0.0

    def tick() -> tuple[torch.Tensor, ...]:
        nonlocal now
        now += 1.0
        return (torch.zeros(1),)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    timed = timing.device_time([tick] * 3, CPU, seconds=1)
    assert set(timed.samples_us) == {1e6}
    called = timing.called_time([tick] * 3, CPU, seconds=1)
    assert set(called.samples_us) == {1e6} and called.calls == 1


def test_short_calls_are_batched_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    seen: list[int] = []

    def make(i: int) -> timing.Call:
        def call() -> tuple[torch.Tensor, ...]:
            nonlocal now
            now += 20e-6
            seen.append(i)
            return ()

        return call

    monkeypatch.setattr("time.perf_counter", lambda: now)
    called = timing.called_time([make(i) for i in range(7)], CPU, seconds=0)
    assert called.calls == 50 and called.samples_us == pytest.approx([20.0] * 30)
    assert set(seen) == set(range(7))


def test_every_call_runs_once_a_pass() -> None:
    counts = [0, 0, 0]

    def make(i: int) -> timing.Call:
        def call() -> tuple[torch.Tensor, ...]:
            counts[i] += 1
            return (torch.full((1,), float(i)),)

        return call

    run = timing.make_pass([make(i) for i in range(3)], CPU)
    run.run()
    assert counts == [1, 1, 1] and [float(o[0]) for o in run.outputs] == [0.0, 1.0, 2.0]
    run.time(0)
    assert counts == [1 + 1 + 30] * 3 and len(run.outputs) == 3


def test_poison_reaches_remembered_outputs() -> None:
    kept = torch.ones(4)
    run = timing.make_pass([lambda: (kept, torch.ones(2, dtype=torch.int64))], CPU)
    run.run()
    run.poison()
    assert kept.isnan().all() and run.outputs == []


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one call"):
        timing.make_pass([], CPU)
    with pytest.raises(ValueError, match="at least one call"):
        timing.called_time([], CPU)
    with pytest.raises(ValueError, match="'graph' does not fit a cpu device"):
        timing.make_pass(doubling(1, CPU), CPU, "graph")
    with pytest.raises(ValueError, match="positive"):
        timing.set_count(0, CPU)


def test_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 60_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for size in (1, 5_000, 1_000_000, 59_999_999, 90_000_000, 200_000_000):
        count = timing.set_count(size, CUDA)
        assert count >= 2 and count * size >= 180_000_000
    assert timing.set_count(16 * 60_000_000, CUDA) == 1
    assert timing.set_count(10, CPU) == 2


@pytest.mark.gpu
def test_graph_and_events_agree_on_a_large_stream() -> None:
    """Both time the same kernel on the device: 2 GB of traffic take about half a millisecond, launches a few us."""
    calls = doubling(1, CUDA, 1 << 28)
    graph = sorted(timing.device_time(calls, CUDA, 0.1).samples_us)
    events = sorted(timing.device_time(calls, CUDA, 0.1, "events").samples_us)
    assert graph[len(graph) // 2] == pytest.approx(events[len(events) // 2], rel=0.1)


@pytest.mark.gpu
def test_a_backward_through_autograd_is_captured() -> None:
    with timing.work_stream(CUDA):
        x = torch.randn(64, 256, device=CUDA, requires_grad=True)
        y = torch.nn.functional.layer_norm(x, (256,))
        dy = torch.randn_like(y)
        run = timing.make_pass([lambda: torch.autograd.grad(y, (x,), dy, retain_graph=True)], CUDA)
        run.poison()
        assert run.outputs[0][0].isnan().all()
        run.run()
        expected = torch.autograd.grad(y, (x,), dy, retain_graph=True)[0]
        # The same kernels on the same numbers.
        assert torch.equal(run.outputs[0][0], expected)
        run.close()


@pytest.mark.gpu
def test_flush_evicts_what_the_cache_held() -> None:
    """A buffer of a quarter of L2 reads slower after a flush than right after it was read."""
    l2 = torch.cuda.get_device_properties(CUDA).L2_cache_size
    x = torch.randn(l2 // 16, device=CUDA)
    out = torch.empty(1, device=CUDA)
    call = lambda: (torch.sum(x, 0, keepdim=True, out=out),)  # noqa: E731
    cold = timing.device_time([call], CUDA, 0.05, "events").samples_us
    hot = timing.device_time([call] * 20, CUDA, 0.05, "graph").samples_us
    assert sorted(cold)[len(cold) // 2] > sorted(hot)[len(hot) // 2]
