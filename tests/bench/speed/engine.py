"""`engine`: measures every row, and what it is compared with, in one run on a CPU. GPUs are measured by `gpu`.

Decides which contenders run and in which order. Does not know how a request is sent, a kernel is called or a table is
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.tuning.load.clients import LOOPBACK, Clients, LoadResult
from deploy.tuning.load.run import progress
from deploy.tuning.load.workload import PromptGenerator
from tests.bench.results import err
from tests.bench.rounds import Contender, Results, Series, interleave, raise_for_status
from tests.bench.run import BenchDocument, Options
from tests.bench.server import MeasuredServer
from tests.bench.speed.contenders import (
    BASELINES,
    Contenders,
    LinearPass,
    decode_passes,
    linear_layers,
    linear_passes,
)
from tests.bench.speed.rows import NUM_CLIENTS, NUM_WORDS, rows
from workers.checkpoints.resolve import resolve

NUM_KEYSTROKE_TOKENS = 512
NUM_KEYS = 4  # letters typed after each long prompt
WORDS_PER_TURN = 25  # typed between two measurements of the ceiling

# Series: label, unit.
LABELS = {
    **{name: (label, "ms") for name, label in BASELINES.items()},
    "gateway": ("Tercet: W through the gateway, cold", "ms"),
    "gateway-overhead": ("Tercet: gateway, HTTP and client overhead of W", "ms"),
    "gateway-cached": ("Tercet: prefix-cache hit of W", "tokens"),
    "engine": ("Tercet: W in the engine alone, cold", "ms"),
    "linears-request": ("ceiling: linear layers of W", "ms"),
    "linears-steps": ("ceiling: linear layers of 19 decode steps", "ms"),
    "linears-crowd": ("ceiling: linear layers of 16 concurrent W", "ms"),
    "keystroke": ("Tercet: next keystroke, 512-token context", "ms"),
    "keystroke-cached": ("Tercet: prefix-cache hit of a keystroke", "tokens"),
    "document": ("Tercet: next word of a document", "ms"),
    "document-cached": ("Tercet: prefix-cache hit of a document's word", "tokens"),
    "document-linears-steps": ("ceiling: the same, measured during the document", "ms"),
    "clients": ("Tercet: 16 closed-loop clients", "tokens/s"),
    "start": ("Tercet: worker from fork to warm, embedded", "s"),
    "embedded": ("Tercet: W through the gateway, cold, embedded", "ms"),
    "predict": ("Tercet: the same by the strategy predict", "ms"),
}

NOTES = [
    "W: a 64-token prompt and three branches of 20 new tokens: one prefill, then 19 decode steps of three rows.",
    "Cold: every prompt is new and misses the prefix cache; the series gateway-cached counts hits that happen anyway.",
    "Linear layers of W: one pass over the prompt with the head on its last position, then 19 passes of three rows.",
    "Each linear layer runs the kernel of torch that is fastest for its number of rows, with weights of its own.",
    "Baselines are timed without tokenization and HTTP; Tercet through the gateway is timed with both.",
    "Engine time: queue + prefill + decode of a request's slowest sentence, as the response reports it.",
    "Keystroke: a word typed letter by letter after a text of 512 tokens that was served before; through the gateway.",
]


class EngineBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, wanted: Sequence[str]) -> None:
        """
        Args:
            wanted: names of rows.
        """
        self._options = options
        self._wanted = wanted
        # Repeats per turn of what takes less than a second, requests of each client, renewals of the timed worker.
        self._num_repeats, self._num_client_requests, self._num_renewals = (1, 1, 0) if options.is_quick else (3, 2, 4)
        self._workload = options.workload
        self._subject = options.subject()
        self._prompts = PromptGenerator(self._subject, options.seed)
        self._is_small = False
        self._dtypes: set[str] = set()  # in effect
        self._contenders = Contenders(options)

    def run(self, document: BenchDocument) -> None:
        with self._contenders:
            results = self._measure(document)
        if self._needs("start", "embedded", "predict"):
            results.add("embedded", self._measure_embedded)
        document.series |= {name: Series.of(*LABELS[name], values) for name, values in results.samples.items()}
        document.rows, document.not_measured = rows(self._wanted, results, self._workload, is_small=self._is_small)
        document.settings["dtype in effect"] = ", ".join(sorted(self._dtypes)) or "unknown"
        document.notes += NOTES

    def _measure(self, document: BenchDocument) -> Results:
        sequences = self._linear_sequences()
        self._start_ceiling(document, [found for passes in sequences.values() for found in passes])
        contenders = self._start_contenders() + [
            linear_layers(self._ceiling, name, LABELS[name][0], passes, self._num_repeats)
            for name, passes in sequences.items()
        ]
        results = interleave(contenders, self._options.num_rounds)
        if self._needs("document"):
            results.add("document", self._measure_document)
        return results

    def _needs(self, *rows: str) -> bool:
        return not {*rows}.isdisjoint(self._wanted)

    def _start_ceiling(self, document: BenchDocument, passes: Sequence[LinearPass]) -> None:
        self._ceiling, figures = self._contenders.start_ceiling(self._subject, passes)
        shape = self._ceiling.call("shape")
        self._is_small = bool(shape["is_small"])
        document.ceiling = {
            "num_threads": self._options.num_threads,
            "num_weights": shape["num_weights"],
            "int8_step_at_read_bandwidth_ms": shape["num_weights"] / figures["read_gb_s"] / 1e6,
            **figures,
        }

    def _linear_sequences(self) -> dict[str, list[LinearPass]]:
        """The linear layers to measure, by series."""
        workload = self._workload
        sequences = {}
        if self._needs("engine"):
            sequences["linears-request"] = linear_passes(workload)
        if self._needs("keystroke", "document"):
            sequences["linears-steps"] = decode_passes(workload)
        if self._needs("clients"):
            sequences["linears-crowd"] = linear_passes(workload, NUM_CLIENTS)
        return sequences

    def _start_contenders(self) -> list[Contender]:
        """The baselines and Tercet's contenders that a wanted row needs."""
        contenders = []
        baselines = ["a"] if self._needs("request") else []
        baselines += ["b-fp32", "b-bf16"] if self._needs("batched") else []
        if baselines:
            contenders += self._contenders.start_baselines(baselines, self._subject, self._prompts)
        if self._needs("request", "batched", "overhead", "keystroke", "document", "clients"):
            server = self._contenders.start_server(self._options.models)
            self._clients = self._contenders.start_clients((LOOPBACK, server.port), self._subject, self._prompts.seed())
            self._dtypes.add(server.slots()[0]["dtype"])
        if self._needs("request", "batched", "overhead"):
            contenders.append(Contender("gateway", "W through the gateway", self._measure_gateway))
        if self._needs("engine"):
            contenders.append(self._start_engine())
        if self._needs("keystroke"):
            contenders.append(Contender("keystroke", "keystrokes", self._measure_keystrokes))
        if self._needs("clients"):
            contenders.append(Contender("clients", f"{NUM_CLIENTS} clients", self._measure_clients))
        return contenders

    def _start_engine(self) -> Contender:
        settings = self._options.load_settings()
        engine = self._contenders.start_process(
            "tests.bench.speed.engine_alone:EngineAlone",
            self._subject,
            "cpu",
            settings.model.dtype,
            settings.pool.max_batch,
            self._options.num_threads,
        )

        def measure() -> dict[str, list[float]]:
            self._dtypes.add(engine.call("dtype"))
            prompts = [self._prompts.ids(self._workload.num_prompt_tokens) for _ in range(self._num_repeats)]
            return {"engine": [engine.call("run", ids, self._workload, self._prompts.seed()) for ids in prompts]}

        return Contender("engine", "W in the engine alone", measure)

    def _measure_gateway(self) -> Mapping[str, Sequence[float]]:
        replies = raise_for_status(self._clients.call("send_new", self._num_repeats))
        return {
            "gateway": [reply.wall_ms for reply in replies],
            "gateway-overhead": [reply.wall_ms - reply.engine_ms for reply in replies],
            "gateway-cached": [reply.cached_tokens for reply in replies],
        }

    def _measure_keystrokes(self) -> Mapping[str, Sequence[float]]:
        """A long text is served; then a word is typed after it, letter by letter, and timed."""
        max_tokens = self._subject.n_ctx - self._workload.num_new_tokens
        text = self._prompts.text(min(NUM_KEYSTROKE_TOKENS, max_tokens - NUM_KEYS))
        fields = {"max_tokens": max_tokens, "session": f"keys-{self._prompts.seed()}"}
        word = self._prompts.word(NUM_KEYS)
        typed = ["", *(word[: 2 + index] for index in range(NUM_KEYS))]
        bodies = [self._workload.body(text + each, self._prompts.seed(), **fields) for each in typed]
        replies = raise_for_status(self._clients.call("send", bodies))[1:]
        return {
            "keystroke": [reply.wall_ms for reply in replies],
            "keystroke-cached": [reply.cached_tokens for reply in replies],
        }

    def _measure_clients(self) -> Mapping[str, Sequence[float]]:
        load: LoadResult = self._clients.call("send_concurrently", NUM_CLIENTS, self._num_client_requests)
        num_tokens = sum(reply.num_tokens for reply in raise_for_status(load.replies))
        return {"clients": [num_tokens / load.elapsed_s]}

    def _measure_document(self) -> dict[str, list[float]]:
        """A request after each word of the document; the ceiling is measured every `WORDS_PER_TURN` words."""
        words = self._prompts.document(12 if self._options.is_quick else NUM_WORDS)
        session = f"document-{self._prompts.seed()}"
        bodies = [
            self._workload.body(" ".join(words[: index + 1]), self._prompts.seed(), session=session)
            for index in range(len(words))
        ]
        samples: dict[str, list[float]] = {"document": [], "document-cached": [], "document-linears-steps": []}
        turns = range(0, len(bodies), WORDS_PER_TURN)
        with progress(err, f"A document of {len(words):,} words", len(turns)) as turn:
            for begin in turns:
                turn(f"word {begin + 1:,}")
                replies = raise_for_status(self._clients.call("send", bodies[begin : begin + WORDS_PER_TURN]))
                samples["document"] += [reply.wall_ms for reply in replies]
                samples["document-cached"] += [reply.cached_tokens for reply in replies]
                samples["document-linears-steps"] += self._ceiling.call("run", decode_passes(self._workload), 1)
        return samples

    def _measure_embedded(self) -> dict[str, list[float]]:
        """A server with the embedded checkpoint: its worker's start, and W by both strategies in turns.

        Runs after the other contenders ended.
        """
        samples: dict[str, list[float]] = {}
        num_renewals = self._num_renewals if "start" in self._wanted else 0
        with Contenders(self._options) as contenders:
            server = contenders.start_server("embedded")
            if "start" in self._wanted:
                samples["start"] = [server.first_start_s]
            with progress(err, "Worker starts", num_renewals) as turn:
                for number in range(num_renewals):
                    turn(f"start {number + 2}")
                    samples["start"].append(server.renew_worker())
            if self._needs("embedded", "predict"):
                samples |= self._measure_strategies(server)
        return samples

    def _measure_strategies(self, server: MeasuredServer) -> dict[str, list[float]]:
        """Milliseconds of W with the embedded checkpoint, by row; every prompt is new."""
        strategies = {"embedded": "sample", "predict": "predict"}
        subject, seed = resolve("embedded"), self._prompts.seed()
        clients = {
            row: Clients(LOOPBACK, server.port, subject, self._workload, seed + number, strategy=strategy)
            for number, (row, strategy) in enumerate(strategies.items())
            if self._needs(row, "predict")
        }
        samples: dict[str, list[float]] = {row: [] for row in clients}
        for number in range(1 + self._options.num_rounds * self._num_repeats):
            for row, client in clients.items():
                [reply] = raise_for_status(client.send_new(1))
                if number > 0:  # the first is a warm-up
                    samples[row].append(reply.wall_ms)
        return samples
