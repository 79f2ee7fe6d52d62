"""What things cost: the model, the machine and the network of a prediction.

`Costs` has one number for each thing that takes time, and each number is measured on its own:

* the network's by exchanges of bare bytes;
* a message's by the time that a pull takes above that;
* those of lazies and published values by single accesses, without a second stage;
* the one-stage numbers by traces on one stage, without any network.

So what a trace costs on several stages is never an input; it follows from what the core decides.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The sizes of a case's values, and the time of its steps.

    Attributes:
        layers: of the whole model.
        hidden: extent of the hidden states.
        vocabulary: extent of the logits.
        prompt: tokens of each request's prompt.
        number_bytes: of an element.
        step_s: of a step of one token through all layers and the head, on all stages together.
        token_s: that a step takes longer for each further token.
    """

    layers: int = 24
    hidden: int = 512
    vocabulary: int = 1024
    prompt: int = 32
    number_bytes: int = 4
    step_s: float = 0.018
    token_s: float = 0.00025

    def tokens(self, turn: int) -> int:
        """Of one request in its turn."""
        return 1 if turn else self.prompt

    def visit_s(self, location: str, tokens: int) -> float:
        """How long the forward computes before this location's value is there."""
        if location.endswith(".out") or location == "logits":
            return (self.step_s + self.token_s * (tokens - 1)) / (self.layers + 1)
        return 0.0

    def size(self, location: str, turn: int) -> int:
        """Bytes of one tensor of a location's value for one request."""
        if location == "logits":
            return self.vocabulary * self.number_bytes
        return self.tokens(turn) * self.hidden * self.number_bytes

    def hidden_bytes(self, tokens: int) -> int:
        """What a stage hands to the next one: the hidden states and the residual."""
        return 2 * tokens * self.hidden * self.number_bytes


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes a second; by default roughly those of two CPU cores, to be measured elsewhere.

    Attributes:
        latency_s: of the network, one way.
        bandwidth: of the network.
        message_s: of one end of a message: spelling and sending it, or taking it in.
        lazy_s: of a read, or a write, that another stage serves, with what is done to the lazy.
        keep_s: of a read that other stages may ask for, above the same read on one stage.
        copy: of memory.
        command_s: from the engine to a rank, or back, where a rank is a process of its own.
        trace_s: of a trace on one stage, whatever it does.
        request_s: of each of its requests.
        visit_s: of each visit that it is served.
        leaf_s: of each tensor that it saves.
    """

    latency_s: float = 15e-6
    bandwidth: float = 5e9
    message_s: float = 100e-6
    lazy_s: float = 250e-6
    keep_s: float = 80e-6
    copy: float = 10e9
    command_s: float = 200e-6
    trace_s: float = 0.0
    request_s: float = 2e-3
    visit_s: float = 100e-6
    leaf_s: float = 100e-6

    def wire(self, size: int) -> float:
        """Seconds until so many bytes are there."""
        return self.latency_s + size / self.bandwidth

    def keep(self, size: int) -> float:
        """Seconds that publishing so many bytes takes."""
        return self.keep_s + size / self.copy
