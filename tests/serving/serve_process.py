"""`python -m tests.serving.serve_process PORT [KEY=VALUE …]`: serve() over a fake runner, in its own process.

Prints the announced line; a refused start ends with the error's exit code and its text on stderr.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from gemma_neuron.chat import Tokenizer
from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.port import Port
from gemma_neuron.serving.local import ServeOptions, serve
from tests.serving.replica_runner import make

SAID = "The end of the thing is in sight and then it is there."


def main() -> int:
    port = Port(Path(sys.argv[1]))
    knobs = dict(argument.split("=") for argument in sys.argv[2:])

    try:
        script = [*Tokenizer.from_folder(port.source_folder).encode(SAID), 106]
        load = partial(
            make,
            script=() if "free" in knobs else script,
            step=float(knobs.get("step", "0")),
            load=float(knobs.get("load", "0")),
            broken="broken" in knobs,
            context=int(knobs.get("context", "256")),
        )
        serve(
            port,
            load,
            replicas=int(knobs.get("replicas", "1")),
            host=knobs.get("host", "127.0.0.1"),
            http_port=int(knobs.get("port", "0")),
            unvalidated="unvalidated" in knobs,
            announce=lambda facts: print(json.dumps(facts), flush=True),
            options=ServeOptions(
                drain_seconds=float(knobs.get("drain", "30")),
                silence_seconds=float(knobs.get("silence", "10")),
            ),
        )
    except GemmaNeuronError as error:
        print(f"{error.message}\n{error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
