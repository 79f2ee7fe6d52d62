"""A deterministic simulator of many ranks around the production core.

`ppsim.world` runs a case (`ppsim.cases`) under a strategy (`ppsim.strategies`); `ppsim.properties`
says what must hold, against the reference in `ppsim.oracle`. `python -m ppsim` is the command.
"""
