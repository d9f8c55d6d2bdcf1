"""The demo pair's corpus: templated operations logs, manifests and fleet files, from a seed.

A header draws names at random: jobs and their tiers, crew, city, load, first and last id. Records
take them in turn, in forms chosen by the tier, and count the id up. So nearly all of a record
follows from the text before it, and no text repeats itself. Only the load (usually kept) and the
outcome (usually "ok") stay random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
class Genre:
    """One kind of document: the words of its header, and the forms of its records.

    A record's {care} takes the form of its job's tier, its {end} that of its outcome.
    """

    title: str
    jobs: str
    crew: str
    care: Mapping[str, str]
    end: Mapping[str, str]
    record: str


GENRES = (
    Genre(
        title="shift",
        jobs="jobs",
        crew="crew",
        care={
            "gold": "{owner} tests {job} in {city} before {tag} runs",
            "silver": "{tag} runs and {owner} tests {job}",
            "bronze": "{tag} runs in {city} without {owner}",
        },
        end={
            "ok": "{job} {tag} is ok in {city}",
            "late": "{job} {tag} is late so {owner} calls {city}",
            "lost": "{job} {tag} is lost so {owner} stops {job}",
        },
        record="""\
{tag} {owner} runs {job} at load {load}
- {job} is {tier}: {care}
- {end}, then {next_tag} {next_owner} runs {next_job}
""",
    ),
    Genre(
        title="route",
        jobs="parcels",
        crew="drivers",
        care={
            "gold": "packed by {owner} as {tag} for {city}, {owner} calls {city}",
            "silver": "packed by {owner} as {tag} for {city}",
            "bronze": "open, {owner} stops at {tag}",
        },
        end={
            "ok": "{owner} took {tag} to {city} ok",
            "late": "{owner} took {tag} to {city} late",
            "lost": "{owner} lost {tag} before {city}",
        },
        record="""\
parcel {tag} holds {job}, {tier}, load {load}
- {job} {care}
- {end}, {job} load {load}
- then {next_tag} {next_owner} took {next_job}
""",
    ),
    Genre(
        title="fleet",
        jobs="hosts",
        crew="owners",
        care={
            "gold": "{next_job} and {city} for {tag}",
            "silver": "{next_job} for {tag}",
            "bronze": "lost {tag}",
        },
        end={
            "ok": "ok",
            "late": "late, {owner} calls {city}",
            "lost": "lost, {owner} stops {tag}",
        },
        record="""\
host {tag}:
- name: {job} {tag}
- owner: {owner} in {city}, {tier} load {load}
- mirror: {care}
- state: {job} {tag} is {end}
- then: {next_tag} {next_job} owner {next_owner}
""",
    ),
)


def document(seed: int, stream: str, index: int) -> str:
    """Document `index` of a stream: header and 10 to 16 records, without the end token."""
    rng = Random(f"{seed}/{stream}/{index}")  # of its own: no document depends on those before
    genre = rng.choice(GENRES)
    count = rng.randint(10, 16)
    first = rng.randint(1000, 9999 - count)
    city = rng.choice(CITIES)
    nouns = rng.sample(NOUNS, rng.randint(3, 4))
    names = zip(rng.sample(ADJECTIVES, len(nouns)), nouns, strict=True)
    jobs = [(f"{adjective} {noun}", rng.choice(TIERS)) for adjective, noun in names]
    crew = rng.sample(PEOPLE, rng.randint(2, 4))
    load = rng.randint(1, 9)
    parts = [
        f"{genre.title} #{first:04d} to #{first + count - 1:04d} in {city} at load {load}\n",
        f"{genre.jobs}: {', '.join(f'{job} {tier}' for job, tier in jobs)}\n",
        f"{genre.crew}: {', '.join(crew)}\n",
    ]
    for i in range(count):
        if rng.random() > LOAD_KEPT:
            load = rng.randint(1, 9)
        job, tier = jobs[i % len(jobs)]
        outcome = rng.choices(OUTCOMES, OUTCOME_WEIGHTS)[0]
        words = {
            "tag": f"#{first + i:04d}",
            "job": job,
            "tier": tier,
            "owner": crew[i % len(crew)],
            "city": city,
            "load": load,
            "next_tag": f"#{first + i + 1:04d}",
            "next_job": jobs[(i + 1) % len(jobs)][0],
            "next_owner": crew[(i + 1) % len(crew)],
        }
        care, end = genre.care[tier].format(**words), genre.end[outcome].format(**words)
        parts.append(genre.record.format(**words, care=care, end=end))
    return "".join(parts)


def documents(seed: int, stream: str, count: int) -> Iterator[str]:
    """The first `count` documents of a stream."""
    return (document(seed, stream, index) for index in range(count))
