"""The prompt of a chat: line editing, history, and questions of more than one line."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.filters import is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

#: What a question of several lines may stand between.
QUOTES = '"""'


def prompt_session() -> PromptSession[str]:
    """Its prompt() returns what was typed; EOFError is Ctrl-D, KeyboardInterrupt Ctrl-C."""
    return PromptSession(
        FormattedText([("bold", "> ")]),
        multiline=True,
        prompt_continuation=FormattedText([("", "  ")]),
        key_bindings=_key_bindings(),
        history=_history(),
        # Where answers go to a file, the prompt does not.
        output=create_output(always_prefer_tty=True),
    )


def question_of(typed: str) -> str:
    """What was typed, without quotes and white space around it."""
    text = typed.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip()
    return text


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~is_searching)
    def finish_or_go_on(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) == 1:
            buffer.insert_text("\n")
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def go_on(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    """In a file that only this user can read, where one can be made."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "ggml-tern", "chat-history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
