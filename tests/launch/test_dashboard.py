"""``hvdliterun --dashboard``: the numbers of a running job, its page and its text, and who may see them."""

from __future__ import annotations

import http.client
import re
import socket
import time
import types
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import hvdlite
from hvdlite.errors import LaunchError
from hvdlite.launch.dashboard import server
from hvdlite.launch.dashboard.board import COLUMNS, Board, bytes_text, plain, seconds_text, waited_for
from hvdlite.launch.dashboard.page import page, text
from hvdlite.launch.dashboard.server import Dashboard
from hvdlite.launch.dashboard.top import top
from hvdlite.launch.job.pulses import Pulses
from hvdlite.launch.job.ranks import Rank
from hvdlite.launch.parser import make_parser
from hvdlite.testing import on_ranks
from hvdlite.timeline import Counts
from hvdlite.tools import cli
from tests.support.browser import MISSING, browser
from tests.support.jobs import Start, Started


def pulse(**fields: Any) -> dict[str, Any]:
    usual = dict.fromkeys(("rank", "time", "step", "stepped", "waited", "exchanged", "bytes", "memory", "lasts"), 0)
    return {**usual, "what": "", **fields}


def rank_of(number: int, *pulses: dict[str, Any], host: str = "node", **state: Any) -> Rank:
    rank = Rank(number, types.SimpleNamespace(send=None), host, 1, 1, True, **state)  # type: ignore[arg-type]
    for each in pulses:
        rank.pulses.add(each, time.monotonic())
    return rank


def late_and_early() -> list[Rank]:
    """Ten steps of 0.4 s: rank 0 computes for 0.1 s, waits for 0.2 s and moves data for 0.1 s; rank 1 is late."""
    early = pulse(time=5.0, step=11, stepped=5.0, waited=3.0, exchanged=1.0, bytes=8_000_000, memory=2e8)
    late = {**early, "waited": 1.0}
    return [rank_of(n, pulse(time=1.0, step=1, stepped=1.0), each) for n, each in enumerate((early, late))]


def board_of(ranks: list[Rank], title: str = "python train.py", missing: list[int] | None = None) -> Board:
    class Some(list[Rank]):
        pass

    job: Any = types.SimpleNamespace(ranks=Some(ranks))
    job.ranks.missing, job.ranks.left = missing or [], ranks
    board = Board(title)
    board.look(job)
    return board


# ---- numbers ----


def test_counts_say_where_the_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10, 30, 45, 50, 50, 60, 70, 99])
    monkeypatch.setattr(Counts, "clock", staticmethod(lambda: next(clock)))
    counts = Counts()
    counts.begin_wait()  # 10
    counts.ready()  # 30: others came
    counts.done(7)  # 45
    counts.end_wait()  # 50
    counts.step()  # 50
    assert (counts.waited, counts.exchanged, counts.nbytes, counts.steps, counts.stepped) == (40, 15, 7, 1, 50)
    counts.ready()  # 60: in the background, while the program computes, so that it loses no time
    counts.done(7)
    assert (counts.waited, counts.exchanged, counts.nbytes) == (40, 15, 14)


def test_what_ranks_count_is_what_they_do() -> None:
    def program() -> tuple[Counts, tuple[str, float]]:
        here = hvdlite.api.world()
        counts = here.timeline.counts = Counts()
        combine = hvdlite.DistributedGradient()
        for _ in range(3):
            combine([np.full(1000, hvdlite.rank(), np.float32), np.ones(3)])
        hvdlite.allreduce(np.ones(4))
        hvdlite.allreduce(np.ones(100_000))
        return counts, here.watch.longest_wait(1e9)

    for counts, waits in on_ranks(2, program):
        assert (counts.steps, counts.nbytes) == (3, 3 * 4024 + 32 + 800_000)
        assert 0 < counts.exchanged < counts.waited and counts.waiting_since == 0 and counts.stepped > 0
        assert waits == ("", 0.0)


def test_rates_of_short_and_long_steps() -> None:
    pulses = Pulses()
    assert pulses.last == {} and pulses.step_seconds is None and pulses.rate("bytes") is None
    pulses.add(pulse(time=1.0), 0.0)
    pulses.add(pulse(time=2.0, step=2, stepped=1.75), 0.0)
    assert pulses.step_seconds is None, "two ends of steps are needed"
    pulses.add(pulse(time=3.0, step=6, stepped=2.75, bytes=100), 0.0)
    assert pulses.step_seconds == 0.25 and pulses.rate("bytes") == 50
    for second in range(100):  # a step that takes long: how long those before took is still known
        pulses.add(pulse(time=4.0 + second, step=6, stepped=2.75, bytes=100), float(second))
    assert pulses.step_seconds == 0.25 and pulses.heard == 99
    pulses.add(pulse(time=0.5), 100.0)  # the rank has begun anew
    assert pulses.step_seconds is None and pulses.rate("step") is None


def test_who_is_waited_for() -> None:
    early, late = late_and_early()
    assert waited_for([early, late]) == [1]
    assert waited_for([early, rank_of(2)]) == [], "nothing is known of rank 2"
    stuck = rank_of(0, pulse(lasts=70, what="gradient exchange 3"))
    assert waited_for([stuck, rank_of(1), rank_of(2, exited=True)]) == [1]
    board = board_of([stuck, rank_of(1, pulse())])
    assert board.view.waits == ["rank 0 has waited 70 s for gradient exchange 3; not there: rank 1"]


def test_numbers_are_written_short() -> None:
    assert [seconds_text(s) for s in (None, 2e-6, 0.0123, 1.5, 250.0)] == ["", "2 µs", "12.3 ms", "1.5 s", "250 s"]
    assert [bytes_text(n) for n in (None, 0, 999, 12_345, 3.5e8, 8e10)] == [
        "",
        "0 B",
        "999 B",
        "12.3 kB",
        "350 MB",
        "80 GB",
    ]
    assert plain("a\x1b[2J\n\u202eb") == "a�[2J��b" and len(plain("x" * 999)) < 310


# ---- the page and the text ----

ODD = '</title><script>alert("&")</script>\x1b[31m'


class Words(HTMLParser):
    """What a browser makes of a page: its tags, and the text of each."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_says_what_is_known() -> None:
    board = board_of(late_and_early(), missing=[2])
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in board.view.rows]
    assert rows[0] == {
        **{"rank": "0", "host": "node", "state": "runs", "step": "11", "step time": "400 ms"},
        **{"computing": "25%", "waiting": "50%", "for rank": "1", "exchanging": "25%"},
        **{"given": "2 MB/s", "memory": "200 MB"},
    }
    assert (rows[1]["computing"], rows[1]["waiting"], rows[1]["for rank"]) == ("75%", "0%", "")
    assert (rows[2]["rank"], rows[2]["state"]) == ("2", "starts")
    board.hear(1, "x.py:3: UserWarning: odd\n  code of it\nan epoch")
    board.hear(None, "hvdliterun: rank 1 failed (exit code 1):\nTraceback (most\n  File\nValueError: x\n")
    board.end("", failed=False)
    assert board.view.ended and board.view.state.startswith("the job has ended after 0:00:0")
    assert [line for _, line in board.view.warnings] == ["rank 1: x.py:3: UserWarning: odd"]
    assert [line for _, line in board.view.events] == ["hvdliterun: rank 1 failed (exit code 1):", "ValueError: x"]
    lines = text(board.view).splitlines()
    assert re.fullmatch(r"0 +node +runs +11 +400 ms +25% +50% +1 +25% +2 MB/s +200 MB", lines[4])
    for cell in rows[0].values():
        assert cell in Words(page(board.view, "n")).words


def test_odd_names_are_only_names() -> None:
    board = board_of([rank_of(0, pulse(lasts=9, what=ODD), host=ODD)], title=ODD)
    board.hear(0, f"warning: {ODD}")
    board.hear(None, ODD)
    for ended in (False, True):
        source, usual = page(board.view, "n"), page(Board("x").view, "n")
        assert Words(source).tags.count("script") == Words(usual).tags.count("script") - ended
        assert sum(ODD[:-5] in word for word in Words(source).words) >= 4
        assert "\x1b" not in source and "\x1b" not in text(board.view)
        board.end("", failed=True)


def test_the_page_needs_nothing_from_outside_and_no_script() -> None:
    view = board_of(late_and_early()).view
    source = page(view, "n")
    assert not re.search(r"https?:|//|\bsrc=|<link|@import|url\(", source)
    assert '<noscript><meta http-equiv="refresh" content="2"></noscript>' in source and "<td" in source
    ended = Board("x")
    ended.end("", failed=False)
    assert "refresh" not in page(ended.view, "n") and "<script" not in page(ended.view, "n"), "it stays as it is"


# ---- who may see it ----


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    in_memory = lambda name: str(tmp_path / f"{name}4711.x")  # noqa: E731
    monkeypatch.setattr(server, "name_in_memory", in_memory)
    monkeypatch.setattr("hvdlite.launch.dashboard.top.name_in_memory", in_memory)
    made = Dashboard("python train.py", 0)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def ask(
    url: str, path: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    """Ask a page, or another path at the same place."""
    parts = urlsplit(url)
    line = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=20)
    line.request(method, path or f"{parts.path}?{parts.query}", headers=headers)
    answer = line.getresponse()
    body = answer.read().decode()
    line.close()
    return answer.status, body, answer.headers


def test_only_who_has_the_token_sees_the_page(dashboard: Dashboard, capfd: pytest.CaptureFixture[str]) -> None:
    parts = urlsplit(dashboard.url)
    status, body, headers = ask(dashboard.url)
    assert status == 200 and "python train.py" in body and headers["Cache-Control"] == "no-store"
    assert re.search(r"default-src 'none'; script-src 'nonce-[\w-]+'", headers["Content-Security-Policy"])
    for path in ("/", "/?token=", "/?token=%ff", f"/text?token={dashboard.token}x", "/../etc/passwd"):
        status, body, _ = ask(dashboard.url, path)
        assert status == 403 and "its token is missing or wrong" in body and "train.py" not in body
    status, body, _ = ask(dashboard.url, Host=f"rebound.example:{parts.port}")
    assert status == 403 and "for 127.0.0.1 only" in body
    assert ask(dashboard.url, f"/else?{parts.query}")[0] == 404
    assert ask(dashboard.url, method="POST")[0] == 501
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", parts.port or 0), timeout=5):
        pytest.fail("it listens elsewhere too")
    assert capfd.readouterr() == ("", ""), "what was asked is not printed: the address has the token"


def test_many_who_say_nothing_do_not_fill_the_machine(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("127.0.0.1", urlsplit(dashboard.url).port or 0)
    silent = [socket.create_connection(place, timeout=20) for _ in range(server._AT_ONCE)]
    with socket.create_connection(place, timeout=20) as one_more:
        assert one_more.recv(1) == b"", "it is closed at once"
    for each in silent:
        each.close()
    while True:
        try:
            assert ask(dashboard.url)[0] == 200
            break
        except (http.client.RemoteDisconnected, ConnectionResetError):  # the threads have not noticed yet
            continue


def test_the_end_of_a_job_is_seen(dashboard: Dashboard, capsys: pytest.CaptureFixture[str]) -> None:
    top(None, once=False)
    assert capsys.readouterr().out.startswith("python train.py\nstarts\n"), "once, for this is no terminal"
    top(4711, once=True)
    dashboard.board.end("hvdliterun: ended by SIGINT.\n", failed=True)
    status, body, _ = ask(dashboard.url, f"/text?token={dashboard.token}")
    assert status == 410 and "\nthe job has failed after 0:00:0" in body and "hvdliterun: ended by SIGINT." in body
    assert ask(dashboard.url)[0] == 200
    dashboard.show_end("", failed=True)  # somebody has seen it, so that this does not wait
    top(None, once=True)
    assert "the job has failed" in capsys.readouterr().out
    with pytest.raises(LaunchError, match="no job of process 7 with a dashboard runs here"):
        top(7, once=True)


def test_a_job_whose_hvdliterun_was_killed(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard._server.shutdown()
    dashboard._server.server_close()
    with pytest.raises(LaunchError, match="the job has ended: its hvdliterun does not answer"):
        top(None, once=True)
    with pytest.raises(LaunchError, match="no job with a dashboard runs here: begin it with hvdliterun --dashboard"):
        top(None, once=True)
    assert cli.main(["top", "--once"]) == 2 and cli.main(["top", "4711"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: the page is tried in it")
def test_the_page_in_a_browser(dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory) -> None:
    board = dashboard.board
    board.view = board_of(late_and_early(), title=ODD).view
    with browser() as window:
        for width in (1280, 400):
            window.resize(width, 800)
            window.go(dashboard.url)
            window.picture(tmp_path_factory.mktemp("pictures") / f"{width}.png")
            assert window.run("return document.documentElement.scrollWidth") == width, "nothing is cut off"
            assert window.text("tbody td:nth-child(7)") == "50%" and window.text("h1").startswith("</title><script>")
        board.hear(0, "warning: it renews itself")
        board.end("", failed=False)
        window.wait_for(lambda: window.text("#state").startswith("the job has ended"))
        assert "it renews itself" in window.text("main")
        board.view = Board("x").view
        window.go(dashboard.url)
        dashboard._server.shutdown()
        dashboard._server.server_close()
        window.wait_for(lambda: "does not answer any more: the job has ended" in window.text("#state"))


@pytest.mark.parametrize(
    ("words", "port", "command"),
    [
        ("--dashboard train.py 8080", 0, ["train.py", "8080"]),
        ("--dashboard 8080 train.py", 8080, ["train.py"]),
        ("--dashboard=8080 -np 2 train.py --dashboard", 8080, ["train.py", "--dashboard"]),
        ("--dashboard --mpi train.py", 0, ["train.py"]),
        ("-np 2 train.py", None, ["train.py"]),
    ],
)
def test_the_port_may_be_left_out(words: str, port: int | None, command: list[str]) -> None:
    options = make_parser().parse_args(words.split())
    assert (options.dashboard, options.command) == (port, command)


@pytest.mark.parametrize("given", ["=65536", "=123456", "=x", "=-1"])
def test_what_is_no_port(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([f"--dashboard{given}"])
    assert "is not a port, a number from 0 to 65535. See hvdliterun --help" in capsys.readouterr().err


# ---- a job ----

TRAINS = """
import sys, warnings
from pathlib import Path
import numpy as np
import hvdlite
hvdlite.init()
combine = hvdlite.DistributedGradient()
warnings.warn(f"<i>{hvdlite.rank()}</i>")
over = False
while not over:
    combine([np.ones(1000)])
    over = bool(hvdlite.allreduce(np.array([float(Path(sys.argv[1]).exists())]), hvdlite.Sum)[0])
sys.exit(sys.argv[2])
"""


def until(what: Callable[[], Any]) -> Any:
    """Ask until there is an answer. pytest's limit ends it."""
    while not (found := what()):
        time.sleep(0.05)
    return found


def url_of(job: Started) -> str:
    assert job.process.stderr is not None
    line = job.process.stderr.readline()
    found = re.fullmatch(
        r"hvdliterun: the page of this job: (http://127\.0\.0\.1:\d+/\?token=\S+) \(in a .* top\)\n", line
    )
    assert found, line
    return found[1]


@pytest.mark.costly
def test_a_running_job(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "a<b.py"
    program.write_text(TRAINS)
    job = start("-np", "2", "--dashboard", str(program), str(tmp_path / "end"), "the <last> words")
    url = url_of(job)

    def trained() -> str:
        body = ask(url)[1]
        steps = re.findall(r'<td data-name="step">([1-9]\d*)</td>', body)
        return body if len(steps) == 2 and len(re.findall('<td data-name="given">[^<]+/s', body)) == 2 else ""

    body = until(trained)
    assert "2 ranks on 1 host, running for 0:0" in body and "a&lt;b.py" in body and "a<b" not in body
    assert "UserWarning: &lt;i&gt;1&lt;/i&gt;" in body and "<i>" not in body
    assert len(re.findall(r'data-name="memory">[\d.]+ MB<', body)) == 2 and body.count(">runs<") == 2
    assert cli.main(["top", str(job.process.pid)]) == 0
    assert re.search(r"^1 .* runs .*%.* MB$", capsys.readouterr().out, re.MULTILINE)
    port = str(urlsplit(url).port)
    other = start("-np", "1", "--dashboard", port, "python", "-c", "0").end()
    assert other.code == 2 and other.err == (
        f"hvdliterun: --dashboard {port}: port {port} of 127.0.0.1 cannot be used (Address already in use). Give another port, "
        "or none for any that is free.\n"
    )
    (tmp_path / "end").touch()
    body = until(lambda: found if "the job has failed after" in (found := ask(url)[1]) else "")
    assert "the &lt;last&gt; words" in body and "refresh" not in body
    assert job.end().code == 1
    assert cli.main(["top", str(job.process.pid)]) == 2
    assert f"no job of process {job.process.pid} with a dashboard runs here" in capsys.readouterr().err
