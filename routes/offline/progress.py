"""What a person sees of a batch: a bar where there is a terminal, and a line at the end."""

import sys
import time

from tqdm import tqdm

from routes.offline.answer_file import AnswerFile
from routes.offline.offline_app import OfflineApp
from routes.offline.request_file import RequestFile

BAR = "{percentage:3.0f}% |{bar}| {desc} [{elapsed}, {remaining} left]"
RECENT_SECONDS = 5.0  # over which the speed is told


class ProgressReport:
    """How far it is. `size`: bytes of IN, the measure of the bar; 0 when that is not known."""

    def __init__(self, size: int):
        self._size = size
        self._bar: tqdm | None = None
        self._began = time.monotonic()
        self._lines_before = 0
        self._recent: list[tuple[float, int]] = []

    def resumed(self, answers: AnswerFile) -> None:
        """So much was there before."""
        self._lines_before = answers.num_lines
        if answers.num_lines:
            say(f"going on behind {answers.num_lines:,} answers")

    def begin(self, app: OfflineApp) -> None:
        """The engine is there."""
        self._began = time.monotonic()
        if sys.stderr.isatty() and app.client.info is not None:
            info = app.client.info
            say(f"{app.config.served_model_name or info.model} on {info.device}, {info.slots} rows at a time")
            self._bar = tqdm(total=self._size, bar_format=BAR, dynamic_ncols=True)

    def show(self, app: OfflineApp, requests: RequestFile, answers: AnswerFile) -> None:
        """Bring the bar up to date."""
        if self._bar is None:
            return
        now = time.monotonic()
        self._recent = [(at, tokens) for at, tokens in self._recent if now - at < RECENT_SECONDS] + [(now, app.tokens)]
        began, tokens = self._recent[0]
        speed = (app.tokens - tokens) / max(now - began, 1e-9)
        self._bar.n = min(requests.num_bytes, self._size)
        self._bar.set_description_str(f"{answers.num_lines:,} answers, {speed:,.0f} tokens/s")

    def end(self, app: OfflineApp, requests: RequestFile, answers: AnswerFile, *, complete: bool) -> None:
        """Tell what came of it."""
        if self._bar is not None:
            self._bar.close()
        seconds = max(time.monotonic() - self._began, 1e-3)
        num_lines = answers.num_lines - self._lines_before
        say(
            f"{'all lines are' if complete else 'stopped:'} answered: {num_lines:,} lines in {seconds:.1f} s "
            f"({num_lines / seconds:,.1f} a second), {app.prompt_tokens:,} prompt tokens, {app.tokens:,} tokens "
            f"({app.tokens / seconds:,.0f} a second); in the file {answers.num_lines:,} answers, {answers.num_errors:,} errors"
        )
        if requests.first_repeated is not None:
            line = requests.first_repeated.number
            say(f"{requests.num_repeated:,} lines have the custom_id of an earlier line, the first of them is line {line}")


def say(text: str) -> None:
    """A line for the person."""
    print(text, file=sys.stderr, flush=True)
