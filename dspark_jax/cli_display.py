"""What the command line shows: text as it comes, accepted drafts in colour, summaries and tables."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dspark_jax.results import Completion, RoundOutput

if TYPE_CHECKING:
    from dspark_jax.evaluate import Acceptance, Evaluation

PROMPT, ACCEPTED, OWN = "dim", "bold green", None
_CONTROLS = {c: "\ufffd" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


class Display:
    """Text and summary on stdout, progress on stderr (only where that is a terminal)."""

    def __init__(self, *, no_color: bool = False):
        plain = True if no_color else None
        self.out = Console(no_color=plain, highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, no_color=plain, highlight=False)
        self._styled = self.out.is_terminal and not self.out.no_color

    def waiting(self, what: str) -> AbstractContextManager:
        """A spinner while something without output runs."""
        return self.err.status(f"{what} …") if self.err.is_terminal else nullcontext()

    def _write(self, text: str, style: str | None) -> None:
        # Unwrapped and unmarked: generated text may hold brackets, tabs and anything else. A terminal must not obey it.
        if self.out.is_terminal:
            text = text.translate(_CONTROLS)
        if self._styled and style:
            self.out.out(text, style=style, end="", highlight=False)
        else:
            self.out.file.write(text)
        self.out.file.flush()

    def begin(self, prompt: str, draft: bool) -> None:
        """The prompt, and what the colours mean."""
        if self._styled and draft:
            self._write("accepted drafts", ACCEPTED)
            self._write("  the target's own tokens\n\n", OWN)
        self._write(prompt, PROMPT)

    def round(self, output: RoundOutput) -> None:
        """One block, token by token in its colour."""
        for j, piece in enumerate(output.pieces):
            self._write(piece, ACCEPTED if j < output.accepted else OWN)

    def end(self) -> None:
        self._write("\n\n", None)

    def summary(self, result: Completion, plain: Completion | None, drafter: str | None, compile_seconds: float) -> None:
        """Counts and speeds of the run, and of plain decoding where it ran; `drafter` says what drafted, if anything did."""
        draft = drafter is not None
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_row("tokens", f"{len(result.tokens)} (ended by {_reason(result.finish_reason)})")
        if draft:
            table.add_row("drafter", drafter)
            table.add_row("rounds", str(result.rounds))
            table.add_row("tokens per round", _number(result.tokens_per_round))
            table.add_row("acceptance by position", _acceptance(result))
            table.add_row("verified for nothing", f"{result.wasted} of {sum(result.verify_lengths)} verified drafts")
            if result.rested_rounds:
                table.add_row("drafter rested", f"{result.rested_rounds} of {result.rounds} rounds")
            table.add_row("tokens/s with the drafter", _number(result.tokens_per_second, 1))
        if not draft or plain is not None:
            table.add_row("tokens/s without the drafter", _number((plain or result).tokens_per_second, 1))
        table.add_row("first token after", f"{result.prefill_seconds:.2f} s")
        table.add_row("compilation", f"{compile_seconds:.1f} s (not in the speeds)")
        self.out.print(table)
        if not draft or plain is None or not result.tokens_per_second or not plain.tokens_per_second:
            return
        gain = result.tokens_per_second / plain.tokens_per_second
        outcome = "makes decoding" if gain >= 1 else "does not pay on this device: decoding is"
        detail = ""
        if result.tokens_per_round:
            cost = result.tokens_per_round / gain
            detail = f" One round takes {cost:.2f} times as long as one plain token and brings"
            detail += f" {result.tokens_per_round:.2f} tokens."
        self.out.print(f"\nThe drafter {outcome} {gain:.2f} times as fast as plain decoding.{detail}")

    def verdict(
        self, result: Completion, plain: Completion, comparable: bool, decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Whether plain decoding gives the same text, or where the two part; only texts that are `comparable` have to agree."""
        if not comparable:
            self.out.print(
                "Sampled texts with and without the drafter differ by design: their law is equal, not the sample."
                " Compare texts at temperature 0, or with --verify coupled."
            )
        elif result.tokens == plain.tokens:
            self.out.print(f"Plain decoding's text is identical ({len(plain.tokens)} tokens).")
        else:
            at = first_difference(result.tokens, plain.tokens)
            self.out.print(
                f"Plain decoding's text differs from token {at + 1} on:\n"
                f"  with the drafter:    {_excerpt(decode(result.tokens[at:]))}\n"
                f"  without the drafter: {_excerpt(decode(plain.tokens[at:]))}\n"
                "In float32 this happens only where two tokens tie within rounding; in bfloat16 it is to be expected.",
                markup=False,
            )

    def evaluation(self, results: Sequence["Evaluation"]) -> None:
        """Tokens a round and acceptance by kind of prompt, then how the greedy texts compare with plain decoding's."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        columns = ("prompts", "head", "tokens per round", "acceptance by position", "distinct 4-grams", "identical")
        for column in columns:
            table.add_column(column)
        for r in results:
            same = "-" if r.identical is None else f"{r.identical}/{r.prompts}"
            share = "-" if r.distinct_4grams is None else f"{r.distinct_4grams:.1%}"
            table.add_row(f"{r.kind} ({r.prompts})", "on", *_row(r.acceptance), share, same)
            if r.head_off is not None:
                table.add_row("", "off", *_row(r.head_off), "", "")
        self.out.print(table)
        for d in results[-1].differences:
            verdict = "excused, a near-tie" if d.excused else "NOT EXCUSED"
            self.out.print(f"prompt {d.index} differs from token {d.at + 1} on: {verdict} (margins: {d.margins})")


def _row(acceptance: "Acceptance") -> tuple[str, str]:
    rates = ("-" if rate is None else f"{rate:.1%}" for rate in acceptance.by_position)
    return _number(acceptance.tau), "  ".join(rates)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which two unequal sequences differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reason(reason: str) -> str:
    names = {"stop": "a stop token", "length": "the token limit", "context": "the end of the context"}
    return names.get(reason, reason)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _acceptance(result: Completion) -> str:
    rates = zip(result.acceptance_by_position, result.accepted_by_position, result.verified_by_position, strict=True)
    return "  ".join("-" if rate is None else f"{rate:.0%} ({a}/{v})" for rate, a, v in rates)


def _excerpt(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else text[:length] + "…")
