"""The exceptions that cross module boundaries, each with one sentence that says what to do."""


class TierdError(Exception):
    """Base of every error that tierd raises on purpose."""


class ProtocolError(TierdError):
    """A message that makes no sense. The text names the field; the sender's session goes on."""


class RefusedError(TierdError):
    """The other side understood a request and refused it. The text says why and what to do."""


class ConfigError(TierdError):
    """A flag, a config file or an environment that cannot work. The text says what to change."""


class DaemonUnavailableError(TierdError):
    """No daemon answers on the socket. The text says which command starts one."""
