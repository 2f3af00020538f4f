"""`tercet bench engine` on a CPU: every row of the CPU table, each with what it is compared with, in one run.

Decides what runs beside what. Refuses to know how a request is sent, a kernel is called or a table is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from deploy.bench.harness.clients import LOOPBACK, Crowd, check
from deploy.bench.harness.contender_process import ContenderProcess
from deploy.bench.harness.options import Options, progress
from deploy.bench.harness.report import Document, kernel_table, print_bandwidth
from deploy.bench.harness.rounds import Contender, Results, Series, interleave
from deploy.bench.harness.rows import NUM_CLIENTS, cpu_rows
from deploy.bench.harness.server import Server
from deploy.bench.harness.workload import BASELINES, Pass, Subject, Writer
from workers.checkpoints.resolve import resolve

NUM_KEYSTROKE_TOKENS = 512
NUM_KEYS = 4  # letters typed after each long prompt
WORDS_PER_TURN = 25  # typed between two turns of the ceiling

# Series: label, unit.
LABELS = {
    **{name: (label, "ms") for name, label in BASELINES.items()},
    "gateway": ("ours: W through the gateway, cold", "ms"),
    "gateway-overhead": ("ours: of it, gateway, HTTP and client", "ms"),
    "gateway-cached": ("ours: of its prompt, tokens cached", "tokens"),
    "engine": ("ours: W in the engine alone, cold", "ms"),
    "linears-request": ("ceiling: W's linear layers", "ms"),
    "linears-request-whole-head": ("the same, head over the whole prompt", "ms"),
    "linears-steps": ("ceiling: 19 steps' linear layers", "ms"),
    "linears-crowd": ("ceiling: linear layers of 16 × W at once", "ms"),
    "keystroke": ("ours: next keystroke at 512 tokens", "ms"),
    "keystroke-cached": ("ours: of its prompt, tokens cached", "tokens"),
    "document": ("ours: a word more of a document", "ms"),
    "document-cached": ("ours: of its prompt, tokens cached", "tokens"),
    "document-linears-steps": ("ceiling, beside it: 19 steps' linear layers", "ms"),
    "clients": ("ours: 16 clients at once", "tokens/s"),
    "clients-cost": ("of all cores' time, the clients' share", "share"),
    "start": ("ours: worker from fork to warm, embedded", "s"),
    "embedded": ("ours: W through the gateway, cold, embedded", "ms"),
}

NOTES = [
    "Cold: every prompt is a new one; the series gateway-cached says what was cached all the same.",
    "A request's linear layers: one pass over its prompt, the head over its last row only, then 19 steps of 3 rows.",
    "Each linear layer has the kernel that is fastest for its rows on this machine, and weights of its own.",
    "Baselines are timed without tokenizing and without HTTP; ours, through the gateway, with both.",
    "The engine's own time: queue + prefill + decode of a request's slowest sentence, as the answer says.",
    "Keystroke: a word typed letter by letter after a text of 512 tokens was served, through the gateway.",
]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done in one turn."""

    num_bytes: int  # of the memory that bandwidth is measured on
    num_looks: int  # at each kernel
    num_repeats: int  # of what takes less than a second
    num_crowd_requests: int  # of each of 16 clients
    num_renewals: int  # of the worker whose start is timed


FULL = Sizes(num_bytes=1 << 30, num_looks=5, num_repeats=3, num_crowd_requests=2, num_renewals=4)
QUICK = Sizes(num_bytes=1 << 27, num_looks=1, num_repeats=1, num_crowd_requests=1, num_renewals=0)


class CpuSuite:
    """One run. `run` fills the document."""

    def __init__(
        self, options: Options, wanted: Sequence[str], words: Sequence[str], num_words: int, console: Console
    ) -> None:
        """
        Args:
            wanted: names of CPU targets.
            words: the document to be typed; empty for one of the writer's.
            num_words: how much of it.
        """
        self._options = options
        self._wanted = wanted
        self._words = words
        self._num_words = num_words
        self._console = console
        self._sizes = QUICK if options.is_quick else FULL
        self._workload = options.workload
        self._subject = options.subject()
        self._writer = Writer(self._subject.tokenizer(), options.seed)
        self._is_small = False
        self._dtypes: set[str] = set()  # in effect
        self._stack = ExitStack()

    def run(self, document: Document) -> None:
        try:
            results = self._measure(document)
        finally:
            self._stack.close()
        document.series |= {name: Series.of(*LABELS[name], values) for name, values in results.samples.items()}
        document.rows += cpu_rows(self._wanted, results, self._workload, is_comparable=self._is_small)
        document.settings["dtype in effect"] = ", ".join(sorted(self._dtypes)) or "unknown"
        document.notes += NOTES

    def _measure(self, document: Document) -> Results:
        document.ceiling = self._start_ceiling()
        contenders = self._contenders()
        num_rounds = self._options.num_rounds
        with progress(self._console, "Rounds", (num_rounds + 1) * len(contenders)) as turn:
            results = interleave(contenders, num_rounds, turn)
        if self._needs("document"):
            results.add("document", self._type)
        self._stack.close()
        if self._needs("start", "embedded"):
            results.add("embedded", self._embedded)
        return results

    def _needs(self, *rows: str) -> bool:
        return not {*rows}.isdisjoint(self._wanted)

    def _start_ceiling(self) -> dict[str, Any]:
        """Measure the ceiling's parts, and print them: whatever follows is to be read against them."""
        with self._console.status("Ceiling: memory and matrix kernels …"):
            self._ceiling = self._start("speed.ceiling:Ceiling", self._subject, "cpu", self._options.num_threads)
            shape = self._ceiling.call("shape")
            self._is_small = bool(shape["is_small"])
            bandwidth = self._ceiling.call("bandwidth", self._sizes.num_bytes)
            print_bandwidth(self._console, bandwidth)
            passes = [one for sequence in self._sequences().values() for one in sequence]
            rows = sorted({rows for one in passes for rows in (one.rows, one.head_rows)})
            kernels = self._ceiling.call("choose", rows, self._sizes.num_looks) if rows else {}
        if kernels:
            self._console.print(kernel_table(kernels))
        return {
            **bandwidth,
            "num_threads": self._options.num_threads,
            "num_weights": shape["num_weights"],
            "int8_step_at_read_bandwidth_ms": shape["num_weights"] / bandwidth["read_gb_s"] / 1e6,
            "kernels_ms": kernels,
            "chosen": self._ceiling.call("chosen"),
        }

    def _sequences(self) -> dict[str, list[Pass]]:
        """The linear layers to be timed, by series."""
        workload = self._workload
        whole_head = Pass(workload.num_prompt_tokens, workload.num_prompt_tokens, 1)
        sequences = {}
        if self._needs("engine"):
            sequences["linears-request"] = workload.passes()
            sequences["linears-request-whole-head"] = [whole_head, *workload.step_passes()]
        if self._needs("keystroke", "document"):
            sequences["linears-steps"] = workload.step_passes()
        if self._needs("clients"):
            sequences["linears-crowd"] = workload.passes(NUM_CLIENTS)
        return sequences

    def _contenders(self) -> list[Contender]:
        """Baselines, then ours, then the ceiling; those that a wanted row needs."""
        contenders = []
        if self._needs("request", "batched"):
            contenders += self._baselines()
        if self._needs("request", "batched", "overhead", "keystroke", "document", "clients"):
            with self._console.status("Starting a server to measure …"):
                server = self._stack.enter_context(Server(self._options.models, self._options.server_settings))
                self._clients = self._clients_of(server, self._subject)
            self._dtypes.add(server.slots()[0]["dtype"])
        if self._needs("request", "batched", "overhead"):
            contenders.append(Contender("gateway", "W through the gateway", self._gateway))
        if self._needs("engine"):
            contenders.append(self._engine_alone())
        if self._needs("keystroke"):
            contenders.append(Contender("keystroke", "keystrokes", self._keystrokes))
        if self._needs("clients"):
            contenders.append(Contender("clients", f"{NUM_CLIENTS} clients", self._crowd))
        return contenders + [self._linears(name, passes) for name, passes in self._sequences().items()]

    def _baselines(self) -> list[Contender]:
        names = ["a"] if self._needs("request") else []
        names += ["b-fp32", "b-bf16"] if self._needs("batched") else []
        child = self._start(
            "speed.baselines:Baselines", self._subject, self._workload, "cpu", self._options.num_threads
        )

        def contender(name: str) -> Contender:
            num_tokens = self._workload.num_prompt_tokens
            return Contender(
                name, BASELINES[name], lambda: {name: [child.call("run", name, self._writer.ids(num_tokens))]}
            )

        return [contender(name) for name in names]

    def _gateway(self) -> Mapping[str, Sequence[float]]:
        replies = check(self._clients.call("ask", self._sizes.num_repeats))
        return {
            "gateway": [reply.wall_ms for reply in replies],
            "gateway-overhead": [reply.overhead_ms for reply in replies],
            "gateway-cached": [reply.cached_tokens for reply in replies],
        }

    def _engine_alone(self) -> Contender:
        settings = self._options.load_settings()
        engine = self._start(
            "speed.engine:EngineAlone",
            self._subject,
            "cpu",
            settings.dtype,
            settings.max_batch,
            self._options.num_threads,
        )

        def measure() -> dict[str, list[float]]:
            self._dtypes.add(engine.call("dtype"))
            prompts = [self._writer.ids(self._workload.num_prompt_tokens) for _ in range(self._sizes.num_repeats)]
            runs = [engine.call("request", ids, self._workload, self._writer.seed()) for ids in prompts]
            return {"engine": [run.wall_ms for run in runs]}

        return Contender("engine", "W in the engine alone", measure)

    def _linears(self, name: str, passes: list[Pass]) -> Contender:
        return Contender(
            name, LABELS[name][0], lambda: {name: self._ceiling.call("run", passes, self._sizes.num_repeats)}
        )

    def _keystrokes(self) -> Mapping[str, Sequence[float]]:
        """A long text is served, then a word is typed after it, letter by letter."""
        room = self._subject.n_ctx - self._workload.num_new_tokens
        text = self._writer.text(min(NUM_KEYSTROKE_TOKENS, room - NUM_KEYS))
        fields = {"max_tokens": room, "session": f"keys-{self._writer.seed()}"}
        bodies = [
            self._workload.body(text + typed, self._writer.seed(), **fields)
            for typed in ["", *self._writer.keystrokes(NUM_KEYS)]
        ]
        replies = check(self._clients.call("type", bodies))[1:]
        return {
            "keystroke": [reply.wall_ms for reply in replies],
            "keystroke-cached": [reply.cached_tokens for reply in replies],
        }

    def _crowd(self) -> Mapping[str, Sequence[float]]:
        crowd: Crowd = self._clients.call("crowd", NUM_CLIENTS, self._sizes.num_crowd_requests)
        num_tokens = sum(reply.num_tokens for reply in check(crowd.replies))
        return {
            "clients": [num_tokens / crowd.elapsed_s],
            "clients-cost": [crowd.client_cpu_s / crowd.elapsed_s / self._options.num_threads],
        }

    def _type(self) -> dict[str, list[float]]:
        """The document, word by word; every so often the ceiling has a turn."""
        num_words = min(12, self._num_words) if self._options.is_quick else self._num_words
        words = [*(self._words or self._writer.document(num_words))][:num_words]
        session = f"document-{self._writer.seed()}"
        bodies = [
            self._workload.body(" ".join(words[: index + 1]), self._writer.seed(), session=session)
            for index in range(len(words))
        ]
        samples: dict[str, list[float]] = {"document": [], "document-cached": [], "document-linears-steps": []}
        turns = range(0, len(bodies), WORDS_PER_TURN)
        with progress(self._console, f"A document of {len(words):,} words", len(turns)) as turn:
            for begin in turns:
                turn(f"word {begin + 1:,}")
                replies = check(self._clients.call("type", bodies[begin : begin + WORDS_PER_TURN]))
                samples["document"] += [reply.wall_ms for reply in replies]
                samples["document-cached"] += [reply.cached_tokens for reply in replies]
                samples["document-linears-steps"] += self._ceiling.call("run", self._workload.step_passes(), 1)
        return samples

    def _embedded(self) -> dict[str, list[float]]:
        """A server with the embedded checkpoint: how its worker starts, and W."""
        samples: dict[str, list[float]] = {}
        num_renewals = self._sizes.num_renewals if "start" in self._wanted else 0
        with self._stack, progress(self._console, "Embedded checkpoint", num_renewals + 2) as turn:
            turn("start")
            server = self._stack.enter_context(Server("embedded", self._options.server_settings))
            if "start" in self._wanted:
                samples["start"] = [server.first_start_s]
            for number in range(num_renewals):
                turn(f"start {number + 2}")
                samples["start"].append(server.renew_worker())
            turn("requests")
            if "embedded" in self._wanted:
                clients = self._clients_of(server, Subject.of(resolve("embedded")))
                num_times = self._options.num_rounds * self._sizes.num_repeats
                replies = check(clients.call("ask", 1 + num_times))[1:]
                samples["embedded"] = [reply.wall_ms for reply in replies]
        return samples

    def _clients_of(self, server: Server, subject: Subject) -> ContenderProcess:
        return self._start(
            "harness.clients:Clients", LOOPBACK, server.port, subject, self._workload, self._writer.seed(), {}
        )  # fmt: skip

    def _start(self, factory: str, *args: Any) -> ContenderProcess:
        """A child of this run; its process starts when it is first called."""
        return self._stack.enter_context(ContenderProcess(f"deploy.bench.{factory}", *args))
