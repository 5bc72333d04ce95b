"""What a person sees while Keel works: bars in a terminal, plain lines in a log. No torch here."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import rich.console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

PLAIN_SECONDS = 3.0
"""Plain progress lines are at least this far apart."""

# Text of a model or of a stranger's file must not steer the terminal. Tab and newline stay.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class Console:
    """The one way to the screen; everything goes to standard output.

    Args:
        rich_console: where to write; by default standard output as it is at each call.
        clock: seconds that only grow.
    """

    def __init__(self, rich_console: rich.console.Console | None = None, clock: Callable[[], float] = time.monotonic):
        self.rich = rich_console or rich.console.Console(highlight=False)
        self._clock = clock
        self._bars: Progress | None = None
        self._running = 0
        self._spoke = 0.0

    @property
    def interactive(self) -> bool:
        """Whether a terminal that can redraw is at the other end (FORCE_COLOR alone does not make one)."""
        return self.rich.is_terminal and not self.rich.is_dumb_terminal and self.rich.file.isatty()

    def line(self, text: str = "", style: str = "") -> None:
        """One line, as it is: brackets are no markup, and a log's lines are not wrapped."""
        self.rich.print(Text(self._safe(text), style=style), soft_wrap=not self.interactive)

    def parts(self, parts: Sequence[tuple[str, str]]) -> None:
        """A text in parts, each with its style, as `line` shows one."""
        text = Text.assemble(*((self._safe(part), style) for part, style in parts))
        self.rich.print(text, soft_wrap=not self.interactive)

    def rule(self, title: str) -> None:
        """A rule over the width with a title in it."""
        self.rich.rule(Text(self._safe(title), style="bold"), style="dim")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
        """A table as wide as the screen allows; long cells fold. Columns of numbers stand on the right."""
        table = Table(title=Text(self._safe(title), style="bold") if title else None, title_justify="left")
        for index, name in enumerate(columns):
            numbers = bool(rows) and all(isinstance(row[index], (int, float)) for row in rows)
            table.add_column(Text(self._safe(name)), justify="right" if numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(self._safe(compact(cell))) for cell in row))
        self.rich.print(table)

    @contextmanager
    def task(self, title: str, total: int, unit: str = "step", start: int = 0) -> Iterator["Task"]:
        """Shows how far a long part has come; call `Task.update` as often as you like.

        In a terminal a bar; one inside another vanishes at its end, the outermost stays. Elsewhere a line at the start,
        at the end, and in between at most every `PLAIN_SECONDS`; one inside another speaks only when nothing else has
        for so long. Both show what was really done, also when that is less than the total.

        Args:
            total: units of the whole part.
            start: units that were done before (a resumed run), which say nothing about the speed.
        """
        task = Task(title, total, unit, start)
        self._running += 1
        try:
            with self._bar(task) if self.interactive else self._plain(task, inner=self._running > 1):
                yield task
        finally:
            self._running -= 1

    @contextmanager
    def _bar(self, task: "Task") -> Iterator[None]:
        if self._bars is None:
            self._bars = Progress(*_columns(self.rich.width), console=self.rich, refresh_per_second=4)
            self._bars.start()
        bars = self._bars
        shown: TaskID = bars.add_task(
            escape(self._safe(task.title)), total=task.total, completed=task.done, unit=task.unit, numbers=""
        )
        task.changed = lambda: bars.update(shown, completed=task.done, numbers=self._safe(task.numbers))
        try:
            yield
        finally:
            if self._running > 1:
                bars.remove_task(shown)
            else:
                self._bars = None
                bars.stop()

    @contextmanager
    def _plain(self, task: "Task", inner: bool) -> Iterator[None]:
        start, began = task.done, self._clock()
        last, spoken = began, not inner

        def say(text: str) -> None:
            nonlocal last, spoken
            self._spoke = last = self._clock()
            spoken = True
            self.line(text)

        def changed() -> None:
            now = self._clock()
            if task.done < task.total and now - (self._spoke if inner else last) >= PLAIN_SECONDS:
                left = (now - began) * (task.total - task.done) / max(task.done - start, 1)
                say(f"{task}  {duration(left)} left")

        task.changed = changed
        if not inner:
            say(str(task))
        try:
            yield
        finally:
            if spoken:
                say(f"{task}  in {duration(self._clock() - began)}")

    def _safe(self, text: str) -> str:
        """Without control characters, and without what the output's encoding lacks."""
        encoding = self.rich.encoding
        return text.translate(_CONTROLS).encode(encoding, "backslashreplace").decode(encoding)


class Task:
    """A long part under way: `done` of `total` units, and the few numbers that matter."""

    def __init__(self, title: str, total: int, unit: str, done: int):
        assert 0 <= done <= total
        self.title, self.total, self.unit, self.done = title, total, unit, done
        self.numbers = ""
        self.changed: Callable[[], None] = lambda: None

    def update(self, done: int, **numbers: float | str) -> None:
        """So many units are done in all. Numbers are shown by name, an underscore as a space."""
        assert self.done <= done <= self.total, f"{self.title}: {done} after {self.done} of {self.total}"
        self.done = done
        self.numbers = "  ".join(f"{name.replace('_', ' ')} {compact(value)}" for name, value in numbers.items())
        self.changed()

    def __str__(self) -> str:
        head = f"[{self.title}] {self.unit} {self.done}/{self.total}"
        return f"{head}  {self.numbers}" if self.numbers else head


def compact(value: object) -> str:
    """A number as short as a glance needs: three digits (0.413, 1.2e-05), thousands whole; anything else as str."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as "42 s", "3 min 20 s" or "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _columns(width: int) -> list[ProgressColumn]:
    # Where the width is short, the numbers wrap; where it is very short, the bar goes.
    def fixed() -> Column:
        return Column(no_wrap=True)

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", table_column=fixed()),
        BarColumn(bar_width=24 if width >= 100 else 8, table_column=fixed()),
        TextColumn("{task.completed}/{task.total} {task.fields[unit]}", markup=False, table_column=fixed()),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=fixed()),
        TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(overflow="fold")),
    ]
    return columns if width >= 60 else columns[:1] + columns[2:]
