"""What holds for all tests."""

import signal

# A runner in the background of a shell ignores Ctrl-C, and so would every process that a test
# starts: those are meant to be ended by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
