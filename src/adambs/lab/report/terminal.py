"""What the command line prints: wide terminals get columns, narrow ones a block for each row."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Below this columns of numbers no longer fit, and neither do two columns of words.
NARROW = 72

Row = Sequence[str]


class Entries:
    """Names with some lines of text each."""

    def __init__(self, rows: Iterable[tuple[str, Row]]) -> None:
        self.rows = [(name, [line for line in lines if line]) for name, lines in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < NARROW:
            for name, lines in self.rows:
                yield Text(name, style="bold")
                yield Padding(Text("\n".join(lines)), (0, 0, 0, 2))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, lines in self.rows:
            table.add_row(name, Text("\n".join(lines)))
        yield table


class Numbers:
    """A table of numbers under some titles. The first column names the row, the last is in words."""

    def __init__(self, head: Row, parts: Iterable[tuple[str, Iterable[Row]]], note: str = "") -> None:
        self.head, self.note = head, note
        self.parts = [(title, list(rows)) for title, rows in parts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < NARROW:
            yield from self._blocks()
        else:
            for title, rows in self.parts:
                if title:
                    yield Text(title, style="bold")
                yield self._table(rows)
        if self.note:
            yield Text(self.note, style="italic")

    def _table(self, rows: Iterable[Row]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in self.head:
            table.add_column(name, justify="left" if name in (self.head[0], self.head[-1]) else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def _blocks(self) -> RenderResult:
        for title, rows in self.parts:
            if title:
                yield Text(title, style="bold underline")
            for name, *cells in rows:
                yield Text(name, style="bold")
                block = Table.grid(padding=(0, 2))
                for label, cell in zip(self.head[1:], cells, strict=True):
                    if cell:
                        block.add_row(Text(label), Text(cell))
                yield Padding(block, (0, 0, 0, 2))
