"""Protocol records of real ranks: off, unless the environment names a folder for them.

With ``PPCORE_PROTOCOL_LOG=FOLDER`` every rank of an engine writes its record (see `ppcore.record`) to
``FOLDER/stageS-columnC.log``, line by line, as things happen. ``ppsim conform FOLDER/*.log`` says
whether the run was one of the model. Without the variable a rank has a plain core, which knows nothing
of records.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..core import Core
from ..errors import SetupError
from ..record import Recorder
from ..schedule import Schedule

#: The environment variable that names the folder.
VARIABLE = "PPCORE_PROTOCOL_LOG"


def make_core(
    stage: int, schedule: Schedule, homes: Mapping[str, Iterable[int]], column: int = 0
) -> Core:
    """A rank's core, which writes a record where the environment asks for it.

    Raises:
        SetupError: the folder has a record of this rank already.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return Core(stage, schedule, homes)
    path = Path(folder) / f"stage{stage}-column{column}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("x", buffering=1)  # what a killed rank did is in its record
    except FileExistsError:
        raise SetupError(
            f"{path} is the record of an earlier run; {VARIABLE} has to name a folder without any"
        ) from None
    return Recorder(stage, schedule, homes, lambda line: print(line, file=file), column)
