"""What the engine tests share."""

#: Seconds that one call may take. An engine answers in milliseconds, and a wait inside it ends at its own
#: deadline after a minute: a test that is saved by that deadline fails.
CALL_TIMEOUT_S = 20.0
#: Seconds that a block may run without touching the model.
BLOCK_TIMEOUT_S = 4.0
LAYERS = 8
