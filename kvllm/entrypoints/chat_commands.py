"""What can be typed into `kvllm chat` beside messages: commands, which begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvllm.errors import ConfigError
from kvllm.spelling import did_you_mean

HINT = "/help lists commands, Ctrl-D ends the chat"
HELP = """\
/help          this list
/clear         forget the messages; the system prompt stays
/system TEXT   change the system prompt; without TEXT, tell it
/save FILE     write the chat as the JSON of a request
/exit, /quit   end the chat, as Ctrl-D does
//TEXT         send a message that begins with a slash: /TEXT"""
ROLE = "system"


class ChatCommands:
    """Commands that change a chat. They never reach the model.

    messages: the chat, which the commands change in place. model: its name, for the file that /save writes.
    """

    def __init__(self, messages: list[dict[str, Any]], model: str) -> None:
        self._messages = messages
        self._model = model
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/clear": self._clear,
            "/system": self._system,
            "/save": self._save,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    def take(self, line: str, answer: Callable[[str], None]) -> None:
        """Run a command, or answer a message. Raises ConfigError for what is no command, EOFError to end the chat."""
        text = line.strip()
        if text.startswith("//"):
            answer(text[1:])
        elif text.startswith("/"):
            name, *argument = text.split(maxsplit=1)
            if name not in self._commands:
                near = did_you_mean(name, self._commands) or "; /help lists them."
                raise ConfigError(f"{name} is no command{near} Write /{name} to send it as a message")
            self._commands[name](*argument or [""])
        else:
            answer(line)

    def complete_in(self, readline: Any) -> None:
        """Let the Tab key complete the names of commands."""

        def complete(text: str, state: int) -> str | None:
            found = [name + " " for name in self._commands if text.startswith("/") and name.startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" \t\n")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")

    def _help(self, argument: str) -> None:
        print(HELP)

    def _clear(self, argument: str) -> None:
        self._messages[:] = [message for message in self._messages if message["role"] == ROLE]

    def _system(self, text: str) -> None:
        prompts = [message for message in self._messages if message["role"] == ROLE]
        if text:
            rest = self._messages[len(prompts) :]
            self._messages[:] = [{"role": ROLE, "content": text}, *rest]
        else:
            print(prompts[0]["content"] if prompts else "There is no system prompt: /system TEXT sets one")

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs the name of a file: /save chat.json")
        body = {"model": self._model, "messages": self._messages}
        try:
            Path(name).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(body)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{name} cannot be written: {error.strerror}") from None
        print(f"Written: {name}, {len(self._messages)} messages", file=sys.stderr)

    def _exit(self, argument: str) -> None:
        raise EOFError
