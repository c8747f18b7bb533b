"""Progress bars on stderr: one for the stages of a run, one for the tokens of the current stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from attn_ops.demo.errors import DemoError


class Progress:
    """Progress of ``stages`` calls of :meth:`stage` and :meth:`tokens`. ``silent`` shows nothing."""

    def __init__(self, stages: int, silent: bool = False) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise DemoError('the demo shows its progress with tqdm; pip install "attn-ops[demo]"') from error
        self._tqdm, self._silent = tqdm, silent
        self._bar = tqdm(
            total=stages, unit="stage", disable=silent, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {elapsed}"
        )

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage of the run."""
        self._bar.set_description(name)
        yield
        self._bar.update()

    @contextlib.contextmanager
    def tokens(self, name: str, total: int) -> Iterator[Callable[[int], object]]:
        """A stage that counts tokens: yields a function that takes the number of new tokens."""
        with self.stage(name), self._tqdm(total=total, unit="tok", leave=False, disable=self._silent or None) as bar:
            yield bar.update

    def close(self) -> None:
        self._bar.close()
