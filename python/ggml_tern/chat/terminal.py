"""A conversation at the terminal: questions, answers, and the commands between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern.chat.conversation import Conversation
from ggml_tern.chat.prompt import QUOTES, prompt_session, question_of
from ggml_tern.chat.view import AnswerWriter, context_notes, fill, speed, stats_line
from ggml_tern.client.llama import Answer
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable_lines


@dataclass(frozen=True)
class Command:
    """What a line that begins with a slash does.

    Attributes:
        argument: how the help shows it.
        meaning: in a few words.
        run: takes the argument.
    """

    argument: str
    meaning: str
    run: Callable[[str], None]


class Terminal:
    """Reads questions and commands until the user ends it."""

    def __init__(
        self, conversation: Conversation, *, shows_stats: bool, check_alive: Callable[[], None]
    ) -> None:
        """
        Args:
            conversation: whom to ask.
            shows_stats: after each answer.
            check_alive: raises a TernError if nothing can be asked any more.
        """
        self._conversation, self._shows_stats, self._check_alive = conversation, shows_stats, check_alive
        self._notes = Console(stderr=True, highlight=False)
        self._saved: set[Path] = set()
        self._commands = {
            "/help": Command("", "these commands, and how to write more than a line", self._help),
            "/reset": Command("", "forget the conversation; the system message stays", self._reset),
            "/system": Command("[TEXT]", "show the system message, or set it; - for none", self._system),
            "/retry": Command("", "ask the last question again", self._retry),
            "/save": Command("FILE", "write the conversation, as JSON if FILE ends in .json", self._save),
            "/stats": Command("", "figures of this session, and how full the context is", self._stats),
            "/quit": Command("", "end; so does Ctrl-D", self._quit),
        }

    def run(self, name: str) -> None:
        """Greets with the name of the model, and returns at Ctrl-D, at /quit, or at the second Ctrl-C.

        Raises:
            TernError: the server is gone.
        """
        session, interrupted = prompt_session(), False
        self._note(f"{name} · context of {self._conversation.n_context} tokens · /help, Ctrl-D ends\n")
        while True:
            try:
                typed = session.prompt()
                interrupted = False
                self._handle(typed)
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                self._note("Ctrl-C again, or Ctrl-D, ends this")
            except TernError as error:
                self._check_alive()
                self._note(str(error), "red")

    def _handle(self, typed: str) -> None:
        name, _, argument = typed.strip().partition(" ")
        # A path, say, begins with a slash too, and is no command.
        if name.startswith("/") and name[1:].isalpha():
            if name not in self._commands:
                raise TernError(f"{name}: no such command; /help lists them")
            self._commands[name].run(argument.strip())
        elif question := question_of(typed):
            self._show(self._conversation.ask(question))

    # ---- answers ----

    def _show(self, answer: Answer) -> None:
        writer = AnswerWriter(sys.stdout)
        try:
            with closing(answer), writer:
                for chunk in answer:
                    writer.write(chunk)
        except KeyboardInterrupt:
            self._note("stopped")
        for note in context_notes(self._conversation):
            self._note(note)
        if self._shows_stats and writer.timings:
            self._note(stats_line(writer.timings, self._conversation.n_context))
        self._notes.print()

    def _note(self, text: str, style: str = "dim") -> None:
        # It may quote a server, or name a file.
        self._notes.print(Text(printable_lines(text), style))

    # ---- commands ----

    def _help(self, _: str) -> None:
        self._print_pairs({f"{name} {c.argument}": c.meaning for name, c in self._commands.items()})
        self._note(
            f"A line that ends in a backslash goes on in the next, and so does all between {QUOTES} and "
            f"{QUOTES}. Ctrl-C stops an answer. The arrow keys bring earlier questions back, Ctrl-R searches "
            "them."
        )

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._note("a new conversation")

    def _system(self, text: str) -> None:
        if self._conversation.completes:
            raise TernError("there is no system message where text is continued")
        if text:
            self._conversation.system = None if text == "-" else text
            self._note("from the next question on")
        else:
            self._note(self._conversation.system or "no system message")

    def _retry(self, _: str) -> None:
        self._show(self._conversation.retry())

    def _save(self, name: str) -> None:
        if not name:
            raise TernError("/save: give the name of the file to write")
        path = Path(name).expanduser().absolute()
        if path.exists() and path not in self._saved:
            raise TernError(f"{path}: already exists; give another name")
        self._conversation.save(path)
        self._saved.add(path)
        self._note(f"saved as {path}")

    def _stats(self, _: str) -> None:
        conversation, totals = self._conversation, self._conversation.totals
        self._print_pairs(
            {
                "answers": str(totals.n_answers),
                "prefill": speed(totals.n_prefill, totals.prefill_seconds),
                "decode": speed(totals.n_decode, totals.decode_seconds),
                "context": fill(conversation.n_used, conversation.n_context),
            }
        )

    def _quit(self, _: str) -> None:
        raise EOFError

    def _print_pairs(self, pairs: dict[str, str]) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in pairs.items():
            table.add_row(Text(name), Text(value, "dim"))
        self._notes.print(table)
