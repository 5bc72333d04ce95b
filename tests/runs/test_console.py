"""What a person sees: plain lines in a log, a bar in a terminal, text that cannot steer either."""

import io
import re

import pytest
import rich.console

from keel.runs.console import Console, compact, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal(width: int, file: io.StringIO) -> Console:
    return Console(
        rich.console.Console(file=file, width=width, force_terminal=True, highlight=False, _environ={"TERM": "xterm"})
    )


def shown(file: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.41267, "0.413"), (1.2e-5, "1.2e-05"), (12345.6, "12346"), (-1000.2, "-1000"), (999.4, "999")],
        *[(2e7, "2e+07"), (0.0, "0"), (3, "3"), (12345678, "12345678"), ("off", "off"), (None, "None")],
        (float("nan"), "nan"),
    ],
)
def test_compact(value: object, text: str):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text


def test_plain_lines_first_last_and_three_seconds_apart(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    console = Console(clock=clock)
    with console.task("reward", 8) as task:
        for done in range(1, 9):
            clock.now += 1
            task.update(done, loss=0.41267, kl_sum=done)
    assert capsys.readouterr().out.splitlines() == [
        "[reward] step 0/8",
        "[reward] step 3/8  loss 0.413  kl sum 3  5 s left",
        "[reward] step 6/8  loss 0.413  kl sum 6  2 s left",
        "[reward] step 8/8  loss 0.413  kl sum 8  in 8 s",
    ]


def test_a_resumed_part_measures_its_own_speed(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    with Console(clock=clock).task("ppo", 200, "update", start=100) as task:
        clock.now += 10
        task.update(110)
    assert capsys.readouterr().out.splitlines() == [
        "[ppo] update 100/200",
        "[ppo] update 110/200  1 min 30 s left",  # a unit a second, 90 to go
        "[ppo] update 110/200  in 10 s",  # ended early: no false 200
    ]


def test_an_error_shows_how_far_it_came(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ZeroDivisionError), Console(clock=Clock()).task("sft", 5) as task:
        task.update(2)
        raise ZeroDivisionError
    assert capsys.readouterr().out.splitlines() == ["[sft] step 0/5", "[sft] step 2/5  in 0 s"]


def test_an_inner_part_speaks_only_into_silence(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    console = Console(clock=clock)
    with console.task("ppo", 2) as outer:
        with console.task("rollouts", 4, "prompts") as inner:
            for done in range(1, 5):
                clock.now += 2
                inner.update(done)
        outer.update(1)
        with console.task("rollouts", 4, "prompts") as inner:
            clock.now += 1
            inner.update(4)
        outer.update(2)
    assert capsys.readouterr().out.splitlines() == [
        "[ppo] step 0/2",
        "[rollouts] prompts 2/4  4 s left",
        "[rollouts] prompts 4/4  in 8 s",
        "[ppo] step 1/2  8 s left",
        "[ppo] step 2/2  in 9 s",
    ]


def test_short_inner_parts_together_are_not_silent(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    console = Console(clock=clock)
    with console.task("ppo", 1):
        for part in ("rollouts", "scores", "update"):
            with console.task(part, 3) as inner:
                for done in range(1, 4):
                    clock.now += 1
                    inner.update(done)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "[ppo] step 0/1",
        # 3 s of the first part end with it; the second breaks the silence at 4 s, and says that it ended at 6 s
        "[scores] step 1/3",
        "[scores] step 3/3",
        "[ppo] step 0/1",
    ]


def test_a_count_that_goes_back_or_beyond_is_a_defect():
    for wrong in (6, 1):
        with pytest.raises(AssertionError), Console().task("sft", 5, start=2) as task:
            task.update(wrong)


def test_plain_output_has_no_codes_no_markup_and_no_wrapping(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    console = Console()
    long = "[bold]word :smile: " * 20 + "end"
    console.line(long, style="red")
    console.rule("[red]ppo")
    console.table(["name", "value"], [["a" * 100, 1.5], ["[b]", 200]], title="Summary")
    console.line("evil \x1b[31m\x9b2J\r\x07 tab\tü\u2028")
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.splitlines()[0] == long
    assert "[red]ppo" in out and "[b]" in out and out.count("a") >= 100
    assert "evil \\x1b[31m\\x9b2J\\x0d\\x07 tab" in out and "ü" in out
    # FORCE_COLOR asks for colour, not for bars in a file.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Console().task("sft", 1) as task:
        task.update(1)
    assert capsys.readouterr().out.splitlines() == ["[sft] step 0/1", "[sft] step 1/1  in 0 s"]


def test_an_encoding_that_lacks_a_letter_is_no_error():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(rich.console.Console(file=file, width=80))
    console.line("grün")
    console.table(["größe"], [["→"]], title="é")
    console.rule("ø")
    with console.task("süß", 1) as task:
        task.update(1, a="ñ")
    file.flush()
    text = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "gr\\xfcn" in text and "\\u2192" in text and "s\\xfc\\xdf" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_bar_ends_at_its_end_within_the_width(width: int):
    file = Terminal()
    console = terminal(width, file)
    assert console.interactive
    with console.task("ppo [x]", 17, "updates") as task:
        for done in range(1, 18):
            task.update(done, loss=0.5, kl_per_response=12345.6)
        console.line("above the bar")
    assert "17/17 updates" in shown(file) and "ppo [x]" in shown(file) and "0.5" in shown(file)
    assert "above the bar" in shown(file)
    assert all(len(part) <= width for line in shown(file).splitlines() for part in line.split("\r"))
    assert ("━" in shown(file)) == (width >= 60)
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_bars_inside_bars_vanish_and_errors_give_the_terminal_back():
    file = Terminal()
    console = terminal(120, file)
    with pytest.raises(ZeroDivisionError), console.task("ppo", 3) as outer:
        with console.task("rollouts", 2) as inner:
            inner.update(2)
        outer.update(1, gold=float("nan"))
        with console.task("scores", 2):
            raise ZeroDivisionError
    last = shown(file).rstrip().splitlines()[-1]
    assert "ppo" in last and "1/3" in last and "nan" in last and "rollouts" not in last
    assert file.getvalue().endswith("\x1b[?25h")
    with console.task("again", 1) as task:
        task.update(1)
    assert "1/1" in shown(file).splitlines()[-1]


def test_no_color_keeps_the_bar_and_drops_the_colour(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    console = Console(rich.console.Console(file=file, width=80, force_terminal=True))
    with console.task("sft", 2) as task:
        task.update(2)
    console.line("red", style="red")
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38)[0-9;]*m", file.getvalue())
    assert "2/2" in shown(file)
