"""Words and facts: translations between English and nine languages, and what a child knows about the world.

The tables in nano/texts hold the values; every value is seen in training and what is held out are the wordings of
the questions, and for the split "values" pairs of fact and wording. The answer is one short sentence, the thinking the
fact itself in one line.
"""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nano.sample import Generator, Sample, Split
from nano.wordings import Wordings, casual, dialogue, reserved, typo, wordings

TEXTS = Path(__file__).parent / "texts"
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
SCRIPTS = ("Chinese", "Russian", "Japanese")


def _table(name: str) -> list[list[str]]:
    lines = (TEXTS / name).read_text(encoding="utf-8").splitlines()
    return [line.split(" | ") for line in lines if line and not line.startswith("#")]


# ------------------------------------------------------------------------------------------------------ translations

# {w}: the word in quotes; {L}: the other language. From English, into English, and asked in the language itself.
FROM_ENGLISH = wordings("""
    What is {w} in {L}?
    How do you say {w} in {L}?
    Translate {w} into {L}.
    Translate {w} to {L}.
    What's the {L} word for {w}?
    What is the {L} for {w}?
    How would you say {w} in {L}?
    {w} in {L}?
    {L} for {w}?
    Give me the {L} translation of {w}.
    Please translate {w} into {L}.
    Can you translate {w} to {L}?
    How do I say {w} in {L}?
    I need the {L} word for {w}.
    Say {w} in {L}.
    Tell me how to say {w} in {L}.
    Translate the English {w} into {L}, please.
    In {L}, what is {w}?
    Do you know the {L} translation of {w}?
    What do people who speak {L} say for {w}?
    I'm learning {L}. What is {w}?
    Which {L} word means {w}?
    English to {L}: {w}
    Could you tell me what {w} is called in {L}?
    How is {w} said in {L}?
    Put {w} into {L}.
    I want to say {w} in {L}. How do I do that?
    What would {w} be in {L}?
    I forgot how to say {w} in {L}. Can you help?
    Translate {w}, an English word, into {L}.
    Translate the word {w} into {L}.
    Translate the English word {w} to {L}.
    What is the {L} translation of {w}?
    What is the English word {w} in {L}?
    Translate from English to {L}: {w}
    Translate into {L}: {w}
    Translation of {w} into {L}?
    Please say {w} in {L}.
    Into {L}, please: {w}
    How does one say {w} in {L}?
    From English into {L}, what is {w}?
    What is the word for {w} in {L}?
    Write {w} in {L}.
    {w}, in {L}, please
    The English {w}, what is it in {L}?
    Do you know {w} in {L}?
    Can you say {w} in {L}?
""")
INTO_ENGLISH = wordings("""
    What does the {L} word {w} mean?
    What does {w} mean in English?
    Translate {w} from {L} into English.
    Translate the {L} {w} to English.
    What is {w} in English?
    How do you say {w} in English?
    {L} to English: {w}
    What is the English for the {L} {w}?
    Give me the English translation of the {L} word {w}.
    Please translate {w} into English. It is {L}.
    Can you translate {w} from {L}?
    I read {w} in a {L} text. What does it mean?
    Tell me what {w} means in English.
    What is the meaning of the {L} word {w}?
    In {L}, what does {w} mean?
    What does {w} mean in {L}?
    Which English word is {w} in {L}?
    {w} is {L}. What is it in English?
    I don't understand the {L} word {w}. What is it in English?
    What do they mean by {w} in {L}?
    What is the {L} word {w} in English?
    Translate the {L} word {w} into English.
    Translate from {L} to English: {w}
    Translate into English from {L}: {w}
    What is the English translation of the {L} {w}?
    What does {w}, a {L} word, mean in English?
    The {L} word {w}, what is it in English?
    What does the {L} {w} mean?
    {w} is a {L} word. What does it mean?
    {w} is a {L} word. What is it in English?
    I saw {w} in a {L} book. What is it in English?
    Tell me the English for the {L} word {w}.
    Someone said {w} in {L}. What does it mean in English?
    {w} from {L} to English, please
    How do I translate the {L} word {w} into English?
    Please tell me what the {L} word {w} means.
    What do you call the {L} {w} in English?
    Meaning of {w} in {L}?
    From {L} into English, what is {w}?
    Do you know what the {L} word {w} means?
    English for the {L} {w}?
    Give me the English for the {L} {w}.
    Please tell me what {w} means in {L}.
    I want to know what the {L} word {w} means.
    Please tell me the meaning of {w} in {L}.
    Say what the {L} {w} means.
    Can you tell me what the {L} {w} means?
    Explain what the {L} word {w} means in English.
    Do you know what {w} means in {L}?
    What would {w} be in English? It is {L}.
    Please say in English what the {L} word {w} means.
    Which meaning does the {L} word {w} have?
    I wonder what {w} means in {L}.
    The {L} {w} means what in English?
""")
# asked in the language itself; {T} is its own name, or what it calls English
_LOCAL = {
    "German": """
        Was heißt {w} auf {T}?
        Wie sagt man {w} auf {T}?
        Übersetze {w} ins {T}e.
        Was bedeutet {w} auf {T}?
        Was ist {w} auf {T}?
        Wie heißt {w} auf {T}?
        Wie lautet {w} auf {T}?
        Bitte übersetze {w} ins {T}e.
        Kannst du {w} ins {T}e übersetzen?
        Sag mir, was {w} auf {T} heißt.
        Weißt du, was {w} auf {T} heißt?
        Wie würde man {w} auf {T} sagen?
        {w} auf {T}?
        Ich möchte {w} auf {T} sagen.
        Nenne mir {w} auf {T}.
        Übersetz mal {w} ins {T}e.
    """,
    "French": """
        Comment dit-on {w} en {T} ?
        Que veut dire {w} en {T} ?
        Traduis {w} en {T}.
        Que signifie {w} en {T} ?
        Comment est-ce qu'on dit {w} en {T} ?
        Quel est le mot {T} pour {w} ?
        Peux-tu traduire {w} en {T} ?
        Traduis en {T} : {w}
        Dis-moi comment on dit {w} en {T}.
        Tu sais comment on dit {w} en {T} ?
        Comment dire {w} en {T} ?
        C'est quoi {w} en {T} ?
        {w} en {T} ?
        Traduisez {w} en {T}, s'il vous plaît.
        Donne-moi {w} en {T}.
        Je cherche le mot {T} pour {w}.
    """,
    "Spanish": """
        ¿Cómo se dice {w} en {T}?
        ¿Qué significa {w} en {T}?
        Traduce {w} al {T}.
        ¿Qué quiere decir {w} en {T}?
        ¿Cómo digo {w} en {T}?
        ¿Cuál es la palabra para {w} en {T}?
        ¿Puedes traducir {w} al {T}?
        Traduce al {T}: {w}
        Dime cómo se dice {w} en {T}.
        ¿Sabes cómo se dice {w} en {T}?
        ¿Qué es {w} en {T}?
        ¿{w} en {T}?
        Por favor, traduce {w} al {T}.
        Busco la palabra {w} en {T}.
        Quiero decir {w} en {T}.
        Dame {w} en {T}.
    """,
    "Italian": """
        Come si dice {w} in {T}?
        Cosa significa {w} in {T}?
        Traduci {w} in {T}.
        Che vuol dire {w} in {T}?
        Come dico {w} in {T}?
        Qual è la parola {T} per {w}?
        Puoi tradurre {w} in {T}?
        Traduci in {T}: {w}
        Dimmi come si dice {w} in {T}.
        Sai come si dice {w} in {T}?
        Cos'è {w} in {T}?
        {w} in {T}?
        Per favore, traduci {w} in {T}.
        Cerco la parola {w} in {T}.
        Voglio dire {w} in {T}.
        Dammi {w} in {T}.
    """,
    "Portuguese": """
        Como se diz {w} em {T}?
        O que significa {w} em {T}?
        Traduza {w} para o {T}.
        O que quer dizer {w} em {T}?
        Como digo {w} em {T}?
        Qual é a palavra para {w} em {T}?
        Você pode traduzir {w} para o {T}?
        Traduza para o {T}: {w}
        Diga-me como se diz {w} em {T}.
        Sabe como se diz {w} em {T}?
        O que é {w} em {T}?
        {w} em {T}?
        Por favor, traduza {w} para o {T}.
        Procuro a palavra {w} em {T}.
        Quero dizer {w} em {T}.
        Como é {w} em {T}?
    """,
    "Dutch": """
        Wat is {w} in het {T}?
        Hoe zeg je {w} in het {T}?
        Vertaal {w} naar het {T}.
        Wat betekent {w} in het {T}?
        Hoe zeg ik {w} in het {T}?
        Wat is het {T}e woord voor {w}?
        Kun je {w} naar het {T} vertalen?
        Vertaal naar het {T}: {w}
        Zeg me hoe je {w} in het {T} zegt.
        Weet je hoe je {w} in het {T} zegt?
        Hoe heet {w} in het {T}?
        {w} in het {T}?
        Vertaal alsjeblieft {w} in het {T}.
        Ik zoek {w} in het {T}.
        Wat zegt men voor {w} in het {T}?
        Geef mij {w} in het {T}.
    """,
}
OWN_NAMES = {  # language: (its own name for itself, for English)
    "German": ("Deutsch", "Englisch"),
    "French": ("français", "anglais"),
    "Spanish": ("español", "inglés"),
    "Italian": ("italiano", "inglese"),
    "Portuguese": ("português", "inglês"),
    "Dutch": ("Nederlands", "Engels"),
}
LOCAL: dict[str, tuple[Wordings, Wordings]] = {  # (from English, into English)
    language: (wordings(text.replace("{T}", own)), wordings(text.replace("{T}", english)))
    for (language, text), (own, english) in zip(_LOCAL.items(), OWN_NAMES.values(), strict=True)
}
# how an answer in the language begins
IS = {
    "German": "{w} heißt auf {L} {a}.",
    "French": "{w} se dit {a} en {L}.",
    "Spanish": "{w} se dice {a} en {L}.",
    "Italian": "{w} si dice {a} in {L}.",
    "Portuguese": "{w} se diz {a} em {L}.",
    "Dutch": "{w} is {a} in het {L}.",
}


class Pair(NamedTuple):
    """A word or phrase in English and in one other language."""

    english: str
    language: str
    foreign: str
    meanings: tuple[str, ...]  # every English word of the table with this translation


def _pairs() -> list[Pair]:
    rows = [(row[0], LANGUAGES, row[1:]) for row in [*_table("lexicon.txt"), *_table("phrases.txt")]]
    rows += [(row[0], SCRIPTS, row[1:]) for row in _table("lexicon_scripts.txt")]
    meanings: dict[tuple[str, str], list[str]] = {}
    for english, languages, words in rows:
        for language, word in zip(languages, words, strict=True):
            meanings.setdefault((language, word.lower()), []).append(english)
    return [
        Pair(english, language, word, tuple(meanings[language, word.lower()]))
        for english, languages, words in rows
        for language, word in zip(languages, words, strict=True)
    ]


PAIRS = _pairs()
SPOKEN_IN: dict[str, set[str]] = {}
for _pair in PAIRS:
    SPOKEN_IN.setdefault(_pair.foreign.lower(), set()).add(_pair.language)


def lexicon(rng: random.Random, split: Split) -> Sample:
    """A word or phrase translated from or into English."""
    while True:
        pair = rng.choice(PAIRS)
        out = rng.random() < 0.43  # out of English, which is easier to learn than into it
        local = pair.language in LOCAL and rng.random() < 0.25
        said = (LOCAL[pair.language] if local else (FROM_ENGLISH, INTO_ENGLISH))[0 if out else 1].pick(rng, split)
        if not (out or local or "{L}" in said) and len(SPOKEN_IN[pair.foreign.lower()]) > 1:
            continue  # without the language's name the question would have two answers
        if split == "families" or reserved(pair[:3], out, said) == (split == "values"):
            break
    asked, answers = (pair.english, (pair.foreign,)) if out else (pair.foreign, pair.meanings)
    answer = pair.foreign if out else pair.english
    quote = rng.choices(('"{}"', "'{}'", "{}"), (6, 2, 2 if out or local else 1))[0]
    if len(asked.split()) > 2 and quote == "{}":
        quote = '"{}"'
    template = typo(rng, said) if split == "train" and rng.random() < 0.03 else said
    prompt = casual(rng, template.replace("{w}", quote.format(asked)).replace("{L}", pair.language))
    target = pair.language if out else "English"
    if local:
        name = OWN_NAMES[pair.language][0 if out else 1]
        content = IS[pair.language].format(w=f'"{asked}"', L=name, a=f'"{answer}"')
    elif out:
        content = f'"{asked}" in {pair.language} is "{answer}".'
    else:
        content = f'The {pair.language} "{asked}" means "{answer}" in English.'
    source = "English" if out else pair.language
    thought = f"{source} -> {target}: {asked} = {answer}"
    check = {"contains_any": [f'"{word}"' for word in answers]}  # in quotes, since "e" is in most sentences
    return dialogue(rng, split, "lexicon", prompt, thought, content, check)


# --------------------------------------------------------------------------------------------------------------- facts


class Relation(NamedTuple):
    """A kind of fact: its rows, its wordings, and how the answer reads. All three name the columns {0}, {1}, ..."""

    name: str
    rows: list[list[str]]
    asked: Wordings
    answer: str
    accepted: Callable[[list[str]], list[str]]
    weight: float


def _sections() -> dict[str, list[list[str]]]:
    sections: dict[str, list[list[str]]] = {}
    name = ""
    for line in (TEXTS / "facts.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line[1 : line.index("]")]
            sections[name] = []
        elif line:
            sections[name].append(line.split(" | "))
    return sections


def column(i: int) -> Callable[[list[str]], list[str]]:
    """The answers that a row allows: column `i` alone."""
    return lambda row: [row[i]]


NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905


def number(i: int) -> Callable[[list[str]], list[str]]:
    """The answers that a row allows: column `i`, a number, in digits, and up to twelve also as a word."""
    return lambda row: [row[i], *([NUMBER_WORDS[int(row[i])]] if int(row[i]) < len(NUMBER_WORDS) else [])]


# common ways of asking for "{x}", a noun phrase such as "the capital of France"; each relation adds its own
NOUN_WAYS = """
    What is {x}?
    What's {x}?
    Tell me {x}.
    Do you know {x}?
    Can you tell me {x}?
    Please name {x}.
    Name {x}.
    Could you tell me what {x} is?
    I would like to know {x}.
    {x}?
    Give me {x}.
    I forgot {x}. Do you know it?
    Quick question: what is {x}?
    hey, what is {x}
    Do you happen to know what {x} is?
    Remind me: what is {x}?
    I wonder what {x} is.
    For my homework: what is {x}?
"""


def ways(noun: str, extra: str) -> Wordings:
    """The common ways of asking for `noun`, and a relation's own questions, one per line."""
    common = "\n".join(line.replace("{x}", noun) for line in NOUN_WAYS.strip().splitlines())
    return wordings(common + "\n" + extra.strip())


def _relations() -> list[Relation]:
    rows = _sections()
    country = rows["country"]
    months = "January February March April May June July August September October November December".split()  # noqa: SIM905
    days = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905
    after = [[days[i], days[(i + 1) % 7], "day"] for i in range(7)]
    after += [[months[i], months[(i + 1) % 12], "month"] for i in range(12)]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    letters = [[alphabet[i], alphabet[i + 1]] for i in range(25)]
    return [
        Relation("capital", country, ways("the capital of {0}", """
            Which city is the capital of {0}?
            What city is {0}'s capital?
            What is the capital city of {0}?
            Capital of {0}
            Where is the government of {0}, in which capital?
            Which capital does {0} have?
            {0} has which capital?
            The capital of {0} is called what?
        """), "The capital of {0} is {1}.", column(1), 3.0),
        Relation("capital of", [row for row in country if row[0] != "Singapore"], wordings("""
            {1} is the capital of which country?
            Which country has {1} as its capital?
            Which country's capital is {1}?
            What country is {1} the capital of?
            Of which country is {1} the capital?
            In which country is {1}?
            Where is {1}?
            {1} is in which country?
            What country is {1} in?
            Name the country whose capital is {1}.
            Tell me which country {1} is the capital of.
            Do you know which country {1} belongs to?
            {1} is a capital. Of which country?
            Which country does {1} belong to?
            The city {1}: which country is it in?
            Can you tell me in which country {1} lies?
            I am flying to {1}. Which country is that?
            {1} is located in what country?
            To which country does {1} belong?
            In what country would I find {1}?
        """), "{1} is the capital of {0}.", lambda row: [row[0].removeprefix("the ")], 1.5),
        Relation("continent", country, ways("the continent of {0}", """
            On which continent is {0}?
            Which continent is {0} on?
            In which part of the world is {0}?
            {0} is on which continent?
            What continent does {0} belong to?
            What continent is {0} in?
            To which continent does {0} belong?
            Where in the world is {0}, on which continent?
        """), "{0} is in {2}.", column(2), 1.5),
        Relation("currency", country, ways("the currency of {0}", """
            Which currency is used in {0}?
            What money do they use in {0}?
            How do people pay in {0}, in which currency?
            What currency does {0} use?
            What currency do I need in {0}?
            I travel to {0}. Which currency do I need?
            What is the money of {0} called?
            {0}'s currency is what?
        """), "The currency of {0} is the {3}.", column(3), 1.5),
        Relation("language", [row for row in country if row[4]], ways("the main language of {0}", """
            Which language is spoken in {0}?
            What language do they speak in {0}?
            What do people speak in {0}?
            What language do people in {0} speak?
            Name an official language of {0}.
            What is an official language of {0}?
            I travel to {0}. Which language will I hear?
        """), "In {0} people speak {4}.", column(4), 1.0),
        Relation("opposite", rows["opposite"], ways('the opposite of "{0}"', """
            What is the opposite of {0}?
            Opposite of {0}
            Which word means the opposite of "{0}"?
            What is the antonym of {0}?
            Give an antonym of "{0}".
            Which word is the opposite of {0}?
            "{0}" is the opposite of what?
            Which word is the contrary of "{0}"?
        """), 'The opposite of "{0}" is "{1}".', column(1), 1.5),
        Relation("plural", rows["plural"], ways('the plural of "{0}"', """
            What is the plural of {0}?
            One {0}, two ...?
            How do you write the plural of {0}?
            Plural of {0}
            Give me the plural form of {0}.
            What is the plural form of "{0}"?
            How do I say more than one {0}?
            One {0}, many what?
        """), 'The plural of "{0}" is "{1}".', column(1), 1.2),
        Relation("past", rows["past"], ways('the past tense of "{0}"', """
            What is the past tense of {0}?
            Past tense of {0}
            What is the simple past of "{0}"?
            How do you say {0} in the past tense?
            Put "{0}" into the past tense.
            Today I {0}, yesterday I ...?
            What is the past form of the verb {0}?
        """), 'The past tense of "{0}" is "{1}".', column(1), 1.0),
        Relation("sound", rows["sound"], ways("the sound of a {0}", """
            What sound does a {0} make?
            Which sound does the {0} make?
            How does a {0} sound?
            What noise does a {0} make?
            What does a {0} say?
            A {0} makes what sound?
            What sound do you hear from a {0}?
        """), 'The sound of a {0} is "{1}".', column(1), 0.6),
        Relation("young", rows["young"], ways("the word for a young {0}", """
            What is a baby {0} called?
            What do you call a young {0}?
            What is a young {0} called?
            How do you call the baby of a {0}?
            What is the name for a baby {0}?
            A young {0} is called what?
            What do you call a baby {0}?
        """), "A young {0} is called a {1}.", column(1), 0.6),
        Relation("colour", rows["colour"], ways("the color of {0}", """
            What color is {0}?
            Which color does {0} have?
            What colour is {0}?
            What is the colour of {0}?
            {0} has which color?
            Which color is {0}?
            What colour does {0} have?
        """), "The color of {0} is {1}.", column(1), 0.8),
        Relation("legs", rows["legs"], ways("the number of legs of {0}", """
            How many legs does {0} have?
            How many legs has {0}?
            {0} has how many legs?
            On how many legs does {0} walk?
            Count the legs of {0}.
            What number of legs does {0} have?
        """), "The number of legs of {0} is {1}.", number(1), 0.6),
        Relation("symbol", rows["symbol"], ways("the chemical symbol of {0}", """
            What is the symbol for {0}?
            Chemical symbol for {0}
            Which symbol does {0} have in the periodic table?
            What is the chemical symbol for {0}?
            How is {0} written in chemistry, as a symbol?
            What letters stand for {0} in the periodic table?
            Which chemical symbol stands for {0}?
        """), "The chemical symbol of {0} is {1}.", lambda row: [f"is {row[1]}."], 1.0),
        Relation("element", rows["symbol"], ways("the element with the symbol {1}", """
            Which element has the symbol {1}?
            What element does {1} stand for?
            In chemistry, what does {1} mean?
            The chemical symbol {1} stands for which element?
            Which chemical element is {1}?
            What does {1} stand for in the periodic table?
        """), "The symbol {1} stands for {0}.", column(0), 1.0),
        Relation("atomic number", rows["symbol"], ways("the atomic number of {0}", """
            Which atomic number does {0} have?
            How many protons does an atom of {0} have?
            What number is {0} in the periodic table?
            How many protons are in {0}?
            Which number does {0} have in the periodic table?
        """), "The atomic number of {0} is {2}.", number(2), 0.8),
        Relation("unit", rows["unit"], ways("the number of {0} in a {1}", """
            How many {0} are in a {1}?
            How many {0} are there in one {1}?
            How many {0} does a {1} have?
            One {1} is how many {0}?
            A {1} has how many {0}?
            How many {0} make a {1}?
            how many {0} in a {1}
        """), "There are {2} {0} in a {1}.", number(2), 1.2),
        Relation("planet", rows["planet"], ways("the {0} planet from the Sun", """
            Which planet is the {0} from the Sun?
            Which planet is {0} in order from the Sun?
            What planet is the {0} one from the Sun?
            Counting from the Sun, which planet is {0}?
            Which is the {0} planet of the solar system?
        """), "The {0} planet from the Sun is {1}.", column(1), 0.4),
        Relation("next", after, ways("the {2} after {0}", """
            Which {2} comes after {0}?
            What {2} follows {0}?
            What comes after {0}?
            Today it is {0}. What is the next {2}?
            Which {2} is next after {0}?
            {0} is followed by which {2}?
        """), "The {2} after {0} is {1}.", column(1), 0.6),
        Relation("previous", after, ways("the {2} before {1}", """
            Which {2} comes before {1}?
            Which {2} is before {1}?
            What comes before {1}?
            Which {2} comes right before {1}?
            {1} comes after which {2}?
        """), "The {2} before {1} is {0}.", column(0), 0.6),
        Relation("letter", letters, ways("the letter after {0} in the alphabet", """
            Which letter comes after {0}?
            What letter follows {0} in the alphabet?
            Which letter is next after {0} in the alphabet?
            In the alphabet, what comes after {0}?
            What is the next letter after {0}?
        """), "The letter after {0} is {1}.", lambda row: [f"is {row[1]}"], 0.4),
        Relation("author", rows["wrote"], ways('the author of "{0}"', """
            Who wrote "{0}"?
            Who wrote {0}?
            Who is the author of {0}?
            Which author wrote {0}?
            By whom is "{0}"?
            Who was {0} written by?
            The book "{0}" was written by whom?
            Which writer wrote "{0}"?
        """), '"{0}" was written by {1}.', lambda row: [row[1].split()[-1]], 1.0),
        Relation("maker", rows["made"], wordings("""
            Who {2} {0}?
            Who was it that {2} {0}?
            Tell me who {2} {0}.
            Do you know who {2} {0}?
            Can you tell me who {2} {0}?
            Which person {2} {0}?
            Please name the person who {2} {0}.
            I would like to know who {2} {0}.
            {0} was {2} by whom?
            Quick question: who {2} {0}?
            hey, who {2} {0}
            Remind me: who {2} {0}?
            I wonder who {2} {0}.
            For my homework: who {2} {0}?
            By whom was {0} {2}?
            I forgot who {2} {0}. Do you know it?
            Who is the person that {2} {0}?
            Give me the name of the person who {2} {0}.
            What is the name of the person who {2} {0}?
            {0}: {2} by whom?
        """), "{1} {2} {0}.", lambda row: [row[1].split()[-1]], 1.0),
    ]  # fmt: skip


RELATIONS = _relations()

# {q}: the question as it is; {i}: the same as an indirect question
SCIENCE_WAYS = wordings("""
    {q}
    Can you tell me {i}?
    Do you know {i}?
    Explain {i}.
    Tell me {i}.
    Quick question: {q}
    I would like to know {i}.
    My son asks {i}.
    Could you explain {i}?
    In one sentence: {q}
    For my homework: {q}
    I wonder {i}.
    Please explain briefly {i}.
    {q} Please answer in one sentence.
    Science question: {q}
    hey, {q}
    I never understood {i}.
    Please tell me {i}.
    {q} Keep it short.
    Explain to a child {i}.
""")
SCIENCE = _table("science.txt")

CAPITALS_ABROAD = {
    "German": wordings("""
        Was ist die Hauptstadt {c}?
        Wie heißt die Hauptstadt {c}?
        Welche Stadt ist die Hauptstadt {c}?
        Kennst du die Hauptstadt {c}?
        Nenne mir die Hauptstadt {c}.
    """),
    "French": wordings("""
        Quelle est la capitale {c} ?
        Quelle ville est la capitale {c} ?
        Comment s'appelle la capitale {c} ?
        Tu connais la capitale {c} ?
        Donne-moi la capitale {c}.
    """),
    "Spanish": wordings("""
        ¿Cuál es la capital {c}?
        ¿Qué ciudad es la capital {c}?
        ¿Cómo se llama la capital {c}?
        ¿Conoces la capital {c}?
        Dime la capital {c}.
    """),
    "Italian": wordings("""
        Qual è la capitale {c}?
        Quale città è la capitale {c}?
        Come si chiama la capitale {c}?
        Conosci la capitale {c}?
        Dimmi la capitale {c}.
    """),
    "Portuguese": wordings("""
        Qual é a capital {c}?
        Que cidade é a capital {c}?
        Como se chama a capital {c}?
        Você conhece a capital {c}?
        Diga-me a capital {c}.
    """),
    "Dutch": wordings("""
        Wat is de hoofdstad {c}?
        Welke stad is de hoofdstad {c}?
        Hoe heet de hoofdstad {c}?
        Ken je de hoofdstad {c}?
        Noem de hoofdstad {c}.
    """),
}
CAPITAL_IS = {
    "German": "Die Hauptstadt {c} ist {a}.",
    "French": "La capitale {c} est {a}.",
    "Spanish": "La capital {c} es {a}.",
    "Italian": "La capitale {c} è {a}.",
    "Portuguese": "A capital {c} é {a}.",
    "Dutch": "De hoofdstad {c} is {a}.",
}
ABROAD = _sections()["local"]
# the days and months, in order, from the lexicon; (what comes after X?, the answer)
AFTER_ABROAD = {
    "German": ("Welcher Tag kommt nach {0}?", "Nach {0} kommt {1}."),
    "French": ("Quel jour vient après {0} ?", "Après {0} vient {1}."),
    "Spanish": ("¿Qué día viene después del {0}?", "Después del {0} viene el {1}."),
    "Italian": ("Quale giorno viene dopo {0}?", "Dopo {0} viene {1}."),
    "Portuguese": ("Que dia vem depois de {0}?", "Depois de {0} vem {1}."),
    "Dutch": ("Welke dag komt na {0}?", "Na {0} komt {1}."),
}
DAYS_ABROAD = {
    language: [row[i + 1] for row in _table("lexicon.txt") if row[0].endswith("day") and row[0][0].isupper()]
    for i, language in enumerate(LANGUAGES)
}


def fact(rng: random.Random, split: Split) -> Sample:
    """One fact in one sentence: a relation of the tables, a science question, or a capital in another language."""
    kind = rng.random()
    if kind < 0.6:
        return _relation(rng, split)
    if kind < 0.85:
        return _science(rng, split)
    return _abroad(rng, split)


def _relation(rng: random.Random, split: Split) -> Sample:
    while True:
        relation = rng.choices(RELATIONS, WEIGHTS)[0]
        row = rng.choice(relation.rows)
        said = relation.asked.pick(rng, split)
        if split == "families" or reserved(row, said) == (split == "values"):
            break
    template = typo(rng, said) if split == "train" and rng.random() < 0.05 else said
    answer = _sentence(relation.answer, row)
    prompt = casual(rng, _sentence(template, row))
    check: dict[str, Any] = {"contains_any": relation.accepted(row)}
    return dialogue(rng, split, "fact", prompt, f"{relation.name}: {_recall(relation, row)}.", answer, check)


def _recall(relation: Relation, row: list[str]) -> str:
    return " = ".join(row[int(place)] for place in re.findall(r"\{(\d)\}", relation.answer))


def _sentence(template: str, row: list[str]) -> str:
    for i, part in enumerate(row):
        template = template.replace(f"{{{i}}}", part)
    if template.startswith("the "):
        template = "T" + template[1:]
    for wrong, right in ARTICLES:
        template = template.replace(wrong, right)
    return template


ARTICLES = tuple(
    (f" a {word}", f" an {word}")
    for word in "owl elephant eagle hour English octagon ox eaglet owlet inch ounce".split()  # noqa: SIM905
)
WEIGHTS = [relation.weight for relation in RELATIONS]


def _science(rng: random.Random, split: Split) -> Sample:
    while True:
        question, indirect, answer, keys = rng.choice(SCIENCE)
        said = SCIENCE_WAYS.pick(rng, split)
        if split == "families" or reserved(question, said) == (split == "values"):
            break
    if split == "train" and rng.random() < 0.05:
        question, indirect = typo(rng, question), typo(rng, indirect)
    prompt = casual(rng, said.replace("{q}", question).replace("{i}", indirect))
    return dialogue(rng, split, "fact", prompt, f"Recall: {answer}", answer, {"contains_any": keys.split(", ")})


def _abroad(rng: random.Random, split: Split) -> Sample:
    while True:
        language = rng.choice(LANGUAGES)
        at = LANGUAGES.index(language)
        if split != "families" and rng.random() < 0.15:
            days = DAYS_ABROAD[language]
            i = rng.randrange(7)
            said, shape = AFTER_ABROAD[language]
            key, names = days[i], (days[i], days[(i + 1) % 7])
            question, answer, value = said.format(*names), shape.format(*names), names[1]
        else:
            row = rng.choice(ABROAD)
            key, value = row[1 + at], row[7 + at]
            said = CAPITALS_ABROAD[language].pick(rng, split)
            question, answer = said.replace("{c}", key), CAPITAL_IS[language].format(c=key, a=value)
        if split == "families" or reserved(key, said) == (split == "values"):
            break
    prompt = casual(rng, question)
    return dialogue(rng, split, "fact", prompt, f"Answer in {language}: {value}.", answer, {"contains_any": [value]})


def families(kind: str) -> tuple[int, int]:
    """How many wordings of `kind` are for training and how many are held out."""
    local = [said for both in LOCAL.values() for said in both]
    lists = {
        "lexicon": [FROM_ENGLISH, INTO_ENGLISH, *local],
        "fact": [*(relation.asked for relation in RELATIONS), SCIENCE_WAYS, *CAPITALS_ABROAD.values()],
    }[kind]
    return sum(len(said.train) for said in lists), sum(len(said.held) for said in lists)


GENERATORS: dict[str, tuple[Generator, float]] = {"lexicon": (lexicon, 0.68), "fact": (fact, 0.32)}
