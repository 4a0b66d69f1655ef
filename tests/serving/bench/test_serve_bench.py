"""The load generator against a fake server: counts, faults, order, concurrency, and the arithmetic of the report."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from aiohttp import web
from fake_server import FakeServer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.base.option import options_of
from headrace.serving.bench.connection import ServerConnection, Timing, read_stream
from headrace.serving.bench.options import SERVE_BENCH_SECTIONS, LoadOptions, parse_range, serve_bench_options
from headrace.serving.bench.report import Distribution, print_report, summarise
from headrace.serving.bench.serve import arrival_times, run_serve_bench, send_all
from headrace.serving.bench.traffic import TrafficRequest


@contextlib.contextmanager
def serving(fake):
    """The fake server on a free port, in a thread of its own."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run():
        runner, stopping = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1), asyncio.Event()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set_result((runner.addresses[0][1], asyncio.get_running_loop(), stopping))
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    port, loop, stopping = started.result(120)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(120)


def bench(fake, **options):
    with serving(fake) as url:
        return run_serve_bench(
            serve_bench_options(
                **{"base_url": url, "warmup": 0, "num_requests": 20, "output_len": "4", "input_len": "10", **options}
            )
        )


def test_counts_of_a_plain_run():
    fake = FakeServer()
    report = bench(fake, output_len="3-9", ignore_eos=True, warmup=3, flush_cache=True)
    measured = fake.bodies[3:]
    assert fake.flushed == 3 and len(measured) == 20
    assert (report.num_requests, report.num_completed, report.errors) == (20, 20, {})
    assert report.model == "fake-model" and all(body["model"] == "fake-model" for body in measured)
    assert report.prompt_tokens == 200 and report.cached_tokens == 40
    assert report.output_tokens == sum(body["max_tokens"] for body in measured)
    assert {body["max_tokens"] for body in measured} <= set(range(3, 10))
    assert all(
        len(body["prompt"]) == 10 and min(body["prompt"]) >= 1000 and max(body["prompt"]) <= 30000 for body in measured
    )
    assert all(
        body["ignore_eos"] is True and body["stream"] is True and body["stream_options"] == {"include_usage": True}
        for body in measured
    )
    assert report.total_throughput == pytest.approx((report.prompt_tokens + report.output_tokens) / report.duration_s)
    warm = {tuple(body["prompt"]) for body in fake.bodies[:3]}
    assert not warm & {tuple(body["prompt"]) for body in measured}


def test_adapters_take_turns_at_random():
    fake = FakeServer()
    report = bench(fake, num_requests=60, lora_modules="sql law=/data/law")
    counts = [sum(body["model"] == name for body in fake.bodies) for name in ("sql", "law")]
    assert report.num_completed == sum(counts) == 60 and min(counts) > 10


def test_pieces_are_counted_when_the_server_gives_no_usage():
    report = bench(FakeServer(with_usage=False), num_requests=5)
    assert (report.prompt_tokens, report.output_tokens) == (50, 20)


def test_a_chat_run_sends_text_and_does_not_time_the_role_chunk():
    fake = FakeServer(gap_s=0.02)
    report = bench(fake, endpoint="chat", num_requests=4)
    assert all(
        body["messages"][0]["role"] == "user" and len(body["messages"][0]["content"].split()) == 10
        for body in fake.bodies
    )
    assert all("ignore_eos" not in body for body in fake.bodies)
    assert report.output_tokens == 16
    assert report.latencies["ttft_ms"].p50 >= 20


def test_latencies_are_those_of_the_stream():
    report = bench(FakeServer(gap_s=0.03), num_requests=4, output_len="5")
    assert report.latencies["ttft_ms"].p50 >= 30
    assert (
        report.latencies["ttft_ms"].mean + 4 * report.latencies["itl_ms"].mean
        <= report.latencies["latency_ms"].mean + 1e-3
    )
    assert report.latencies["tpot_ms"].mean == pytest.approx(report.latencies["itl_ms"].mean, rel=1e-6)
    assert report.latencies["latency_ms"].p50 >= 150


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("429", "http 429"), ("500", "http 500"), ("cut", "cut short"), ("event", "server error"),
        ("junk", "bad stream"), ("drop", "connection")
    ],
)
def test_faults_are_counted_by_kind(fault, kind):
    report = bench(FakeServer(faults={2: fault}), output_len="2-3", num_requests=30)
    assert list(report.errors) == [kind] and 0 < report.errors[kind] < 30
    assert report.num_completed == 30 - report.errors[kind] and report.output_tokens == 3 * report.num_completed
    assert kind in report.examples


async def test_a_kept_connection_that_the_server_has_closed_is_replaced():
    stream = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    answer, num_closed = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(stream), stream), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_closed
        await reader.readuntil(b"}")
        writer.write(answer)
        await reader.readuntil(b"\r\n\r\n")  # the next request finds the connection open, and nobody there
        num_closed += 1
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        options = serve_bench_options(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
        async with ServerConnection(options.target, options.traffic) as connection:
            timings = [read_stream(await connection.send(TrafficRequest("once", 1))) for _ in range(3)]
    assert [t.error for t in timings] == [None] * 3
    assert num_closed == 2


def test_a_stuck_server_times_out():
    report = bench(FakeServer(gap_s=30), num_requests=2, timeout_s=1.0)
    assert report.errors == {"timeout": 2} and report.num_completed == 0
    assert report.output_throughput == 0 and report.latencies["ttft_ms"] == Distribution()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_run_at_once_than_wanted(concurrency):
    fake = FakeServer(gap_s=0.005)
    bench(fake, concurrency=concurrency, num_requests=12)
    assert fake.most_running == concurrency


def test_a_rate_starts_requests_whatever_runs():
    fake = FakeServer(gap_s=0.1)
    report = bench(fake, rate=200.0, num_requests=12)
    assert fake.most_running > 4 and report.num_completed == 12


def test_the_same_seed_sends_the_same_and_another_does_not():
    sent = []
    for seed in (5, 5, 6):
        fake = FakeServer()
        bench(fake, seed=seed, concurrency=1, input_len="5-50", output_len="1-5")
        sent.append([(body["prompt"], body["max_tokens"]) for body in fake.bodies])
    assert sent[0] == sent[1] != sent[2]


def test_shared_prefixes():
    fake = FakeServer()
    bench(fake, workload="shared-prefix", prefix_len=30, num_prefixes=3, input_len="5")
    assert len({tuple(body["prompt"][:30]) for body in fake.bodies}) == 3
    assert (
        len({tuple(body["prompt"]) for body in fake.bodies}) == 20
        and {len(body["prompt"]) for body in fake.bodies} == {35}
    )
    words = FakeServer()
    bench(words, workload="shared-prefix", prefix_len=30, random_words=True, input_len="5")
    assert (
        len({tuple(body["prompt"].split()[:30]) for body in words.bodies}) == 1
        and {len(body["prompt"].split()) for body in words.bodies} == {35}
    )


def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    entries = [{"prompt": "one", "max_tokens": 2, "timestamp": 100.1}, {"prompt": [1, 2], "timestamp": 100.0}]
    trace.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    fake = FakeServer()
    report = bench(fake, workload="trace", trace=str(trace))
    assert [(body["prompt"], body["max_tokens"]) for body in fake.bodies] == [([1, 2], 4), ("one", 2)]
    assert report.num_completed == 2 and report.duration_s >= 0.1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:2 is not JSON"), ("3", ":2 needs"), ('{"prompt": 3}', ":2 needs"),
        ('{"prompt": []}', ":2 needs"), ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "timestamp": "x"}', "timestamp")
    ],
)
def test_unsound_traces(tmp_path, line, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        bench(FakeServer(), workload="trace", trace=str(trace))


def test_what_is_said_when_no_server_helps(tmp_path):
    with pytest.raises(ConfigError, match="no server responds"):
        run_serve_bench(serve_bench_options(base_url="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=r"responds with 401.*--api-key"):
        bench(FakeServer(key="secret"))
    assert bench(FakeServer(key="secret"), api_key="secret").num_completed == 20
    with pytest.raises(ConfigError, match=r"http 400.*--random-words"):
        bench(FakeServer(faults={4: "400"}), warmup=2)
    with pytest.raises(ConfigError, match="--trace FILE"):
        serve_bench_options(workload="trace")
    with pytest.raises(ConfigError, match="unknown option 'concurency'"):
        serve_bench_options(concurency=3)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        bench(FakeServer(), workload="trace", trace=str(tmp_path / "none"))


def test_the_file_and_the_tables(tmp_path):
    out, text = tmp_path / "report.json", io.StringIO()
    with serving(FakeServer(faults={2: "429"})) as url:
        options = serve_bench_options(
            base_url=url + "/v1/", warmup=0, num_requests=10, input_len="3", output_len="2-3", api_key="secret",
            output_file=str(out), details=True
        )
        report = run_serve_bench(options, Console(file=text, width=160))
    written = json.loads(out.read_text())
    assert written["num_completed"] == report.num_completed == sum(r["error"] is None for r in written["requests"])
    assert written["latencies"]["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert written["output_throughput"] == report.output_throughput and written["options"]["load"]["num_requests"] == 10
    assert "secret" not in out.read_text()
    for piece in ("TTFT", "TPOT", "ITL", "p99", "fake-model", "http 429"):
        assert piece in text.getvalue()


def timing(started, arrivals, *, output_tokens=None, error=None):
    ended = (arrivals[-1] if arrivals else started) + 0.5
    return Timing(
        started, ended, list(arrivals), 10, len(arrivals) if output_tokens is None else output_tokens, 0, error, "why"
    )


times = st.floats(0.001, 50)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.lists(times, min_size=1, max_size=20), st.booleans()), min_size=1, max_size=30
    )
)
def test_the_report_is_numpys_arithmetic(random):
    timings = [
        timing(start, np.cumsum([start, *gaps])[1:].tolist(), error="x" if failed else None) for start, gaps,
        failed in random
    ]
    good = [t for t in timings if t.error is None]
    report = summarise(timings)
    assert report.num_completed == len(good) and report.errors == (
        {"x": len(timings) - len(good)} if len(good) < len(timings) else {}
    )
    assert report.duration_s == pytest.approx(max(t.ended for t in timings) - min(t.started for t in timings))
    assert report.output_throughput == pytest.approx(sum(len(t.arrivals) for t in good) / report.duration_s)
    expected = {
        "ttft_ms": [t.arrivals[0] - t.started for t in good],
        "tpot_ms": [np.mean(np.diff(t.arrivals)) for t in good if len(t.arrivals) > 1],
        "itl_ms": [gap for t in good for gap in np.diff(t.arrivals)],
        "latency_ms": [t.ended - t.started for t in good],
    }
    for name, seconds in expected.items():
        got = report.latencies[name]
        values = np.array(seconds) * 1e3 if seconds else np.zeros(1)
        assert (got.mean, got.p50, got.p90, got.p99) == pytest.approx(
            (values.mean(), *np.percentile(values, [50, 90, 99])), rel=1e-6, abs=1e-6
        )


def test_several_tokens_in_a_piece_count_as_tokens_not_as_gaps():
    report = summarise([timing(0.0, [1.0, 2.0], output_tokens=9)])
    assert (
        report.latencies["tpot_ms"].mean == pytest.approx(125)
        and report.latencies["itl_ms"].mean == pytest.approx(1000)
    )
    print_report(report, Console(file=io.StringIO()))


def test_poisson_arrivals_have_the_rate():
    asks = [TrafficRequest("x", 1)] * 20000
    due = np.array(arrival_times(asks, 50.0, 3))
    gaps = np.diff(due)
    assert (
        due[0] == 0 and gaps.mean() == pytest.approx(1 / 50, rel=0.03) and gaps.std() == pytest.approx(1 / 50, rel=0.05)
    )
    assert arrival_times([TrafficRequest("x", 1, 2.5), TrafficRequest("y", 1)], None, 0) == [2.5, 0.0]


async def test_results_are_in_the_order_of_the_requests_when_unpaced():
    async def send(ask):
        await asyncio.sleep(0.02 - 0.001 * ask.max_tokens)
        return ask.max_tokens

    asks = [TrafficRequest("x", n) for n in range(1, 15)]
    assert await send_all(send, asks, LoadOptions(concurrency=5), lambda: None) == list(range(1, 15))


def test_ranges_and_options():
    assert parse_range("x", "5") == (5, 5) and parse_range("x", "5-9") == (5, 9)
    for wrong in ("", "0", "9-5", "a", "5-", "-5", "5-6-7", "٣"):
        with pytest.raises(ConfigError, match="x must be"):
            parse_range("x", wrong)
    names = [info.name for kind in SERVE_BENCH_SECTIONS.values() for info in options_of(kind)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["headrace_spec_decode_num", "vllm:spec_decode_num"])
def test_tokens_per_step_are_those_of_the_measured_requests(name: str):
    """Of both engines together, without what was there before and without the counters beside them."""
    metrics = "\n".join([
        f"# TYPE {name}_drafts_total counter",
        f'{name}_drafts_total{{engine="0",model_name="m"}} {{n}}0.0', f'{name}_drafts_total{{engine="1"}} {{n}}0.0',
        f'{name}_accepted_tokens_total{{engine="0"}} {{n}}0.0', f'{name}_accepted_tokens_total{{engine="1"}} 7.0',
        f'{name}_accepted_tokens_per_pos_total{{position="0"}} {{n}}00.0', f"{name}_draft_tokens_total {{n}}00.0",
        f'{name}_drafts_created{{engine="0"}} 1.7e+09', ""
    ])
    out = io.StringIO()
    with serving(FakeServer(metrics=metrics)) as url:
        report = run_serve_bench(
            serve_bench_options(base_url=url, warmup=1, num_requests=4, output_len="2", input_len="4"),
            Console(file=out, width=100)
        )
    assert report.tokens_per_step == 1.5
    assert report.to_dict()["tokens_per_step"] == 1.5
    assert re.search(r"tokens per step with drafts +.* 1\.50", out.getvalue())


@pytest.mark.parametrize("metrics", [None, "", "headrace_spec_decode_num_drafts_total 5.0\n", "\x00\xff"])
def test_servers_without_speculation_have_no_tokens_per_step(metrics: str | None):
    report = bench(FakeServer(metrics=metrics), num_requests=2)
    assert report.tokens_per_step is None and report.num_completed == 2
