"""The exceptions that cross module boundaries, each with one sentence that says what to do."""

REASON_CHARS = 1000


class TierdError(Exception):
    """Base of every error that tierd raises on purpose."""


class ProtocolError(TierdError):
    """A message that makes no sense. The text names the field; the sender's session goes on.

    It may quote what a stranger sent, and goes to logs and into replies: so it is made one
    printable line of at most REASON_CHARS.
    """

    def __init__(self, text: str) -> None:
        line = text[:REASON_CHARS]
        if not line.isprintable():
            line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)[:REASON_CHARS]
        super().__init__(line)


class OutOfStepError(ProtocolError):
    """A stream of messages that cannot be told apart any more. The connection must end."""


class RefusedError(TierdError):
    """The other side understood a request and refused it. The text says why and what to do."""


class ConfigError(TierdError):
    """A flag, a config file or an environment that cannot work. The text says what to change."""


class DaemonUnavailableError(TierdError):
    """No daemon answers on the socket. The text says which command starts one."""
