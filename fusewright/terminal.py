"""How the command line talks: results on stdout, progress and one-sentence errors on stderr, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.report.text import WIDEST, render
from fusewright.runtime.cache import write_atomic
from fusewright.runtime.memory import is_out_of_memory

VERIFIED, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turns a user's mistake, exhausted memory or Ctrl-C into one line and an exit code; our bugs keep their trace."""
    try:
        yield
    except FusewrightError as error:
        _leave(f"error: {error}", MISTAKE)
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _leave("error: memory ran out; choose a smaller batch with --batch N", MISTAKE)


def show(view: RenderableType) -> None:
    """Prints a result on stdout: coloured in a terminal, plain elsewhere, never wider than reads well."""
    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    if console.is_terminal:
        console.print(view, width=width)
    else:
        print(render(view, width), flush=True)


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Shows what is being done, and for how long, while it is done; nothing where stderr is no terminal."""
    with _progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        progress.add_task(doing, total=None)
        yield


@contextmanager
def steps(doing: str, total: int) -> Iterator[Steps]:
    """A progress bar over a known number of steps."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with _progress(*columns) as progress:
        yield Steps(progress, doing, total)


class Steps:
    """A running progress bar."""

    def __init__(self, progress: Progress, doing: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(doing, total=total)
        self._begun = 0

    def next(self, of: str, doing: str) -> None:
        """Names the step that starts now; the one before it is finished."""
        self._progress.update(self._task, description=f"{of}: {doing}", completed=self._begun)
        self._begun += 1


def check_target(path: Path | None) -> None:
    """Raises `UnsupportedError` where `path` could not be written, before anything long has run for it."""
    if path is None:
        return
    if path.is_dir():
        raise UnsupportedError(f"--json {path}: this is a directory; name a file")
    if not os.access(path.parent, os.W_OK):
        raise UnsupportedError(f"--json {path}: {path.parent} is no directory that can be written to")


def save(path: Path | None, text: str) -> None:
    """Writes a result's JSON, whole or not at all; nothing where no file was asked for.

    Raises `UnsupportedError` where the file cannot be written.
    """
    if path is None:
        return
    try:
        write_atomic(path, f"{text}\n".encode())
    except OSError as error:
        raise UnsupportedError(f"--json {path}: cannot be written: {error.strerror}") from error


def _progress(*columns: SpinnerColumn | TextColumn | TimeElapsedColumn | BarColumn | MofNCompleteColumn) -> Progress:
    console = Console(stderr=True)
    # Rich takes stdout's text through the progress display's own console, which would send results meant for a file to
    # the terminal instead.
    to_terminal = sys.stdout.isatty()
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=to_terminal
    )


def _leave(message: str, code: int) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"fusewright: {message}", markup=False)
    raise typer.Exit(code)
