"""The CPU benchmark's servers: started with their own environment, waited for, weighed, and ended with all they
started."""

from __future__ import annotations

import json
import sys
import urllib.request

import psutil
import pytest

from benchmarks.cpu import print_all, ratio, read_most
from benchmarks.cpu_servers import Server, run_server

SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(290)"])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{child.pid} {os.environ['GREETING']}".encode())
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def test_a_server_is_weighed_with_its_children_and_ended_with_them():
    server = Server("one", lambda port: [sys.executable, "-c", SERVER, str(port)], environment={"GREETING": "hello"})
    with run_server(server, patience_s=200) as running:
        with urllib.request.urlopen(running.base_url + "/anything", timeout=60) as answer:
            child, greeting = answer.read().decode().split()
        assert greeting == "hello"
        assert {process.pid for process in running.processes()} == {running.process.pid, int(child)}
        assert 0 < running.pss_mb() <= running.rss_mb() and len(running.cpu_s()) == 2
        assert running.start_s > 0
    assert has_ended(running.process.pid) and has_ended(int(child))


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or was only not asked after by what adopted it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_server_that_ends_before_it_answers_is_told():
    with pytest.raises(RuntimeError, match="broken did not get ready"), run_server(
        Server("broken", lambda port: [sys.executable, "-c", "raise SystemExit(3)"])
    ):
        pass


def test_ratios_say_how_many_times_as_good(capsys: pytest.CaptureFixture[str]):
    assert ratio("output_tok_s", 200.0, 100.0) == 2.0 and ratio("ttft_p50_ms", 200.0, 100.0) == 0.5
    figures = {"ttft_p50_ms": 50.0, "tpot_mean_ms": 5.0, "output_tok_s": 200.0, "rss_mb": 800.0, "pss_mb": 700.0}
    ours = {"goals": "int8", "first_start_s": 3.0, "start_s": 1.0, "workloads": {"W1": figures}}
    theirs = {"goals": "", "first_start_s": 9.0, "start_s": 9.0, "workloads": {"W1": {**figures, "tpot_mean_ms": 10.0}}}
    print_all(json.loads(json.dumps({"ours": ours, "other": theirs})))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["ours", "3.00", "1.00", "5.0"] for line in lines)
    assert any("ours / other" in line and "TPOT mean 2.00x" in line for line in lines)
    assert any("ours / goal W1 TPOT mean: 5.0 of 4.5 = 0.90x" in line for line in lines)


def test_the_most_requests_of_each_workload():
    assert read_most("8") == {"W1": 8, "W2": 8, "W3": 8, "W4": 8}
    assert read_most("W2=32,W4=1") == {"W2": 32, "W4": 1} and read_most(None) == {}
