"""Prompts that hold their own answer: a fact planted deep in a long text, and short passages with a question.

`recall` makes a text of a given length from notes, diary lines, log lines, prose and documentation and plants facts of
which some look alike. The thinking copies what is asked for and quotes the sentence; the answer says it. Kinds of facts
and the questions around them are held out, so a new kind must be found by what it says and not by its pattern; to that
end training asks many questions of each text, invents kinds of facts, and drills plain copying (`copy`).
"""

import random
import re
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from nano.sample import Generator, Sample, Split
from nano.wordings import Wordings, casual, dialogue, reserved, terms, wordings

CHARACTERS_PER_TOKEN = 3.2  # on average
DENSITY = {  # the same by style, measured with the nano tokenizer
    "diary": 4.0,
    "notes": 4.1,
    "prose": 4.3,
    "log": 2.5,
    "documentation": 3.3,
}
TOKENS = (3_600, 3_820)  # length of a long evaluation prompt
PLANTED = 3_500  # at this token its fact stands

NAMES = terms(
    "Anna Ben Carla David Elena Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Paul Quinn Rosa Samir Tanja Uli"
    " Vera Walter Xenia Yusuf Zoe Amir Bella Chen Dora Emil Fatima Gustav Hana Ivan Julia Kofi Lena Mei Noah Oscar"
    " Priya Ravi Sofia Tom Ursula Viktor Wei Yara Zara Luis Clara Peter Nora Max Ida Otto Eva Igor Lara Femi Aiko"
)
CITIES = terms(
    "Oslo Lisbon Vienna Prague Madrid Cairo Tokyo Lima Riga Dublin Athens Quito Seoul Accra Rome Bern Porto Lyon"
)
COLOURS = terms("red blue green yellow purple orange brown black white pink gray silver")
JOBS = terms(
    "baker teacher nurse pilot painter farmer plumber doctor tailor librarian driver cook gardener lawyer singer"
)
DAYS = terms("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = terms("January February March April May June July August September October November December")
PLACES = terms(
    "harbour mill"
    " library garage cellar attic workshop office museum stable greenhouse lighthouse warehouse chapel tower"
    " laboratory kitchen theatre boathouse archive garden shed bakery station school castle bunker vault gym studio"
)
THINGS = terms(
    "lamp umbrella"
    " ladder kettle drill guitar camera suitcase bicycle tent clock radio carpet mirror hammer globe basket"
    " telescope violin sofa vase compass blanket printer helmet chessboard kayak painting toolbox microscope"
)
ANIMALS = terms("dog cat horse parrot rabbit goat turtle hamster donkey goose")
FRUITS = terms("apples pears plums cherries grapes lemons oranges melons figs peaches berries bananas")
TOPICS = terms("budget roof website party fence exam concert harvest trip contract heating newsletter wedding survey")
SPORTS = terms("tennis chess football hockey rugby golf cricket handball badminton volleyball")
VEHICLES = ("train", "bus", "bike", "car", "ferry", "plane", "tram", "taxi")
_CONSONANTS, _VOWELS, _LETTERS = "bdfgklmnprstvz", "aeiou", "ABCDEFGHKLMNPRSTUVWXYZ"


def pseudo(rng: random.Random) -> str:
    """A word that does not exist."""
    syllables = [rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3))]
    return "".join(syllables) + rng.choice(("", "", "n", "x", "r", "lt", "sk"))


DRAW: dict[str, Callable[[random.Random], str]] = {
    "name": lambda rng: rng.choice(NAMES),
    "city": lambda rng: rng.choice(CITIES),
    "colour": lambda rng: rng.choice(COLOURS),
    "job": lambda rng: rng.choice(JOBS),
    "day": lambda rng: rng.choice(DAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "place": lambda rng: rng.choice(PLACES),
    "thing": lambda rng: rng.choice(THINGS),
    "animal": lambda rng: rng.choice(ANIMALS),
    "fruit": lambda rng: rng.choice(FRUITS),
    "topic": lambda rng: rng.choice(TOPICS),
    "sport": lambda rng: rng.choice(SPORTS),
    "vehicle": lambda rng: rng.choice(VEHICLES),
    "word": pseudo,
    "Word": lambda rng: pseudo(rng).capitalize(),
    "pin": lambda rng: str(rng.randint(1_000, 9_999)),
    "small": lambda rng: str(rng.randint(2, 99)),
    "number": lambda rng: str(rng.randint(100, 999)),
    "year": lambda rng: str(rng.randint(1900, 2020)),
    "time": lambda rng: f"{rng.randint(6, 22)}:{rng.choice(('00', '15', '30', '45'))}",
    "date": lambda rng: f"{rng.choice(MONTHS)} {rng.randint(1, 28)}",
    "password": lambda rng: f"{pseudo(rng)}-{rng.randint(10, 99)}",
    "serial": lambda rng: (
        f"{rng.choice('ABCDEFGHKLMNPRSTUVWXYZ')}{rng.choice('ABCDEFGHKLMNPRSTUVWXYZ')}-{rng.randint(100, 999)}"
    ),
}


class Fact(NamedTuple):
    """What can be planted: {k} is the key that the question names, {v} the value that it asks for."""

    statement: str
    key: str  # how to draw {k}
    value: str  # how to draw {v}
    noun: str  # the value as a noun phrase
    questions: tuple[str, ...]


# statement ; key ; value ; noun ; question ; question. Every fifth is held out.
_FACTS = """
The access code of the {k} is {v}. ; place ; pin ; the access code of the {k} ; Which access code does the {k} have?
{k}'s locker number is {v}. ; name ; small ; {k}'s locker number ; Which locker number does {k} have?
The password of {k} is {v}. ; word ; password ; the password of {k} ; Which password does {k} have?
{k} lives in {v}. ; name ; city ; the city where {k} lives ; Where does {k} live? ; In which city does {k} live?
The magic number of {k} is {v}. ; word ; number ; the magic number of {k} ; Which magic number does {k} have?
{k}'s favorite color is {v}. ; name ; colour ; {k}'s favorite color ; Which color is {k}'s favorite color?
The {k} costs {v} euros. ; thing ; number ; the cost of the {k} ; How much does the {k} cost? ; How many euros does the {k} cost?
{k} works as a {v}. ; name ; job ; the work of {k} ; As what does {k} work? ; What does {k} work as?
The meeting about the {k} is on {v}. ; topic ; day ; the day of the meeting about the {k} ; When is the meeting about the {k}?
The key to the {k} is with {v}. ; place ; name ; the person with the key to the {k} ; With whom is the key to the {k}? ; Who has the key to the {k}?
The serial number of the {k} is {v}. ; thing ; serial ; the serial number of the {k} ; Which serial number is on the {k}?
{k} was born in {v}. ; name ; year ; the year in which {k} was born ; In which year was {k} born? ; When was {k} born?
The secret word of {k} is {v}. ; name ; word ; the secret word of {k} ; Which secret word does {k} use?
{k} owes the club {v} dollars. ; name ; number ; the amount that {k} owes the club ; How many dollars does {k} owe the club?
The {k} was built in {v}. ; place ; year ; the year in which the {k} was built ; When was the {k} built?
{k} arrives at {v}. ; name ; time ; the time when {k} arrives ; At what time does {k} arrive? ; When does {k} arrive?
The {k} is painted {v}. ; place ; colour ; the color of the {k} ; What color is the {k}? ; In which color is the {k} painted?
{k} has a {v} at home. ; name ; animal ; the animal that {k} has at home ; Which animal does {k} have at home?
The phone extension of the {k} is {v}. ; place ; number ; the phone extension of the {k} ; Which phone extension does the {k} have?
The ticket number of {k} is {v}. ; name ; pin ; the ticket number of {k} ; Which ticket number does {k} have?
The {k} is hidden in the {v}. ; thing ; place ; the place where the {k} is hidden ; Where is the {k} hidden?
The parameter {k} is set to {v}. ; word ; number ; the value of the parameter {k} ; To what is the parameter {k} set?
The capital of {k} is {v}. ; Word ; Word ; the capital of {k} ; Which city is the capital of {k}?
{k}'s birthday is on {v}. ; name ; date ; {k}'s birthday ; When is {k}'s birthday? ; On which day is {k}'s birthday?
{k}'s room number is {v}. ; name ; number ; {k}'s room number ; In which room is {k}? ; Which room does {k} have?
{k} plays {v} on weekends. ; name ; sport ; the sport that {k} plays on weekends ; Which sport does {k} play? ; What does {k} play on weekends?
The {k} belongs to {v}. ; thing ; name ; the owner of the {k} ; To whom does the {k} belong? ; Who does the {k} belong to?
The deadline for the {k} is {v}. ; topic ; date ; the deadline for the {k} ; When is the deadline for the {k}?
{k} ordered {v} this week. ; name ; fruit ; what {k} ordered this week ; What did {k} order? ; What did {k} order this week?
The {k} weighs {v} kilograms. ; thing ; small ; the weight of the {k} in kilograms ; How many kilograms does the {k} weigh?
The {k} closes at {v}. ; place ; time ; the time when the {k} closes ; When does the {k} close? ; At what time does the {k} close?
{k} comes to work by {v}. ; name ; vehicle ; how {k} comes to work ; How does {k} come to work?
The code name of {k} is {v}. ; name ; Word ; the code name of {k} ; Which code name does {k} have?
The word {k} means {v} in our language. ; word ; thing ; the meaning of {k} ; What does {k} mean in our language?
The {k} was sold to {v}. ; thing ; name ; the buyer of the {k} ; To whom was the {k} sold? ; Who was the {k} sold to?
"""  # noqa: E501


def _read(line: str) -> Fact:
    statement, key, value, noun, *questions = (part.strip() for part in line.split(";"))
    return Fact(statement, key, value, noun, tuple(questions))


FACTS = [_read(line) for line in _FACTS.strip().splitlines()]
# Kinds that training invents, so that no list of kinds can be learnt by heart. {a} is any noun, or no word at all.
_SHAPES = """
The {a} of {k} is {v}. ; the {a} of {k} ; What is the {a} of {k}? ; Which {a} does {k} have?
{k}'s {a} is {v}. ; {k}'s {a} ; What is {k}'s {a}? ; Which {a} does {k} have?
{k} has the {a} {v}. ; the {a} of {k} ; Which {a} does {k} have? ; What {a} has {k}?
For {k} the {a} is {v}. ; the {a} for {k} ; What is the {a} for {k}? ; Which {a} is right for {k}?
{a} of {k}: {v} ; the {a} of {k} ; What is the {a} of {k}? ; Which {a} does {k} have?
Setting {a}.{k} = {v} ; the setting {a}.{k} ; What is {a}.{k} set to? ; To what is {a}.{k} set?
The {a} from {k} went to {v}. ; the one to whom the {a} from {k} went ; To whom did the {a} from {k} go?
{k} keeps the {a} in {v}. ; the place where {k} keeps the {a} ; Where does {k} keep the {a}?
We gave {k} the {a} {v}. ; the {a} that we gave {k} ; Which {a} did we give {k}?
It was {v} who found the {a} of {k}. ; the finder of the {a} of {k} ; Who found the {a} of {k}?
"""
SHAPES = [tuple(part.strip() for part in line.split(";")) for line in _SHAPES.strip().splitlines()]
ATTRIBUTES = terms(
    "title nickname score rank limit size height age weight symbol motto badge team group street station gate seat"
    " table hotel song book dish drink flower tree number code tag version port model brand label level grade rule"
    " partner rival teacher owner guide driver winner hobby talent colour language bank ticket flight bus island river"
)
_KEYS = ("name", "Word", "word", "serial", "city")
_VALUES = (
    "name", "city", "word", "Word", "pin", "small", "number", "year", "time", "password", "serial", "colour", "thing",
    "animal", "fruit", "month",
)  # fmt: skip


def invented(rng: random.Random) -> Fact:
    """A fact with a random attribute, often a made-up word, so that no list of attributes can be learnt by heart."""
    statement, noun, *questions = rng.choice(SHAPES)
    attribute = rng.choice(ATTRIBUTES) if rng.random() < 0.6 else pseudo(rng)
    statement, noun, *questions = (text.replace("{a}", attribute) for text in (statement, noun, *questions))
    return Fact(statement, rng.choice(_KEYS), rng.choice(_VALUES), noun, tuple(questions))


KINDS: dict[str, list[Fact]] = {
    "train": [fact for i, fact in enumerate(FACTS) if i % 5 != 2],
    "held": [fact for i, fact in enumerate(FACTS) if i % 5 == 2],
}
# questions about the noun phrase {x}; the facts have their own beside them
ASK = wordings("""
    What is {x}?
    Tell me {x}.
    According to the text, what is {x}?
    The text mentions {x}. What is it?
    Please find {x}.
    Give me {x}.
    From the text above: what is {x}?
    I need {x}.
    What does the text say about {x}?
    Look up {x}.
""")
BEFORE = wordings("""
    Read the following text. There is a question at the end.
    Here are some notes.
    Please read this carefully.
    Text:
    I will ask you something about this text.
    Below is a long text.
    Remember what you read here.
    This is what I have written down so far.
    Read this, then answer my question.
    Please look through these notes.
""")
AFTER = wordings("""
    {q}
    Question: {q}
    Now the question: {q}
    My question: {q}
    That was the text. {q}
    End of the text. {q}
    Answer this from the text: {q}
    Now tell me: {q}
    One question about it: {q}
    So, {q}
""")


def thinking(asked: str, key: str, sentence: str) -> str:
    """What is asked for, in the user's words; the key to look for; the sentence that has it."""
    return f'Looking for: {asked}\nThe text says about {key}: "{sentence}"'


# -------------------- filler

_SENTENCES = {
    "diary": """
        Today I met {name} at the market and we talked about {topic}s for a while.
        It rained all morning, so {name} and I stayed in and played cards.
        I could not sleep, because the {animal} next door made noise until {time}.
        {name} came by with some {fruit} and stayed for tea.
        We took the long way home and saw a {animal} near the old bridge.
        The soup was too salty again, but nobody said a word.
        {name} told the same story about {city} for the third time.
        I finally cleaned the window and found an old letter from {name}.
        On {day} the whole street smelled of fresh bread.
        I want to learn how to bake, but the oven has its own ideas.
    """,
    "notes": """
        Ask {name} whether the {thing} can be repaired before {month}.
        Buy {fruit}, milk and a new bulb for the hall.
        Call {name} back about the {topic} before {day}.
        The list for the {topic} is nearly done; two names are missing.
        Remember to water the plants next to the {thing}.
        Return the {thing} that we borrowed last {month}.
        The window in the hall does not close well when it is cold.
        {name} and {name} will share a car to {city}.
        Bring warm clothes, the wind is strong near the sea.
        Nothing new about the {topic} so far.
    """,
    "prose": """
        The road from {city} to the coast is long, and few people take it in winter.
        {name} closed the door quietly and listened to the wind in the trees.
        In the evening the lamps along the river were lit one after the other.
        Nobody in the village had seen such a {animal} before, and many came to look.
        The old clock in the square had stopped years ago, but people still looked up at it.
        {name} laughed, put the {thing} down and asked for another cup of coffee.
        By {month} the fields were green again and the children played outside.
        There was a smell of wet stone and of smoke from the chimneys.
        A boat passed slowly, and its bell could be heard for a long time.
        {name} had never been to {city}, but knew every street from books.
    """,
    "log": """
        {time} INFO worker {small} started
        {time} INFO request {pin} done in {number} ms
        {time} WARNING queue of worker {small} is {small} percent full
        {time} INFO saved {number} records
        {time} DEBUG cache hit for item {pin}
        {time} ERROR connection to node {small} was lost, trying again
        {time} INFO node {small} is back
        {time} INFO backup finished after {number} seconds
        {time} DEBUG read {pin} bytes from disk
        {time} INFO user {small} logged out
    """,
}
_PER_TEMPLATE = 150


def _pools() -> dict[str, list[str]]:
    """Lines of filler by style, the same in every process."""
    from pydoc_data.topics import topics

    rng = random.Random(0)
    pools = {
        style: [
            re.sub(r"\{(\w+)\}", lambda match: DRAW[match[1]](rng), line)
            for line in (line.strip() for line in text.strip().splitlines())
            for _ in range(_PER_TEMPLATE if "{" in line else 1)
        ]
        for style, text in _SENTENCES.items()
    }
    pages = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    pools["documentation"] = [part for part in re.split(r"(?<=[a-z]\.) (?=[A-Z])", pages) if 40 < len(part) < 200]
    return pools


POOLS = _pools()
STYLES = tuple(POOLS)


class Line(NamedTuple):
    """A line of a long text, and about how many tokens it has."""

    text: str
    tokens: float  # about


def filler(rng: random.Random, tokens: float) -> list[Line]:
    """Lines without facts, of about `tokens` tokens together, in one to three styles."""
    styles = rng.sample(STYLES, rng.choice((1, 1, 2, 3)))
    lines: list[Line] = []
    while tokens > 0:
        style = rng.choice(styles)
        text = rng.choice(POOLS[style])
        lines.append(Line(text, (len(text) + 1) / DENSITY[style]))
        tokens -= lines[-1].tokens
    return lines


# -------------------- samples


class Planted(NamedTuple):
    """A fact with its key and value, ready to stand in a text."""

    fact: Fact
    key: str
    value: str

    @property
    def sentence(self) -> str:
        """The sentence that states the fact in the text."""
        return self.fact.statement.replace("{k}", self.key).replace("{v}", self.value)

    def question(self, rng: random.Random, split: Split) -> str:
        """A question about the value, in a wording that the split may use."""
        return self.ask(rng, split).question

    def ask(self, rng: random.Random, split: Split) -> "Question":
        """The same with the thinking and the answer to it."""
        if rng.random() < 0.5:
            noun = self.fact.noun.replace("{k}", self.key)
            question, asked = ASK.pick(rng, split).replace("{x}", noun), noun + "."
        else:
            question = asked = rng.choice(self.fact.questions).replace("{k}", self.key)
        return Question(question, thinking(asked, self.key, self.sentence), self.sentence, self.value)


class Question(NamedTuple):
    """A question about a text, with the thinking and the answer that are right."""

    question: str
    thought: str
    answer: str
    value: str  # what the answer has to say


def plant(rng: random.Random, split: Split, facts: int) -> list[Planted]:
    """`facts` facts of which no two have the same key and kind; the first is the one to ask for.

    In training every one can be asked for, and about half of the kinds are invented.
    """
    kinds = KINDS["held" if split == "families" else "train"]
    training = split == "train"
    planted: list[Planted] = []
    keys: set[tuple[str, str]] = set()
    alike = rng.choice((0.0, 0.5, 0.9)) if training else rng.choice((0.0, 1.0))
    while len(planted) < facts:
        if planted and rng.random() < alike:
            fact = rng.choice(planted).fact
        else:
            fact = invented(rng) if training and rng.random() < 0.5 else rng.choice(kinds)
        same = [other.key for other in planted if other.fact.key == fact.key]
        key = rng.choice(same) if training and same and rng.random() < 0.25 else DRAW[fact.key](rng)
        value = DRAW[fact.value](rng)
        asked = training or (not planted and split == "values")
        if key == value or (fact.statement, key) in keys or (asked and reserved(key, value) != (split == "values")):
            continue
        keys.add((fact.statement, key))
        planted.append(Planted(fact, key, value))
    return planted


def recall(rng: random.Random, split: Split, characters: int, depth: float | None = None) -> Sample:
    """A text with planted facts; the first one asked for starts at `depth` of it, or anywhere.

    The text has about `characters` / 3.2 tokens, whatever its style: what is short in tokens gets more characters.
    Evaluation asks one question. Training asks several, of two to ten facts.
    """
    tokens = characters / CHARACTERS_PER_TOKEN
    if split == "train":
        facts = plant(rng, split, rng.randint(2, 5) if tokens < 300 else rng.randint(4, 10))
    else:
        facts = plant(rng, split, rng.choices((1, 2, 3, 4, 6), (3, 2, 2, 1, 1))[0])
    first, *others = facts
    planted = [Line(other.sentence, len(other.sentence) / CHARACTERS_PER_TOKEN) for other in others]
    # the other facts of a short text are a part of its length
    lines = filler(rng, tokens - (sum(line.tokens for line in planted) if split == "train" else 0))
    for line in planted:
        lines.insert(rng.randint(0, len(lines)), line)
    joint = "\n" if rng.random() < 0.7 else " "
    before = BEFORE.pick(rng, split) + "\n\n" if rng.random() < 0.6 else ""
    at = (rng.random() if depth is None else depth) * tokens - len(before) / CHARACTERS_PER_TOKEN
    starts = list(accumulate((line.tokens for line in lines), initial=0.0))
    place = min(range(len(starts)), key=lambda i: abs(starts[i] - at))
    lines.insert(place, Line(first.sentence, 0.0))
    text = f"{before}{joint.join(line.text for line in lines)}\n\n"
    asked = rng.sample(facts, len(facts)) if split == "train" else [first]
    questions = [fact.ask(rng, split) for fact in asked]
    return questioned(rng, split, "recall", questions, lambda q: text + AFTER.pick(rng, split).replace("{q}", q))


def questioned(
    rng: random.Random, split: Split, kind: str, questions: list[Question], framed: Callable[[str], str]
) -> Sample:
    """The first question framed with the text, and in training the others: as further turns, or in a list of all.

    Only the last turn can be thought about, since the template drops what was thought before it.
    """
    first, *others = questions
    form = rng.random() if split == "train" and others else 0.0
    if form < 0.3:
        return dialogue(
            rng, split, kind, framed(first.question), first.thought, first.answer, {"contains": [first.value]}
        )
    if form < 0.65:
        listed = "".join(f"\n{i}. {question.question}" for i, question in enumerate(questions, 1))
        thought = "\n".join(question.thought for question in questions)
        answer = "\n".join(f"{i}. {question.answer}" for i, question in enumerate(questions, 1))
        check = {"contains": [question.value for question in questions]}
        return dialogue(rng, split, kind, framed(rng.choice(SEVERAL) + listed), thought, answer, check)
    before = [{"role": "user", "content": framed(first.question)}, {"role": "assistant", "content": first.answer}]
    *middle, last = others
    for question in middle:
        before.append({"role": "user", "content": casual(rng, question.question)})
        before.append({"role": "assistant", "content": question.answer})
    check = {"contains": [last.value]}
    return dialogue(rng, split, kind, casual(rng, last.question), last.thought, last.answer, check, before)


SEVERAL = ("Answer these questions:", "Please answer all of these.", "Several questions:", "I want to know:")


def long_recall(rng: random.Random, split: Split) -> Sample:
    """For evaluation: the fact at token 3,500 of up to 3,900, or at a tenth of them. In training most are short."""
    if split == "train":
        return recall(rng, split, int(200 * 10 ** rng.random()))
    tokens = rng.randint(*TOKENS)
    depth = PLANTED / tokens if rng.random() < 0.67 else 0.1
    return recall(rng, split, int(tokens * CHARACTERS_PER_TOKEN), depth)


# -------------------- reading

# who ; what ; question for what ; question for who. Every fifth is held out.
_STORY = """
{who} lives in {v}. ; city ; Where does {who} live? ; Who lives in {v}?
{who} has a {v} bike. ; colour ; What color is {who}'s bike? ; Whose bike is {v}?
{who} came to the party by {v}. ; vehicle ; How did {who} come to the party? ; Who came to the party by {v}?
{who} is a {v}. ; job ; What is {who}'s job? ; Who is a {v}?
{who} bought some {v}. ; fruit ; What did {who} buy? ; Who bought {v}?
{who} keeps a {v} in the garden. ; animal ; Which animal does {who} keep? ; Who keeps a {v}?
{who} left at {v}. ; time ; When did {who} leave? ; Who left at {v}?
{who} plays {v} every week. ; sport ; What does {who} play? ; Who plays {v}?
{who} forgot the {v}. ; thing ; What did {who} forget? ; Who forgot the {v}?
{who} will travel in {v}. ; month ; When will {who} travel? ; Who will travel in {v}?
{who} wore a {v} hat. ; colour ; What color was {who}'s hat? ; Who wore a {v} hat?
{who} read {v} pages. ; small ; How many pages did {who} read? ; Who read {v} pages?
{who} waited at the {v}. ; place ; Where did {who} wait? ; Who waited at the {v}?
{who} paid {v} euros. ; small ; How much did {who} pay? ; Who paid {v} euros?
{who} is free on {v}. ; day ; On which day is {who} free? ; Who is free on {v}?
{who} was born in {v}. ; year ; When was {who} born? ; Who was born in {v}?
{who} found a {v}. ; thing ; What did {who} find? ; Who found the {v}?
{who} sits at table {v}. ; small ; At which table does {who} sit? ; Who sits at table {v}?
{who} speaks with {v}. ; name ; With whom does {who} speak? ; Who speaks with {v}?
{who} works in the {v}. ; place ; Where does {who} work? ; Who works in the {v}?
{who} flew to {v}. ; city ; Where did {who} fly? ; Who flew to {v}?
{who} scored {v} points. ; small ; How many points did {who} score? ; Who scored {v} points?
{who} likes {v}. ; fruit ; What does {who} like? ; Who likes {v}?
{who} called {v}. ; name ; Whom did {who} call? ; Who called {v}?
{who} repaired the {v}. ; thing ; What did {who} repair? ; Who repaired the {v}?
{who} has the number {v}. ; pin ; Which number does {who} have? ; Who has the number {v}?
{who} painted the door {v}. ; colour ; In which color did {who} paint the door? ; Who painted the door {v}?
{who} sold a {v}. ; animal ; What did {who} sell? ; Who sold a {v}?
{who} visited {v} last year. ; city ; Which city did {who} visit? ; Who visited {v}?
{who} starts work at {v}. ; time ; When does {who} start work? ; Who starts work at {v}?
{who} won the {v} game. ; sport ; Which game did {who} win? ; Who won the {v} game?
{who} is married to {v}. ; name ; To whom is {who} married? ; Who is married to {v}?
{who} hid the letter in the {v}. ; place ; Where did {who} hide the letter? ; Who hid the letter in the {v}?
{who} ran {v} kilometers. ; small ; How many kilometers did {who} run? ; Who ran {v} kilometers?
{who} comes from {v}. ; Word ; Where does {who} come from? ; Who comes from {v}?
{who} invited {v}. ; name ; Whom did {who} invite? ; Who invited {v}?
{who} lost a {v}. ; thing ; What did {who} lose? ; Who lost the {v}?
{who} cooked the soup in {v}. ; Word ; Where did {who} cook the soup? ; Who cooked the soup in {v}?
{who} needs {v} chairs. ; small ; How many chairs does {who} need? ; Who needs {v} chairs?
{who} studies in {v}. ; city ; Where does {who} study? ; Who studies in {v}?
"""
STORY = [tuple(part.strip() for part in line.split(";")) for line in _STORY.strip().splitlines()]
# Stories about any deed, for training only: {past}, {s} and {base} are forms of a verb, {o} is an object, {many} some
# things. Verbs of the stories held out occur here too, but in other sentences.
_DEEDS = """
{who} {past} {v}. ; Word ; Whom did {who} {base}? ; Who {past} {v}?
{who} {past} the {v}. ; word ; What did {who} {base}? ; Who {past} the {v}?
{who} always {s} {v}. ; name ; Whom does {who} always {base}? ; Who always {s} {v}?
{who} often {s} the {v}. ; word ; What does {who} often {base}? ; Who often {s} the {v}?
{who} {past} the {o} in {v}. ; city ; Where did {who} {base} the {o}? ; Who {past} the {o} in {v}?
{who} {past} a {o} on {v}. ; day ; When did {who} {base} the {o}? ; Who {past} a {o} on {v}?
{who} {past} the {o} at {v}. ; time ; At what time did {who} {base} the {o}? ; Who {past} the {o} at {v}?
{who} {past} the {o} of {v}. ; name ; Whose {o} did {who} {base}? ; Who {past} the {o} of {v}?
{who} {past} {v} {many}. ; small ; How many {many} did {who} {base}? ; Who {past} {v} {many}?
{who} {s} {v} {many}. ; small ; How many {many} does {who} {base}? ; Who {s} {v} {many}?
{who} {past} the {v} {o}. ; colour ; Which {o} did {who} {base}? ; Who {past} the {v} {o}?
{who} {past} the {o} in {v}. ; month ; In which month did {who} {base} the {o}? ; Who {past} the {o} in {v}?
{who} {past} {v} in the garden. ; name ; Whom did {who} {base} in the garden? ; Who {past} {v} in the garden?
{who} {past} a {v} near the river. ; thing ; What did {who} {base} near the river? ; Who {past} a {v} near the river?
The {o} of {who} is {v}. ; colour ; What color is the {o} of {who}? ; Whose {o} is {v}?
The {o} of {who} costs {v} euros. ; small ; How much does the {o} of {who} cost? ; Whose {o} costs {v} euros?
{who} became a {v}. ; job ; Which job does {who} have now? ; Who became a {v}?
{who} still {s} the {o} of {v}. ; name ; Whose {o} does {who} still {base}? ; Who still {s} the {o} of {v}?
The job of {who} is {v}. ; job ; What is the job of {who}? ; Whose job is {v}?
{who} gave the {o} to {v}. ; name ; To whom did {who} give the {o}? ; Who gave the {o} to {v}?
{who} got the {o} from {v}. ; Word ; From whom did {who} get the {o}? ; Who got the {o} from {v}?
{who} went to the {v}. ; place ; Where did {who} go? ; Who went to the {v}?
{who} has {v} {many}. ; small ; How many {many} does {who} have? ; Who has {v} {many}?
{who}'s {o} is in {v}. ; city ; Where is {who}'s {o}? ; Whose {o} is in {v}?
{who} wants to {base} the {v}. ; word ; What does {who} want to {base}? ; Who wants to {base} the {v}?
{who} will {base} {v} {many}. ; small ; How many {many} will {who} {base}? ; Who will {base} {v} {many}?
"""
DEEDS = [tuple(part.strip() for part in line.split(";")) for line in _DEEDS.strip().splitlines()]
VERBS = [
    tuple(line.split("/"))
    for line in terms("""
        see/saw/sees watch/watched/watches help/helped/helps follow/followed/follows miss/missed/misses
        hear/heard/hears meet/met/meets draw/drew/draws clean/cleaned/cleans carry/carried/carries
        want/wanted/wants borrow/borrowed/borrows open/opened/opens hide/hid/hides make/made/makes
        teach/taught/teaches break/broke/breaks bring/brought/brings use/used/uses count/counted/counts
        choose/chose/chooses steal/stole/steals move/moved/moves remember/remembered/remembers paint/painted/paints
        collect/collected/collects ask/asked/asks throw/threw/throws build/built/builds wash/washed/washes
        catch/caught/catches hold/held/holds admire/admired/admires fix/fixed/fixes
    """)
]
HELD_VERBS = [
    tuple(line.split("/"))
    for line in terms("forget/forgot/forgets need/needed/needs visit/visited/visits call/called/calls lose/lost/loses")
]
MANY = terms("chairs tables cups books coins stamps eggs tickets boxes bottles plates stones letters pens keys lamps")


def deed(rng: random.Random) -> tuple[str, ...]:
    """(statement, kind, question, question) as in STORY, with a verb, often one that does not exist."""
    while True:
        story = rng.choice(DEEDS)
        held = rng.random() < 0.15
        if not held or "{o}" in story[0] or "near the" in story[0]:
            break
    base, past, third = rng.choice(HELD_VERBS if held else VERBS)
    if not held and rng.random() < 0.25:
        base = (
            rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(_CONSONANTS) + rng.choice(("ack", "olt", "isk"))
        )
        past, third = f"{base}ed", f"{base}s"
    thing = pseudo(rng) if rng.random() < 0.3 else rng.choice(THINGS + ANIMALS)
    many = pseudo(rng) + "s" if rng.random() < 0.3 else rng.choice(MANY)
    drawn = {"{base}": base, "{past}": past, "{s}": third, "{o}": thing, "{many}": many}
    return tuple(_filled(text, drawn) for text in story)


_CHANGES = (
    (
        "The {topic} meeting was planned for {old}, but it was moved to {new}.",
        "When is the {topic} meeting now?",
        "day",
    ),
    (
        "At first the {thing} cost {old} euros. Now it costs {new} euros.",
        "How much does the {thing} cost now?",
        "small",
    ),
    ("We wanted to meet in {old}, but in the end we met in {new}.", "Where did we meet in the end?", "city"),
    ("The old code was {old}. Since {month} the code is {new}.", "What is the code now?", "pin"),
    ("{name} used to be a {old}. Today {name} is a {new}.", "What is {name}'s job today?", "job"),
    (
        "Until {month} the code of the {thing} was {old}. Now it is {new}.",
        "Which code does the {thing} have now?",
        "pin",
    ),
    ("{name} lived in {old} before. Now {name} lives in {new}.", "Where does {name} live now?", "city"),
    ("{name} first wanted a {old}, but then {name} took a {new}.", "What did {name} take?", "thing"),
    ("Yesterday the {thing} was in the {old}. Today it is in the {new}.", "Where is the {thing} today?", "place"),
    (
        "The train left at {old} last year. This year it leaves at {new}.",
        "When does the train leave this year?",
        "time",
    ),
    (
        "The {topic} was {name}'s task. Since {month} the number is {new}; it was {old} before.",
        "What is the number?",
        "pin",
    ),
    ("The old name of the {thing} is {old}. The new name is {new}.", "What is the new name of the {thing}?", "Word"),
    ("The {thing} was {old}. Then {name} painted it {new}.", "What color is the {thing} now?", "colour"),
    ("{name} had {old} stamps in {month}. Now {name} has {new}.", "How many stamps does {name} have now?", "small"),
    (
        "In {month} {name} kept a {old}. These days it is a {new}.",
        "Which animal does {name} keep these days?",
        "animal",
    ),
)
# {a}: any noun; the question asks for what is, or for what was
_INVENTED_CHANGES = """
The old {a} was {old}. The new {a} is {new}. ; What is the new {a}? ; What was the old {a}?
The {a} was {old}. Now it is {new}. ; What is the {a} now? ; What was the {a} before?
Until {month} the {a} was {old}. Since then it is {new}. ; What is the {a} today? ; What was the {a} first?
{name}'s {a} used to be {old}, but today it is {new}. ; What is {name}'s {a} today? ; What did {name}'s {a} use to be?
Before {month} {name} had the {a} {old}; after that {new}. ; Which {a} does {name} have now? ; Which {a} did {name} have before?
At first we had the {a} {old}. In the end we took {new}. ; Which {a} did we take in the end? ; Which {a} did we have at first?
The {a} {old} is no longer right. Since {month} the {a} {new} is. ; Which {a} is right now? ; Which {a} is no longer right?
"""  # noqa: E501
INVENTED_CHANGES = [
    tuple(part.strip() for part in line.split(" ; ")) for line in _INVENTED_CHANGES.strip().splitlines()
]
_SCENES = (
    "It was a warm day.", "Nobody was in a hurry.", "The weather was fine.", "There was cake for everyone.",
    "It was quite late already.", "The music was loud.", "Some neighbours came too.",
    "They had not met for a long time.",
)  # fmt: skip
# \n is a line break
READ_FRAMES = wordings(r"""
    {p}\n\n{q}
    Read this: "{p}" {q}
    {p} {q}
    {q}\n\nText: {p}
    Passage: {p} Question: {q}
    Here is a short text. {p} Now my question: {q}
    Please answer from the text. {p} {q}
    {p} Tell me: {q}
    "{p}" {q}
    Answer the question about this text: {p} {q}
    Text: {p}\nQuestion: {q}
    I read this: {p} {q}
    {p}\n{q}
    Given the text "{p}", answer: {q}
    My notes: {p}\n\n{q}
    Read the text and answer.\n\n{p}\n\n{q}
    {q} Here is the text: {p}
    Use this text: {p} {q}
    Look at this: {p} {q}
    I heard this: {p} {q}
    This is what I know: {p} {q}
    Here is a small note. {p} {q}
    Note: {p}\n{q}
    Somebody wrote: "{p}" {q}
    A friend told me: {p} {q}
    I wrote this down: {p} {q}
    Story: {p}\n\nQuestion: {q}
    Suppose this is true: {p} {q}
    From a letter: "{p}"\n{q}
    I know the following. {p} {q}
    {p}\n\nQuestion: {q}
    {p}\nPlease answer: {q}
    Listen. {p} {q}
    The newspaper says: {p} {q}
    Answer in one sentence: {q}\n\n{p}
    I have a question about this: "{p}" {q}
    Facts: {p}\n{q}
    Please look at my text.\n{p}\n{q}
    I found this sentence: {p} {q}
    Let me tell you something. {p} {q}
    Context: {p}\n\n{q}
    Given: {p} {q}
    In a book I read: {p} {q}
    {p} So, {q}
    {p} My question is: {q}
    My friend said this: {p} {q}
    Message: "{p}"\nQuestion: {q}
    Think about this text: {p} {q}
    {p} What I want to know: {q}
    The report: {p} {q}
""")


def reading(rng: random.Random, split: Split) -> Sample:
    """A passage of three to nine sentences about a few people, and questions about them; in evaluation one."""
    if rng.random() < 0.2:
        sentence, question = _change(rng, split)
        sentences, questions = [sentence], [question]
    else:
        sentences, questions = _people(rng, split)
    for _ in range(rng.randint(0, 2)):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(_SCENES))
    passage = " ".join(sentences)
    frame = READ_FRAMES.pick(rng, split).replace("\\n", "\n").replace("{p}", passage)
    return questioned(rng, split, "reading", questions, lambda q: frame.replace("{q}", casual(rng, q)))


def _people(rng: random.Random, split: Split) -> tuple[list[str], list[Question]]:
    """(sentences, questions): each person does something else, or the same differently."""
    stories = [story for i, story in enumerate(STORY) if (i % 5 == 3) == (split == "families")]
    training = split == "train"
    count = rng.randint(1 if training else 2, 6 if training else 4)
    while True:
        names = rng.sample(NAMES, count)
        if training and rng.random() < 0.5:  # people of whom nobody has heard
            names = [pseudo(rng).capitalize() for _ in names]
        drawn = [deed(rng) if training and rng.random() < 0.6 else rng.choice(stories) for _ in range(count)]
        alike = rng.random() < 0.6
        chosen = [drawn[0]] * count if alike else drawn
        values = [DRAW[kind](rng) for _, kind, *_ in chosen]
        if len({*values, *names}) == 2 * count:
            break
    lines: list[str] = []
    questions: list[Question] = []
    for (statement, _, what, who), name, value in zip(chosen, names, values, strict=True):
        line = statement.replace("{who}", name).replace("a {v}", "an {v}" if value[0] in "aeiou" else "a {v}")
        line = line.replace("{v}", value)
        backwards = rng.random() < 0.4
        question = (who if backwards else what).replace("{who}", name).replace("{v}", value)
        key, answer = (value, name) if backwards else (name, value)
        lines.append(line)
        questions.append(Question(question, thinking(question, key, line), line, answer))
    sentences = rng.sample(lines, count)
    return sentences, questions


def _change(rng: random.Random, split: Split) -> tuple[str, Question]:
    """(sentence, question) about something that was one way and is another way now."""
    if split == "train" and rng.random() < 0.5:
        return _invented_change(rng)
    changes = [change for i, change in enumerate(_CHANGES) if (i % 5 == 3) == (split == "families")]
    while True:
        statement, question, kind = rng.choice(changes)
        old, new = DRAW[kind](rng), DRAW[kind](rng)
        if old != new and (split == "families" or reserved(statement, old, new) == (split == "values")):
            break
    for part in ("topic", "thing", "name", "month"):
        drawn = DRAW[part](rng)
        statement, question = statement.replace(f"{{{part}}}", drawn), question.replace(f"{{{part}}}", drawn)
    sentence = statement.replace("{old}", old).replace("{new}", new)
    thought = f"{thinking(question, 'the change', sentence)}\nFirst {old}, then {new}."
    return sentence, Question(question, thought, f"{new}.", new)


def _invented_change(rng: random.Random) -> tuple[str, Question]:
    kind = rng.choice(_VALUES)
    while (old := DRAW[kind](rng)) == (new := DRAW[kind](rng)):
        pass
    noun = rng.choice(ATTRIBUTES) if rng.random() < 0.6 else pseudo(rng)
    drawn = {"{a}": noun, "{old}": old, "{new}": new, "{month}": rng.choice(MONTHS), "{name}": rng.choice(NAMES)}
    sentence, now, before = (_filled(text, drawn) for text in rng.choice(INVENTED_CHANGES))
    question, value = rng.choice(((now, new), (before, old)))
    thought = f"{thinking(question, 'the change', sentence)}\nFirst {old}, then {new}."
    return sentence, Question(question, thought, f"{value}.", value)


def _filled(text: str, drawn: dict[str, str]) -> str:
    for mark, value in drawn.items():
        text = text.replace(mark, value)
    return text


# -------------------- copying, for training only


def copy(rng: random.Random, split: Split) -> Sample:
    """Something to find and repeat as it is: a text, a line by its place or its neighbour, a value by its key."""
    form = rng.choice((_copy_text, _copy_line, _copy_next, _copy_value, _copy_value))
    user, thought, answer = form(rng)
    return dialogue(rng, split, "copy", user, thought, answer, None)


def _phrase(rng: random.Random, low: int = 1, high: int = 4) -> str:
    """Words that do not belong together, so that none can be guessed from those before it."""
    kinds = ("word", "Word", "name", "thing", "pin", "small", "colour", "fruit", "serial", "city", "password")
    return " ".join(DRAW[rng.choice(kinds)](rng) for _ in range(rng.randint(low, high)))


def _copy_text(rng: random.Random) -> tuple[str, str, str]:
    text = _phrase(rng, 3, 12)
    said = rng.choice((
        "Write this once more: {x}", "Please copy: {x}", "{x}\n\nRepeat the line above.", 'Say "{x}" again.',
        "Copy the following text: {x}", "Type this out again: {x}", "Repeat this line.\n{x}", "Write down: {x}",
    ))  # fmt: skip
    return said.replace("{x}", text), "Copy the text as it is.", text


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def _copy_line(rng: random.Random) -> tuple[str, str, str]:
    lines = [_phrase(rng) for _ in range(rng.randint(3, 6))]
    i = rng.randrange(len(lines))
    said = rng.choice((
        "What is the {o} line?", "Copy the {o} line.", "Give me line {n}.", "Which text is on line {n}?",
        "Write only the {o} line.",
    ))  # fmt: skip
    counted = "\n".join(f"{n}: {line}" for n, line in enumerate(lines[: i + 1], 1))
    question = said.replace("{o}", ORDINALS[i]).replace("{n}", str(i + 1))
    return "\n".join(lines) + f"\n\n{question}", counted, lines[i]


def _copy_next(rng: random.Random) -> tuple[str, str, str]:
    lines = [_phrase(rng) for _ in range(rng.randint(3, 8))]
    i = rng.randrange(len(lines) - 1)
    said = rng.choice((
        "Which line comes after {x}?", 'What follows "{x}"?', "Give me the line after {x}.",
        "What is the line right behind {x}?",
    ))  # fmt: skip
    return (
        "\n".join(lines) + f"\n\n{said.replace('{x}', lines[i])}",
        f"{lines[i]}\n{lines[i + 1]}",
        lines[i + 1],
    )


def _copy_value(rng: random.Random) -> tuple[str, str, str]:
    """A small table and several of its keys."""
    table = {_phrase(rng, 1, 2): _phrase(rng, 1, 2) for _ in range(rng.randint(3, 10))}
    between = rng.choice((": ", " = ", " -> ", " | ", " is "))
    keys = rng.sample(list(table), rng.randint(1, min(4, len(table))))
    said = rng.choice(
        ("What stands beside {x}?", "Look up: {x}", "Give me the value of {x}.", "Values of {x}, please.")
    )
    found = "\n".join(f"{key}{between}{table[key]}" for key in keys)
    user = "\n".join(f"{key}{between}{value}" for key, value in table.items())
    user += f"\n\n{said.replace('{x}', ', '.join(keys))}"
    return user, found, "\n".join(table[key] for key in keys)


def families(kind: str) -> tuple[int, int]:
    """How many wordings of `kind` are for training and how many are held out: kinds of facts, questions and frames."""
    lists: dict[str, list[Wordings]] = {"recall": [ASK, BEFORE, AFTER], "reading": [READ_FRAMES]}
    stories = sum(i % 5 == 3 for rows in (STORY, _CHANGES) for i in range(len(rows)))
    held = {"recall": len(KINDS["held"]), "reading": stories}[kind]
    total = {"recall": len(FACTS), "reading": len(STORY) + len(_CHANGES)}[kind]
    train = total - held + sum(len(said.train) for said in lists[kind])
    return train, held + sum(len(said.held) for said in lists[kind])


GENERATORS: dict[str, tuple[Generator, float]] = {
    "recall": (long_recall, 0.3),
    "reading": (reading, 0.5),
    "copy": (copy, 0.2),
}
