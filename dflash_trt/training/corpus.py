"""The demo pair's corpus: templated operations logs, manifests and fleet files, from a seed.

A document opens with a header that draws its names at random (jobs and their tier, crew, city,
load, first and last id); its records then walk through the header's lists in order, restate the
names in forms chosen by the tier, and count the id up until the last one. So nearly all of a
record follows from what stands before it, and nothing can loop: the id moves on. What stays
random after the header is the load (usually unchanged) and the outcome (usually "ok").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

TRAIN_STREAM = "train"
HELD_OUT_STREAM = "held-out"

ADJECTIVES = "red old big new dry raw hot low wet odd shy icy fit sad mad tan".split()
NOUNS = "fox owl elk cat bee ant hen ram cod eel yak bat emu jay gnu pug".split()
PEOPLE = "ana ben eva ian kim leo max zoe".split()
CITIES = "oslo lima rome bern kyiv riga".split()
TIERS = ("gold", "silver", "bronze")
OUTCOMES = ("ok", "late", "lost")
OUTCOME_WEIGHTS = (88, 8, 4)
LOAD_KEPT = 0.8


@dataclass(frozen=True, slots=True)
class CorpusJob:
    """One entry of a header's list."""

    name: str
    tier: str


@dataclass(frozen=True, slots=True)
class Record:
    """What one record says; `following` and `following_owner` belong to the next id."""

    number: int
    job: CorpusJob
    owner: str
    city: str
    load: int
    outcome: str
    following: CorpusJob
    following_owner: str

    @property
    def tag(self) -> str:
        return f"#{self.number:04d}"

    @property
    def next_tag(self) -> str:
        return f"#{self.number + 1:04d}"


def _log_record(r: Record) -> str:
    work = {
        "gold": f"{r.owner} tests {r.job.name} in {r.city} before {r.tag} runs",
        "silver": f"{r.tag} runs and {r.owner} tests {r.job.name}",
        "bronze": f"{r.tag} runs in {r.city} without {r.owner}",
    }[r.job.tier]
    end = {
        "ok": f"{r.job.name} {r.tag} is ok in {r.city}",
        "late": f"{r.job.name} {r.tag} is late so {r.owner} calls {r.city}",
        "lost": f"{r.job.name} {r.tag} is lost so {r.owner} stops {r.job.name}",
    }[r.outcome]
    return (
        f"{r.tag} {r.owner} runs {r.job.name} at load {r.load}\n"
        f"- {r.job.name} is {r.job.tier}: {work}\n"
        f"- {end}, then {r.next_tag} {r.following_owner} runs {r.following.name}\n"
    )


def _manifest_record(r: Record) -> str:
    care = {
        "gold": f"packed by {r.owner} as {r.tag} for {r.city}, {r.owner} calls {r.city}",
        "silver": f"packed by {r.owner} as {r.tag} for {r.city}",
        "bronze": f"open, {r.owner} stops at {r.tag}",
    }[r.job.tier]
    end = {
        "ok": f"{r.owner} took {r.tag} to {r.city} ok",
        "late": f"{r.owner} took {r.tag} to {r.city} late",
        "lost": f"{r.owner} lost {r.tag} before {r.city}",
    }[r.outcome]
    return (
        f"parcel {r.tag} holds {r.job.name}, {r.job.tier}, load {r.load}\n"
        f"- {r.job.name} {care}\n"
        f"- {end}, {r.job.name} load {r.load}\n"
        f"- then {r.next_tag} {r.following_owner} took {r.following.name}\n"
    )


def _fleet_record(r: Record) -> str:
    mirror = {
        "gold": f"{r.following.name} and {r.city} for {r.tag}",
        "silver": f"{r.following.name} for {r.tag}",
        "bronze": f"lost {r.tag}",
    }[r.job.tier]
    end = {
        "ok": "ok",
        "late": f"late, {r.owner} calls {r.city}",
        "lost": f"lost, {r.owner} stops {r.tag}",
    }[r.outcome]
    return (
        f"host {r.tag}:\n"
        f"- name: {r.job.name} {r.tag}\n"
        f"- owner: {r.owner} in {r.city}, {r.job.tier} load {r.load}\n"
        f"- mirror: {mirror}\n"
        f"- state: {r.job.name} {r.tag} is {end}\n"
        f"- then: {r.next_tag} {r.following.name} owner {r.following_owner}\n"
    )


@dataclass(frozen=True, slots=True)
class Genre:
    """One kind of document: what its header and its records look like."""

    title: str
    jobs: str
    crew: str
    record: Callable[[Record], str]


GENRES = (
    Genre("shift", "jobs", "crew", _log_record),
    Genre("route", "parcels", "drivers", _manifest_record),
    Genre("fleet", "hosts", "owners", _fleet_record),
)


def _stream(seed: int, stream: str, index: int) -> Random:
    """A generator of its own for every document, so that document i never depends on i-1."""
    return Random(f"{seed}/{stream}/{index}")


def document(seed: int, stream: str, index: int) -> str:
    """Document `index` of a stream: header and 10 to 16 records, without the end token."""
    rng = _stream(seed, stream, index)
    genre = rng.choice(GENRES)
    count = rng.randint(10, 16)
    first = rng.randint(1000, 9999 - count)
    city = rng.choice(CITIES)
    nouns = rng.sample(NOUNS, rng.randint(3, 4))
    names = zip(rng.sample(ADJECTIVES, len(nouns)), nouns, strict=True)
    jobs = [CorpusJob(f"{adjective} {noun}", rng.choice(TIERS)) for adjective, noun in names]
    crew = rng.sample(PEOPLE, rng.randint(2, 4))
    load = rng.randint(1, 9)
    parts = [
        f"{genre.title} #{first:04d} to #{first + count - 1:04d} in {city} at load {load}\n",
        f"{genre.jobs}: {', '.join(f'{job.name} {job.tier}' for job in jobs)}\n",
        f"{genre.crew}: {', '.join(crew)}\n",
    ]
    for i in range(count):
        if rng.random() > LOAD_KEPT:
            load = rng.randint(1, 9)
        parts.append(
            genre.record(
                Record(
                    number=first + i,
                    job=jobs[i % len(jobs)],
                    owner=crew[i % len(crew)],
                    city=city,
                    load=load,
                    outcome=rng.choices(OUTCOMES, OUTCOME_WEIGHTS)[0],
                    following=jobs[(i + 1) % len(jobs)],
                    following_owner=crew[(i + 1) % len(crew)],
                )
            )
        )
    return "".join(parts)


def documents(seed: int, stream: str, count: int) -> Iterator[str]:
    """The first `count` documents of a stream."""
    return (document(seed, stream, index) for index in range(count))
