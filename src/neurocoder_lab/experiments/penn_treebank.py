"""Penn Treebank (Table 1, Table 2, Figs 4 and 5 of Modular Networks): a GRU that chooses K of M modules at every word.

    neurocoder tune penn-treebank
    neurocoder run penn-treebank --method em --modules 15 --choices 1
    neurocoder sweep penn-treebank --seeds 3

Embeddings of 32, modules of 8 units, 128 streams of text, segments of 35 words. The paper is silent on the optimiser:
ours is Adam at a constant rate, chosen by validation perplexity for each method and K, of 5 modules, and for the
baseline; and on the state between segments: ours is carried, without a gradient. A data point is a segment of one
stream. An iteration is a gradient step; EM has an E-step, 10 samples, on what it learns next before every fifteenth.

Shapes: B streams, T words of a segment, N words, H units, K choices, M modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import log
from statistics import mean
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import neurocoder as nc
from neurocoder.functional import linear_cross_entropy
from neurocoder.modular.route import NoisyMixture, routed
from neurocoder.walk import evaluating
from neurocoder_lab import data, figures
from neurocoder_lab.contexts import CLASSES, look
from neurocoder_lab.data import segments, streams
from neurocoder_lab.errors import LabError
from neurocoder_lab.modules import BETWEEN, ENOUGH, METHODS, MIXED, Lesson, chosen, in_order, numbered, reached_by_all
from neurocoder_lab.papers import numbers
from neurocoder_lab.results import Runs, spread
from neurocoder_lab.task import Config, Experiment, Grid, Picture, Table, Task
from neurocoder_lab.tuning import best

Method = Literal["em", "reinforce", "topk", "fixed"]
Row = tuple[Method, int, int]  # method, M, K
ROWS: tuple[Row, ...] = (  # of Table 1
    ("em", 15, 1), ("em", 5, 1), ("em", 15, 3), ("em", 5, 3),
    ("reinforce", 15, 1), ("reinforce", 5, 1), ("reinforce", 15, 3), ("reinforce", 5, 3),
    ("topk", 15, 1), ("topk", 5, 1),
    ("fixed", 1, 1), ("fixed", 3, 3),
)  # fmt: skip
NAMES = METHODS | {"fixed": "baseline"}
EMBEDDING, UNITS, BATCH, STEPS = 32, 8, 128, 35
MEASURED = 32  # streams in which a text is measured: each starts without a state
ITERATIONS = {"smoke": 20, "desk": 3000, "paper": 50_000}
RATES, SLOW = (0.003, 0.01, 0.03), 0.0003  # of Adam, tried on held-out text; of budget paper, where those overfit
EVALUATIONS = 40  # of a run, so that Fig 4 shows noise; one costs as much as seven iterations
SHOWN, STAGES = 2, (0.0, 0.02, 0.1, 0.3)  # Fig 5: segments, and when, as shares of training; and at the end


@dataclass(frozen=True)
class PennTreebank(Config):
    """Words of Penn Treebank, predicted by a modular GRU."""

    method: Method = "em"
    """How modules are chosen and trained; fixed: always all of them."""
    modules: int = 15
    """M: modules there are."""
    choices: int = 1
    """K: modules used at every word."""
    iterations: int | None = None
    """Gradient steps."""
    m_steps: int = BETWEEN
    """Gradient steps between the E-steps of EM."""
    rate: float | None = None
    """Learning rate of Adam; by default as chosen on held-out text for the method and K; of budget paper 0.0003."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("iterations", "m_steps")
        self.check_positive("rate")
        if (self.method, self.modules, self.choices) not in ROWS:
            known = ", ".join(f"{choices} of {modules}" for name, modules, choices in ROWS if name == self.method)
            raise LabError(f"Table 1 has {self.method} with {known} modules, not {self.choices} of {self.modules}")
        if self.method != "em" and self.m_steps != BETWEEN:
            raise LabError(f"m_steps is for method em: {self.method} has no E-steps")


def fill(config: PennTreebank) -> dict[str, Any]:
    place = {"modules": 1, "choices": 1} if config.method == "fixed" else {"modules": 5, "choices": config.choices}
    rate = best("penn-treebank", "rate", method=config.method, **place) if config.budget != "paper" else SLOW
    return {"iterations": ITERATIONS[config.budget], "rate": rate or 0.01}


class WordModel(nn.Module):
    """From words to the log-likelihood of those that follow them, and the state after the last."""

    def __init__(self, words: int, method: Method, modules: int, choices: int):
        super().__init__()
        self.embedding = nn.Embedding(words, EMBEDDING)
        self.gru = nc.modular.GRU(
            EMBEDDING,
            UNITS,
            batch_first=True,
            modules=modules,
            choices=None if method == "fixed" else choices,
            activation="relu",
            dispatch="dense",
        )
        self.output = nn.Linear(UNITS, words)

    def forward(self, word_BT: Tensor, next_BT: Tensor, state_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Log-likelihood of each segment, (B,), and the state after it, (B, H)."""
        states_BTH, last = self.gru(self.embedding(word_BT), state_BH[None])
        return -linear_cross_entropy(states_BTH, self.output.weight, self.output.bias, next_BT).sum(1), last[0]


class Reader(Task):
    """Learns to predict the next word, segment after segment."""

    def __init__(self, config: PennTreebank):
        self.config, self.text = config, data.words("ptb")
        model = WordModel(len(self.text.vocabulary), config.method, config.modules, config.choices)
        optimiser = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
        super().__init__(model, optimiser, config.iterations, evaluate_every=max(config.iterations // EVALUATIONS, 10))
        self.fingerprint = self.text.fingerprint
        whole = [pair for pair in segments(streams(self.text.train, BATCH), STEPS) if pair[0].shape[1] == STEPS]
        if not whole:
            raise LabError(f"the training text is too short: it takes {BATCH * (STEPS + 1):,} words at least")
        self.segments = whole[: reached_by_all(len(whole), config.m_steps)]
        self.carried = torch.zeros(BATCH, UNITS)
        self.looks = config.method != "fixed" and config.choices == 1
        self.stages = {int(share * self.steps) for share in STAGES} if self.looks and config.modules == 5 else set()
        self.seen: list[Tensor] = []
        self.untrained = torch.zeros((), dtype=torch.float64)

    def attach(self, accelerator: Accelerator) -> None:
        super().attach(accelerator)
        method, size = self.config.method, BATCH * len(self.segments)
        self.lesson = None
        if method != "fixed":
            self.lesson = Lesson(method, self.network, self._keep, size, self.config.m_steps)

    def _keep(self, output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        """The log-likelihood of a segment; the state that the last forward ended in is kept to be carried on."""
        self.last = output[1].detach()
        return output[0]

    def step(self, index: int) -> dict[str, Tensor]:
        with torch.no_grad(), evaluating(self.model):
            if index in self.stages:
                self.seen.append(self._controller())
            if index == 0 and self.looks:
                self.untrained.fill_(self._look()["context_information"])
        place = index % len(self.segments)
        carried = self.carried if place else torch.zeros_like(self.carried)
        at = place * BATCH + torch.arange(BATCH)
        word, following, carried, at = self.share(*self.segments[place], carried, at)
        inputs = word, following, carried
        if self.lesson is None:
            loss = -self._keep(self.network(*inputs), following).mean()
        else:
            loss = self.lesson.loss(index, *[lambda: (inputs, following, at)] * 2)
        self.learn(loss)
        self.carried = torch.as_tensor(self.accelerator.gather(self.last)).cpu()
        return {"loss": loss}

    def evaluate(self) -> dict[str, float]:
        measured = {"validation_perplexity": self.perplexity(self.text.validation)}
        if self.lesson is None:
            return measured
        with self.mixing(), nc.trace(self.model) as seen:
            self._forward(*self._batch())
        return measured | chosen(seen)

    def conclude(self) -> dict[str, Any]:
        ending: dict[str, Any] = {"test_perplexity": self.perplexity(self.text.test)}
        if self.config.method == "topk":
            ending["test_perplexity_single"] = self.perplexity(self.text.test, alone=True)
        if self.lesson is not None:
            ending |= self.lesson.reached(self.steps, BATCH)
        if self.looks:
            ending |= self._look() | {"context_information_untrained": self.untrained.item()}
        if self.stages:
            stages = [*self.seen, self._controller()]
            at = [*sorted(self.stages), self.steps]
            ending["controller"] = [
                {"step": step, "probability": [[round(p, 2) for p in row] for row in stage.tolist()]}
                for step, stage in zip(at, stages, strict=True)
            ]
        return ending

    def mixing(self, alone: bool = False) -> AbstractContextManager:
        """What is measured: the most likely modules; of noisy top-k, unless alone, the mixture it was trained as."""
        mixes = self.config.method == "topk" and not alone
        return routed(self.model, NoisyMixture(MIXED, 0.0)) if mixes else nullcontext()

    def perplexity(self, text_N: Tensor, alone: bool = False) -> float:
        """Of a text, read in several streams at once."""
        text_BL = streams(text_N, MEASURED)
        with self.mixing(alone):
            total = sum(score_B.double().sum() for score_B in self._read(text_BL))
        return torch.exp(-total / text_BL[:, 1:].numel()).item()

    def _read(self, text_BL: Tensor) -> Iterator[Tensor]:
        """The log-likelihoods of one segment after the other, the state carried between them."""
        state = torch.zeros(len(text_BL), UNITS)
        for word, following in segments(text_BL, STEPS):
            score_B, state = self._forward(word, following, state)
            yield score_B

    def _forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(*(tensor.to(self.accelerator.device) for tensor in inputs))

    def _batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """The batch of held-out text whose choices are looked at during training."""
        word, following = next(segments(streams(self.text.validation, BATCH), STEPS))
        return word, following, torch.zeros(BATCH, UNITS)

    def _controller(self) -> Tensor:
        """The distribution over modules at the words of a few segments, (N, M)."""
        with self.mixing(), nc.trace(self.model) as seen:
            self._forward(*(tensor[:SHOWN] for tensor in self._batch()))
        return seen.stacked("gru.candidate").probability[:, :, 0].transpose(0, 1).flatten(0, 1).cpu()

    def _look(self) -> dict[str, Any]:
        text = self.text
        return look(self._most_likely(text.test), streams(text.test, MEASURED), text.vocabulary)

    def _most_likely(self, text_N: Tensor) -> Tensor:
        """The most likely module at every word of a text but the last of each stream, (streams, length - 1)."""
        likely, reading = [], self._read(streams(text_N, MEASURED))
        while True:
            with nc.trace(self.model) as seen, self.mixing():
                if next(reading, None) is None:
                    return torch.cat(likely, 1)
            likely.append(seen.stacked("gru.candidate").probability[:, :, 0].argmax(-1).t().cpu())

    def state(self) -> dict[str, Tensor]:
        kept = {"carried": self.carried, "untrained": self.untrained} | numbered("seen", self.seen)
        return kept if self.lesson is None else kept | self.lesson.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.carried, self.untrained = state["carried"], state["untrained"]
        self.seen = in_order("seen", state)
        if self.lesson is not None:
            self.lesson.load_state(state)


def _settings(row: Row) -> dict[str, Any]:
    return dict(zip(("method", "modules", "choices"), row, strict=True))


def _called(row: Row) -> str:
    method, modules, choices = row
    return f"{NAMES[method]}, {choices} of {modules}" if method != "fixed" else f"{NAMES[method]}, {modules}"


def tabulate(runs: Runs) -> list[Table]:
    """Tables 1 and 2, collapse, and what the modules tell about the words."""
    paper = numbers("mn-ptb-baseline")
    ran = {row: mine for row in ROWS if (mine := runs.where(**_settings(row)))}
    table_1, collapse, told = [], [], []
    for (method, modules, choices), mine in ran.items():
        name = f"baseline {modules}" if method == "fixed" else f"{method} {choices}/{modules}"
        ended = [mine.values(f"{part}_perplexity") for part in ("test", "validation")]
        iterations, rates = (sorted({run["config"][name] for run in mine}) for name in ("iterations", "rate"))
        steps, rates = " and ".join(map("{:,}".format, iterations)), " and ".join(map("{:g}".format, rates))
        table_1.append([
            NAMES[method], str(modules), str(choices), *map(spread, (*ended, mine.lowest("validation_perplexity"))),
            f"{paper[name]:.1f}", steps, rates, f"{mine[0]['final']['parameters']:,}",
        ])  # fmt: skip
        called = _called((method, modules, choices))
        if method != "fixed":
            entropy = [spread(mine.values(name), 3) for name in ("h_a", "h_b", "modules_used")]
            single, visits = spread(mine.values("test_perplexity_single")), mine.values("e_steps")
            reached = f"{visits[0]:.2g}" if visits else "-"
            collapse.append([called, *entropy, f"{choices * log(modules):.3f}", reached, single])
        if mine.values("context_information"):
            shares = [mine.values(f"context_information{ending}") for ending in ("", "_untrained", "_shuffled")]
            told.append([called, *(spread(values, 3) for values in shares)])
    tables: list[Table] = []
    if table_1:
        header = ["training", "M", "K", "test", "validation", "its lowest", "paper", "iterations", "rate", "parameters"]
        title, visits = "Table 1: perplexity on Penn Treebank", runs.values("e_steps")
        if visits:
            title += f"; a segment had {mean(visits):.2g} E-steps of EM, a verdict takes {ENOUGH}"
        tables.append((title, header, table_1))
    if collapse:
        header = ["training", "H_a", "H_b", "modules used", "most H_b can be", "E-steps a segment", "by one module"]
        title = (
            "Collapse, no regulariser: entropies (nats), modules most likely for 1% of words, test perplexity by one"
        )
        tables.append((title, header, collapse))
    if told:
        header = ["training", "told", "told before training", "shuffled"]
        title = f"What a module tells of the class of its word ({', '.join(CLASSES)}): share of the class's entropy"
        tables.append((title, header, told))
    for row in (("em", 15, 1), ("em", 5, 1)):
        for run in ran.get(row, Runs())[:1]:
            title = f"Table 2: what the modules are invoked on, {_called(row)} (test, seed {run['config']['seed']})"
            header = ["module", "words, %", "of these, %", "most frequent", "in context: before [word] after"]
            tables.append((title, header, [[str(cell) for cell in line] for line in run["final"]["invoked_on"]]))
    return tables


def draw(runs: Runs) -> list[Picture]:
    """Validation perplexity, Figs 4 and 5."""
    pictures = []
    for modules in (15, 5):
        rows: list[Row] = [("fixed", 1, 1), *((method, modules, 1) for method in ("em", "reinforce", "topk"))]
        named = {_called(row): _settings(row) for row in rows}
        perplexity, h_a, h_b = (runs.curves(metric, named) for metric in ("validation_perplexity", "h_a", "h_b"))
        if perplexity:
            title = f"Validation perplexity, 1 of {modules} modules and the baseline of one, mean ± std over seeds"
            pictures.append((title, figures.curves(perplexity, "validation perplexity", over="iterations")))
        if h_a:
            title = f"Fig 4, 1 of {modules} modules: entropies on a batch of held-out text, mean ± std over seeds"
            parts = {"H_a, nats (certain: 0)": h_a, f"H_b, nats (all used: {log(modules):.2f})": h_b}
            pictures.append((title, figures.panels(parts, over="iterations", skip=1)))
    for row in ROWS:
        for run in runs.where(**_settings(row))[:1] if row[1:] == (5, 1) else ():
            title = f"Fig 5, {_called(row)}: the controller's distribution at the words of two segments"
            stages = {f"{stage['step']:,} iterations": stage["probability"] for stage in run["final"]["controller"]}
            pictures.append((title, figures.distributions(stages)))
    return pictures


def _tried(iterations: int, rates: tuple[float, ...], modules: int, choices: int, *methods: Method) -> Grid:
    at = {"method": methods, "modules": (modules,), "choices": (choices,)}
    return Grid(at, lambda place: {"rate": rates}, {"iterations": iterations}, "validation_perplexity", lower=True)


EXPERIMENT = Experiment(
    name="penn-treebank",
    config=PennTreebank,
    metrics=(
        "steps", "parameters", "loss", "validation_perplexity", "test_perplexity", "test_perplexity_single", "h_a",
        "h_b", "modules_used", "e_steps", "context_information", "context_information_untrained",
        "context_information_shuffled",
    ),
    axes={"method": (*METHODS, "fixed"), "modules": (1, 3, 5, 15), "choices": (1, 3)},
    fill=fill,
    start=Reader,
    figures=draw,
    tables=tabulate,
    grids=[
        # where 0.03 is best after 1,500 iterations it need not be after the desk's 3,000
        _tried(3000, RATES, 1, 1, "fixed"), _tried(3000, RATES[1:], 5, 1, "em", "reinforce"),
        _tried(1500, RATES, 5, 1, "topk"), _tried(1500, RATES, 5, 3, "em", "reinforce"),
    ],
)  # fmt: skip
