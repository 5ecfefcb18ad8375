"""The traffic of every benchmark: what is asked, when, and for how many tokens. The same seed gives the same traffic.

It knows neither server nor tokenizer: a prompt is made of common English words, each about one token, and the tokens
are counted later, from the server's `usage`.

    WorkloadConfig -> batch | closed_loop | realistic | closed_mix -> Workload of Conversations -> messages of each turn
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

WORDS = """air animal answer apple area arm art back ball bank base bed bird blood blue board boat body book box boy
bread bridge brother building business car case cat cause chair change child church circle city class clock cloud coat
cold colour company control corn cost country course cover cross cup day deal depth design doctor dog door dream earth
east edge effect egg end energy engine event eye face fact family farm father field fire fish flat floor flower food
foot forest form friend fruit game glass gold government grass green ground group hair hand head heart heat hill
history home horse hospital hour house ice idea image industry iron job key kind king lake land language law leaf
letter level library light line lion list machine man map market matter meal meat metal milk mind minute model money
month moon mother mouth music name nation nature night noise north note number ocean office oil order page paper park
part peace people picture piece place plan plant plate point power price problem question radio rain reason record red
rice ring river road rock room root rose rule salt sand school science sea season seat seed shape ship shirt shop size
skin sky sleep snow soil song sound soup south space spring square stage star state station stone store storm story
stream street string sugar summer sun system table tail teacher team test thing thought time tooth tower town trade
train travel tree trip truth unit value voice wall war water wave way weather week weight west wheel wind window wine
winter woman wood word work world writer year""".split()  # noqa: SIM905

SIGMA = 0.6  # of the logarithm of lengths in realistic traffic: one in six is longer than 1.8 times the median
CLIP = 4  # and none is longer than this times the median, or shorter than the median divided by it
TURNS = (2, 4)  # of a multi-turn conversation, fewest and most


@dataclass(frozen=True)
class WorkloadConfig:
    """How much traffic, and of what kind. Raises ValueError, one line, for a number that makes no sense.

    requests       requests of each load; a closed loop sends at least two a client
    concurrency    clients of the closed loops, one loop each
    prompt_tokens  length of each prompt; the median in realistic traffic
    output_tokens  length of each answer; the median in realistic traffic
    rate           conversations that begin a second, on average; their later turns come on top
    shared_prefix  share of the conversations that begin with one common system prompt
    system_tokens  length of that prompt
    multi_turn     share of the conversations that have more than one turn
    think_time     seconds between an answer and the next turn, on average
    """

    requests: int = 32
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prompt_tokens: int = 128
    output_tokens: int = 64
    rate: float = 2.0
    shared_prefix: float = 0.5
    system_tokens: int = 128
    multi_turn: float = 0.3
    think_time: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens", "system_tokens"):
            _check(name, getattr(self, name) >= 1, "must be at least 1")
        _check("concurrency", bool(self.concurrency) and min(self.concurrency) >= 1, "needs numbers of at least 1")
        _check("rate", 0 < self.rate < math.inf, "must be above 0 conversations per second")
        _check("think_time", 0 <= self.think_time < math.inf, "must be at least 0 seconds")
        for name in ("shared_prefix", "multi_turn"):
            _check(name, 0 <= getattr(self, name) <= 1, "is a share: between 0 and 1")


def _check(name: str, right: bool, rule: str) -> None:
    if not right:
        raise ValueError(f"{name.replace('_', '-')} {rule}")


@dataclass(frozen=True)
class Turn:
    """One request: what the user says, how many tokens are wanted, and how long the user thinks first [s]."""

    prompt: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """Turns that follow each other, the first of them `arrival_s` seconds after the workload begins."""

    turns: tuple[Turn, ...]
    arrival_s: float = 0.0
    system: str | None = None

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The messages of the turn that comes after these answers: all that was said, and then its prompt."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn.prompt})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": self.turns[len(answers)].prompt}]


@dataclass(frozen=True)
class Workload:
    """Conversations to send, at most `concurrency` of them at the same time (None: as they arrive)."""

    load: str
    conversations: tuple[Conversation, ...]
    concurrency: int | None = None
    rate: float | None = None

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    def names(self) -> dict[str, str | int | float]:
        """What tells this workload from the others of a benchmark."""
        details = {"concurrency": self.concurrency, "rate": self.rate}
        return {"load": self.load, **{name: value for name, value in details.items() if value is not None}}


def batch(config: WorkloadConfig) -> Workload:
    """All requests at once."""
    return Workload("batch", _fixed(config, config.requests, "batch"))


def closed_loop(config: WorkloadConfig, concurrency: int) -> Workload:
    """`concurrency` clients, each of which sends its next request as soon as it has the answer to the last."""
    requests = max(config.requests, 2 * concurrency)
    return Workload("closed", _fixed(config, requests, f"closed {concurrency}"), concurrency)


def warm_up(config: WorkloadConfig, requests: int) -> Workload:
    """Requests that aren't counted, one after the other. No measured prompt begins like one of them."""
    return Workload("warm-up", _fixed(config, requests, "warm-up"), 1)


def realistic(config: WorkloadConfig) -> Workload:
    """Poisson arrivals, log-normal lengths, some conversations with a common system prompt, some with several turns."""
    return Workload("realistic", _mixed(config, "realistic"), rate=config.rate)


def closed_mix(config: WorkloadConfig, concurrency: int) -> Workload:
    """The conversations of realistic traffic in a closed loop: `concurrency` users who never think."""
    config = replace(config, requests=max(config.requests, 3 * concurrency), think_time=0.0)
    conversations = _mixed(config, f"closed {concurrency}")
    return Workload("closed", tuple(replace(each, arrival_s=0.0) for each in conversations), concurrency)


def _mixed(config: WorkloadConfig, purpose: str) -> tuple[Conversation, ...]:
    arrivals, kinds, lengths, text, think = (
        _random(config, f"{purpose} {what}") for what in ("arrivals", "kinds", "lengths", "text", "think time")
    )
    system = _words(_random(config, "system prompt"), config.system_tokens)
    conversations: list[Conversation] = []
    left, arrival_s = config.requests, 0.0
    while left > 0:
        several = kinds.random() < config.multi_turn
        turns = [
            Turn(
                prompt=_words(text, _log_normal(lengths, config.prompt_tokens)),
                max_tokens=_log_normal(lengths, config.output_tokens),
                think_s=think.expovariate(1) * config.think_time if turn > 0 else 0.0,
            )
            for turn in range(min(left, kinds.randint(*TURNS) if several else 1))
        ]
        shared = kinds.random() < config.shared_prefix
        conversations.append(Conversation(tuple(turns), arrival_s, system if shared else None))
        left -= len(turns)
        arrival_s += arrivals.expovariate(config.rate)  # the gaps of a Poisson process are exponential
    return tuple(conversations)


def _random(config: WorkloadConfig, purpose: str) -> random.Random:
    """A stream of its own for each purpose: another rate leaves the prompts as they were, and no load repeats another's
    prompts, which a prefix cache would have kept."""
    return random.Random(f"{config.seed} {purpose}")


def _fixed(config: WorkloadConfig, requests: int, purpose: str) -> tuple[Conversation, ...]:
    text = _random(config, purpose)
    return tuple(
        Conversation((Turn(_words(text, config.prompt_tokens), config.output_tokens),)) for _ in range(requests)
    )


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _log_normal(rng: random.Random, median: int) -> int:
    length = rng.lognormvariate(math.log(median), SIGMA)
    return max(1, round(min(max(length, median / CLIP), median * CLIP)))
