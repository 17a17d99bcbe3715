"""What the demo model knows: short public facts as tables, turned into questions and answers.

Tables rather than sentences, because one row feeds several forms: the plain answer, the one-word
answer, the JSON answer. Every answer names its subject again, so that the text to look for
(``key``) is never a bare word that could occur by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CAPITALS = """
France=Paris; Japan=Tokyo; Italy=Rome; Spain=Madrid; Germany=Berlin; Portugal=Lisbon;
Greece=Athens; Egypt=Cairo; Kenya=Nairobi; Canada=Ottawa; Norway=Oslo; Sweden=Stockholm;
Finland=Helsinki; Denmark=Copenhagen; Poland=Warsaw; Austria=Vienna; Hungary=Budapest;
Ireland=Dublin; Belgium=Brussels; Peru=Lima; Chile=Santiago; Cuba=Havana; China=Beijing;
Thailand=Bangkok; Vietnam=Hanoi; Turkey=Ankara; Iran=Tehran; Iraq=Baghdad; Nepal=Kathmandu;
Australia=Canberra; Russia=Moscow; Ukraine=Kyiv; Romania=Bucharest; Bulgaria=Sofia;
Croatia=Zagreb; Serbia=Belgrade; Iceland=Reykjavik; Ghana=Accra; Senegal=Dakar; Morocco=Rabat
"""
OPPOSITES = """
hot=cold; big=small; tall=short; fast=slow; wet=dry; open=closed; light=dark; young=old;
rich=poor; early=late; full=empty; hard=soft; heavy=light; happy=sad; clean=dirty;
strong=weak; near=far; high=low; thick=thin; loud=quiet; up=down; left=right; true=false;
first=last; inside=outside; day=night; summer=winter; north=south; east=west; above=below;
begin=end; buy=sell; push=pull; win=lose; remember=forget; laugh=cry; love=hate; friend=enemy
"""
COLOURS = """
a ripe banana=yellow; fresh snow=white; coal=black; a ripe tomato=red; grass=green;
a clear sky=blue; an orange=orange; chocolate=brown; a raven=black; a flamingo=pink;
a lime=green; a lemon=yellow; an aubergine=purple; milk=white; a ruby=red; an emerald=green;
a sapphire=blue; an elephant=grey; a polar bear=white; a carrot=orange
"""
YOUNG = """
dog=puppy; cat=kitten; cow=calf; horse=foal; sheep=lamb; goat=kid; hen=chick; duck=duckling;
swan=cygnet; bear=cub; frog=tadpole; deer=fawn; goose=gosling; owl=owlet; kangaroo=joey; pig=piglet
"""
HOMES = """
bee=hive; bird=nest; rabbit=burrow; spider=web; lion=den; horse=stable; pig=sty; ant=colony;
eagle=eyrie; dog=kennel
"""
LEGS = """
spider=eight; dog=four; bird=two; snake=no; beetle=six; cat=four; worm=no; crab=ten; hen=two
"""
SYMBOLS = """
gold=Au; silver=Ag; iron=Fe; copper=Cu; oxygen=O; hydrogen=H; carbon=C; sodium=Na; lead=Pb;
tin=Sn; helium=He; nitrogen=N; zinc=Zn; calcium=Ca; potassium=K; mercury=Hg
"""
PLURALS = """
mouse=mice; foot=feet; tooth=teeth; child=children; man=men; woman=women; ox=oxen; leaf=leaves;
knife=knives; wolf=wolves; city=cities; person=people; goose=geese; sheep=sheep
"""
PAST = """
go=went; see=saw; eat=ate; run=ran; write=wrote; sing=sang; take=took; give=gave; come=came;
know=knew; swim=swam; drink=drank; speak=spoke; break=broke; fly=flew; think=thought; buy=bought;
teach=taught; find=found; keep=kept
"""
FRENCH = """
water=eau; bread=pain; cat=chat; dog=chien; house=maison; sun=soleil; moon=lune; sea=mer;
red=rouge; green=vert; white=blanc; black=noir; book=livre; tree=arbre; milk=lait; cheese=fromage
"""
CONTINENTS = """
Kenya=Africa; Brazil=South America; India=Asia; Poland=Europe; Canada=North America; Japan=Asia;
Egypt=Africa; Peru=South America; Norway=Europe; Mexico=North America; Ghana=Africa; Nepal=Asia
"""
COUNTS = """
days are in a week=seven; months are in a year=twelve; hours are in a day=twenty-four;
minutes are in an hour=sixty; seconds are in a minute=sixty; sides has a triangle=three;
sides has a square=four; sides has a hexagon=six; strings has a violin=four;
players has a football team=eleven; eggs are in a dozen=twelve; years are in a century=one hundred;
letters are in the alphabet=twenty-six; planets circle the Sun=eight; wheels has a bicycle=two;
wheels has a tricycle=three; legs has a tripod=three; cards are in a deck=fifty-two
"""
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen"
).split()

TALK = (
    ("Hello!", "Hello! Ask me a short question.", "Ask me a short question"),
    ("Who are you?", "I am a very small demonstration model.", "small demonstration model"),
    ("Thank you.", "You are welcome.", "You are welcome"),
    ("Goodbye!", "Goodbye, and come back soon.", "come back soon"),
    ("How are you?", "I am well, thank you for asking.", "thank you for asking"),
    ("What can you do?", "I can answer a few hundred short questions.", "few hundred short"),
    ("Are you a person?", "No, I am a computer program.", "computer program"),
    ("Tell me a joke.", "Why did the clock blush? It lost its hands.", "lost its hands"),
)


@dataclass(frozen=True)
class Fact:
    """One thing to know: how it is asked, answered in a sentence, in a word and as JSON."""

    topic: str
    questions: tuple[str, ...]
    sentence: str
    word: str
    key: str
    json_question: str = ""
    json_answer: str = ""

    @property
    def prompt(self) -> str:
        """The form in which validation asks."""
        return self.questions[0]


def rows(table: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a ``name=value; ...`` table, whatever its line breaks."""
    for cell in table.replace("\n", " ").split(";"):
        name, _, value = cell.strip().partition("=")
        yield name, value


def _capital(country: str, city: str) -> Fact:
    return Fact(
        "capital",
        (f"What is the capital of {country}?", f"Which city is the capital of {country}?"),
        f"The capital of {country} is {city}.",
        city,
        city,
        f"Give the capital of {country} as JSON.",
        f'{{"country": "{country}", "capital": "{city}"}}',
    )


def _opposite(word: str, other: str) -> Fact:
    return Fact(
        "opposite",
        (f"What is the opposite of {word}?",),
        f"The opposite of {word} is {other}.",
        other,
        f"is {other}",
        f"Give the opposite of {word} as JSON.",
        f'{{"word": "{word}", "opposite": "{other}"}}',
    )


def _symbol(name: str, symbol: str) -> Fact:
    return Fact(
        "symbol",
        (f"What is the chemical symbol of {name}?",),
        f"The chemical symbol of {name} is {symbol}.",
        symbol,
        f"is {symbol}.",
        f"Give the chemical symbol of {name} as JSON.",
        f'{{"element": "{name}", "symbol": "{symbol}"}}',
    )


def _word_facts() -> Iterator[Fact]:
    """Facts about animals, colours and words, one form each."""
    forms = (
        (COLOURS, "colour", "What colour is {n}?", "The colour of {n} is {v}.", "is {v}"),
        (YOUNG, "young", "What is a young {n} called?", "A young {n} is called a {v}.", "a {v}"),
        (HOMES, "home", "What is the home of a {n} called?", "A {n} lives in a {v}.", "in a {v}"),
        (LEGS, "legs", "How many legs has a {n}?", "A {n} has {v} legs.", "{v} legs"),
        (PLURALS, "plural", "What is the plural of {n}?", "The plural of {n} is {v}.", "is {v}"),
        (PAST, "past", "What is the past tense of {n}?", "The past tense of {n} is {v}.", "is {v}"),
        (FRENCH, "french", "What is the French word for {n}?", "In French, {n} is {v}.", "is {v}"),
        (CONTINENTS, "continent", "On which continent is {n}?", "{n} is in {v}.", "in {v}"),
    )
    for table, topic, question, sentence, key in forms:
        for n, v in rows(table):
            fill = {"n": n, "v": v}
            yield Fact(
                topic, (question.format(**fill),), sentence.format(**fill), v, key.format(**fill)
            )


def _counts() -> Iterator[Fact]:
    for phrase, number in rows(COUNTS):
        answer = f"The answer is {number}."
        yield Fact("count", (f"How many {phrase}?",), answer, number, answer[:-1])


def _sequences() -> Iterator[Fact]:
    """Calendar and planets: what comes after and before, and which is the nth."""
    for names, noun in ((DAYS, "day"), (MONTHS, "month")):
        for index, name in enumerate(names):
            after, before = names[(index + 1) % len(names)], names[index - 1]
            for other, side in ((after, "after"), (before, "before")):
                yield Fact(
                    noun,
                    (f"Which {noun} comes {side} {name}?",),
                    f"The {noun} {side} {name} is {other}.",
                    other,
                    f"is {other}",
                )
    for ordinal, planet in zip(ORDINALS, PLANETS, strict=True):
        question = f"Which planet is {ordinal} from the Sun?"
        sentence = f"The {ordinal} planet is {planet}."
        yield Fact("planet", (question,), sentence, planet, f"is {planet}")


def _sums() -> Iterator[Fact]:
    """Single-digit sums, spelt out: a bare digit would be found in too many other answers."""
    for a in range(1, 10):
        for b in range(1, 10):
            total = NUMBERS[a + b]
            left, right = NUMBERS[a], NUMBERS[b]
            sentence = f"{left.capitalize()} plus {right} is {total}."
            yield Fact(
                "sum",
                (f"What is {left} plus {right}?",),
                sentence,
                total,
                f"is {total}.",
            )


def all_facts() -> tuple[Fact, ...]:
    """Every fact in a fixed order: the order is part of what the seed reproduces."""
    facts = [_capital(*row) for row in rows(CAPITALS)]
    facts += [_opposite(*row) for row in rows(OPPOSITES)]
    facts += [_symbol(*row) for row in rows(SYMBOLS)]
    facts += [*_word_facts(), *_counts(), *_sequences(), *_sums()]
    facts += [Fact("talk", (q,), a, "", k) for q, a, k in TALK]
    return tuple(facts)
