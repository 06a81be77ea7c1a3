"""Short Python functions asked for in words.

Two grammars make most of them: filter x map x aggregate over a list, and small formulas and conditions on one number.
The rest is a shelf of classic little functions. The plan in the thinking names the function, its parameters and the
steps in one canonical form, so that every wording leads to the same code. The classics are also asked for in a few
words or by their names alone. One composition in five is held out whole.
"""

import random
import re
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nano.sample import Generator, Sample, Split
from nano.wordings import INSTANT, Wordings, casual, reserved, terms, wordings

Inputs = Callable[[random.Random], tuple[Any, ...]]


class Task(NamedTuple):
    """One function to write. The lines of `body` are indented already; `inputs` draws one call's arguments."""

    name: str  # when the user gives none
    parameters: tuple[str, ...]
    plan: str
    body: str
    inputs: Inputs


class Asked(NamedTuple):
    """A task in words. {x} in `description` is the argument: `again` where the sentence has named it, else `first`."""

    task: Task
    description: str  # a noun phrase, or with `steps` verbs: "squares each of them and returns the sum"
    takes: str  # "a list of numbers xs"
    first: str
    again: str
    wording: Split  # which wordings the sentence around it is taken from
    canonical: tuple[str, ...]  # the parameters' names when the user gives none
    steps: bool = False
    brief: str = ""  # "phrase": a short sentence says it all; "name": the name of the function does


# -------------------- asking

# {d}: what it returns, as a noun; {f}: "NAME" or "NAME(a, b)"; {p}: "a list of numbers `values`" or "`n`"
NAMED = wordings("""
    Write a Python function {f} that returns {d}.
    Write a function {f} that takes {p} and returns {d}.
    Write a function called {f} that returns {d}.
    Please write a Python function named {f}. It takes {p} and returns {d}.
    I need a function {f} which takes {p} and gives back {d}.
    Can you write {f} in Python? It should return {d}.
    Implement {f}, a function that takes {p} and returns {d}.
    Give me a Python function {f} that computes {d}.
    Create a function named {f} which returns {d}.
    In Python, define {f} so that it returns {d}.
    Define a function {f}. It gets {p} and must return {d}.
    Could you write me a function {f} that returns {d}?
    Python: function {f}, takes {p}, returns {d}.
    Make a function called {f} taking {p} that returns {d}.
    I'd like a short function {f} that works out {d}.
    Code a Python function {f}: given {p}, return {d}.
    Help me write {f}. Given {p} it returns {d}.
    Show me a function named {f} that takes {p} and computes {d}.
    Please implement a function {f} that gives {d}.
    {f} should take {p} and return {d}. Write it in Python.
""")
NAMELESS = wordings("""
    Write a Python function that returns {d}.
    Write a function that takes {p} and returns {d}.
    Please write a short Python function. It takes {p} and returns {d}.
    I need a function which takes {p} and gives back {d}.
    Can you write Python code for {d}?
    Give me a Python function that computes {d}.
    How do I get {d} in Python?
    Create a function which returns {d}.
    In Python, define a function that returns {d}.
    Could you write me a function that returns {d}?
    Make a function taking {p} that returns {d}.
    I'd like a short function that works out {d}.
    Code a Python function: given {p}, return {d}.
    Show me a Python function for {d}.
    python function for {d}
    Help me write a function that returns {d}.
    What does a Python function that returns {d} look like?
    I want to compute {d}. Write the function.
    Please implement a function that gives {d}.
    Write code in Python that takes {p} and computes {d}.
""")
# the same for tasks told step by step: {s} is "keeps the even ones, squares each of them and returns the sum"
STEPS_NAMED = wordings("""
    Write a Python function {f} that takes {p}, {s}.
    Write {f}: it takes {p}, {s}.
    I need a function called {f} that takes {p}, {s}.
    Implement a function named {f} which gets {p}, {s}.
    Please write the function {f}. It takes {p}, {s}.
    Can you write a function {f} that takes {p}, {s}?
    Define {f} in Python. It receives {p}, {s}.
    Create a Python function {f}, which takes {p}, {s}.
    Python function {f}: takes {p}, {s}.
    Give me a function {f} that gets {p}, {s}.
""")
STEPS_NAMELESS = wordings("""
    Write a Python function that takes {p}, {s}.
    I need a function that takes {p}, {s}.
    Implement a function which gets {p}, {s}.
    Please write a function. It takes {p}, {s}.
    Can you write a function that takes {p}, {s}?
    Define a Python function that receives {p}, {s}.
    Create a function which takes {p}, {s}.
    Python function: takes {p}, {s}.
    Give me a function that gets {p}, {s}.
    How do I write a function that takes {p}, {s}?
""")

# short requests for the shelf: {s} is a verb phrase such as "adds two numbers"
BRIEF_NAMELESS = wordings("""
    Write a Python function that {s}.
    Write a function that {s}.
    Please write a function that {s}.
    Python function that {s}
    a function that {s}
    I need a Python function that {s}.
    Give me a function that {s}.
    Can you write a function that {s}?
    Can you code a function that {s}?
    Could you write a Python function which {s}?
    Implement a function that {s}.
    Create a Python function that {s}.
    Show me a Python function that {s}.
    How do I write a function that {s}?
    Define a function which {s}.
    Code in Python: a function that {s}
    Make a function that {s}.
    Python: write a function that {s}
    I want a function that {s}.
    python code that {s}
""")
BRIEF_NAMED = wordings("""
    Write a Python function {f} that {s}.
    Write a function {f} that {s}.
    Please write a function called {f} that {s}.
    Write a function named {f} that {s}.
    I need a Python function {f} that {s}.
    Give me a function {f} that {s}.
    Can you write a function {f} that {s}?
    Could you write {f}, which {s}?
    Implement {f}. It {s}.
    Create a Python function {f} that {s}.
    Define a function {f} which {s}.
    Make a function called {f} that {s}.
    {f}: a function that {s}
    Write {f} in Python. It {s}.
    Python function {f} that {s}
    The function {f} {s}. Write it.
    Code {f}, a function that {s}.
    Please implement {f} that {s}.
    Help me with {f}: it {s}.
    Show me {f}, a function that {s}.
""")
NAME_ONLY = wordings("""
    Write a function {f}.
    Write a Python function {f}.
    function {f}
    {f} in python
    write {f}
    Implement {f}.
    Please write the function {f}.
    Python function {f}
    Code {f} in Python.
    Can you write {f}?
    I need {f} in Python.
    Give me the Python function {f}.
    Define {f}.
    {f} please
    def {f}
    Write the function {f} in Python, please.
    Show me how to write {f} in Python.
    Create the function {f}.
    How would you implement {f} in Python?
    write code for {f}
""")

VERBS = terms(
    "get compute calc calculate find make process handle solve run do build work_out count_up check pick total handle "
    "apply reduce collect crunch evaluate determine fetch transform my the tally extract select produce"
)
NOUNS = terms(
    "result value values total items numbers data list answer output score scores things it stuff word words text "
    "input figures points amount parts entries series batch target measure summary report sequence"
)
SINGLE = terms("f g h foo bar baz solve solution func fn helper process compute transform convert run task calc answer")
SYLLABLES = [c + v for c in terms("b d f g k l m n p r s t v z") for v in terms("a e i o u")]
LIST_NAMES = terms(
    "numbers values nums xs data lst elements entries scores seq arr points ints a array amounts sizes prices ages"
    " items"
)
WORD_LIST_NAMES = terms("words names strings items texts tokens labels lines parts tags entries strs terms")
NUMBER_NAMES = terms("n x num number value k a i m count amount val y")
TEXT_NAMES = terms("text s string word line sentence txt name phrase message t")


def function_name(rng: random.Random, canonical: str) -> str:
    """The function's own name, or one drawn at random, which need not say what the function does."""
    kind = rng.random()
    if kind < 0.25:
        return canonical
    if kind < 0.6:
        return f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    if kind < 0.75:
        return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))) + rng.choice(("", "", "n", "r", "_it", "x"))
    if kind < 0.85:
        return f"{rng.choice(NOUNS)}_{rng.choice(NOUNS)}"
    return rng.choice(SINGLE)


# -------------------- lists: filter, map, reduce


class Part(NamedTuple):
    """A filter, map or aggregate. `noun` wordings hold {x} (what they act on); `step` wordings are verb phrases."""

    label: str  # piece of the canonical name
    code: str  # over the element {v}; aggregates over the generator {g}
    plan: str
    noun: Wordings
    step: Wordings
    constant: str = ""  # "n", "letter" or "sep": what {k} is


def _part(label: str, code: str, plan: str, noun: str, step: str, constant: str = "") -> Part:
    """Noun and step wordings are separated by bars; the last of each list is held out."""

    def cut(text: str) -> Wordings:
        phrases = tuple(phrase.strip() for phrase in text.split("|"))
        assert len(phrases) >= 3, text
        held = (len(phrases) + 4) // 5
        return Wordings(phrases[:-held], phrases[-held:])

    return Part(label, code, plan, cut(noun), cut(step), constant)


NUMBER_FILTERS = [
    _part(
        "even",
        "{v} % 2 == 0",
        "keep the even ones",
        "the even numbers in {x} | all even values in {x} | the numbers in {x} that are even"
        " | every even number of {x}",
        "keeps only the even ones | drops the odd ones | ignores everything that is not even | picks the even numbers",
    ),
    _part(
        "odd",
        "{v} % 2 != 0",
        "keep the odd ones",
        "the odd numbers in {x} | all odd values in {x} | the numbers in {x} that are odd | every odd number of {x}",
        "keeps only the odd ones | drops the even ones | ignores everything that is not odd | picks the odd numbers",
    ),
    _part(
        "positive",
        "{v} > 0",
        "keep the positive ones",
        "the positive numbers in {x} | all positive values in {x} | the numbers in {x} greater than zero"
        " | every positive number of {x}",
        "keeps only the positive ones | drops zero and the negative ones | ignores everything that is not positive"
        " | picks the positive numbers",
    ),
    _part(
        "negative",
        "{v} < 0",
        "keep the negative ones",
        "the negative numbers in {x} | all negative values in {x} | the numbers in {x} less than zero"
        " | every negative number of {x}",
        "keeps only the negative ones | ignores everything that is not negative | drops zero and the positive ones"
        " | picks the negative numbers",
    ),
    _part(
        "above",
        "{v} > {k}",
        "keep those greater than {k}",
        "the numbers in {x} greater than {k} | all values above {k} in {x} | the numbers in {x} that are more than {k}"
        " | the numbers in {x} larger than {k} | every number above {k} of {x}",
        "keeps only the ones greater than {k} | keeps those above {k} | drops everything up to {k}"
        " | picks the numbers larger than {k}",
        "n",
    ),
    _part(
        "below",
        "{v} < {k}",
        "keep those less than {k}",
        "the numbers in {x} less than {k} | all values below {k} in {x} | the numbers in {x} that are under {k}"
        " | the numbers in {x} smaller than {k} | every number below {k} of {x}",
        "keeps only the ones less than {k} | keeps those below {k} | drops everything from {k} up"
        " | picks the numbers smaller than {k}",
        "n",
    ),
    _part(
        "at_least",
        "{v} >= {k}",
        "keep those at least {k}",
        "the numbers in {x} that are at least {k} | all values of at least {k} in {x} | the numbers in {x} that are"
        " {k} or more | every number of {x} that is at least {k}",
        "keeps only the ones that are at least {k} | drops everything below {k} | keeps those of {k} or more"
        " | picks the numbers that are at least {k}",
        "n",
    ),
    _part(
        "divisible",
        "{v} % {k} == 0",
        "keep those divisible by {k}",
        "the numbers in {x} divisible by {k} | all multiples of {k} in {x} | the numbers in {x} that can be divided by"
        " {k} | every number of {x} that is divisible by {k}",
        "keeps only the ones divisible by {k} | keeps the multiples of {k} | drops what is not divisible by {k}"
        " | picks the multiples of {k}",
        "n",
    ),
    _part(
        "nonzero",
        "{v} != 0",
        "keep those that are not zero",
        "the numbers in {x} that are not zero | all nonzero values in {x} | the nonzero numbers in {x}"
        " | every nonzero number of {x}",
        "drops the zeros | ignores the zeros | keeps only the nonzero ones | picks the numbers that are not zero",
    ),
]
NUMBER_MAPS = [
    _part(
        "squares",
        "{v} * {v}",
        "square each",
        "the squares of {x} | {x}, each squared | the squared values of {x} | each square of {x}",
        "squares each of them | multiplies each by itself | squares every one | takes the square of each",
    ),
    _part(
        "cubes",
        "{v} ** 3",
        "cube each",
        "the cubes of {x} | {x}, each cubed | the cubed values of {x} | each cube of {x}",
        "cubes each of them | raises each to the third power | cubes every one | takes the cube of each",
    ),
    _part(
        "doubled",
        "{v} * 2",
        "double each",
        "the doubles of {x} | {x}, each doubled | {x}, each multiplied by two | each double of {x}",
        "doubles each of them | multiplies each by two | doubles every one | takes the double of each",
    ),
    _part(
        "tripled",
        "{v} * 3",
        "triple each",
        "{x}, each tripled | the triples of {x} | {x}, each multiplied by three | each triple of {x}",
        "triples each of them | multiplies each by three | triples every one | takes the triple of each",
    ),
    _part(
        "absolute",
        "abs({v})",
        "take the absolute value of each",
        "the absolute values of {x} | {x} without their signs | {x}, each as its absolute value"
        " | each absolute value of {x}",
        "takes the absolute value of each | removes the sign of each | makes each of them absolute"
        " | takes the absolute values",
    ),
    _part(
        "negated",
        "-{v}",
        "negate each",
        "the negatives of {x} | {x}, each negated | {x} with the opposite sign | each negated value of {x}",
        "negates each of them | flips the sign of each | negates every one | takes the negative of each",
    ),
    _part(
        "plus",
        "{v} + {k}",
        "add {k} to each",
        "{x}, each plus {k} | {x}, each increased by {k} | {x} with {k} added to each | {x}, each {k} higher",
        "adds {k} to each of them | increases each by {k} | adds {k} to every one | makes each {k} higher",
        "n",
    ),
    _part(
        "minus",
        "{v} - {k}",
        "subtract {k} from each",
        "{x}, each minus {k} | {x}, each decreased by {k} | {x} with {k} subtracted from each | {x}, each {k} lower",
        "subtracts {k} from each of them | decreases each by {k} | subtracts {k} from every one | makes each {k} lower",
        "n",
    ),
    _part(
        "times",
        "{v} * {k}",
        "multiply each by {k}",
        "{x}, each times {k} | {x}, each multiplied by {k} | the products of {k} and {x} | {x} multiplied with {k}",
        "multiplies each of them by {k} | takes each times {k} | multiplies every one by {k}"
        " | takes the product of each and {k}",
        "n",
    ),
]
NUMBER_AGGREGATES = [
    _part(
        "list",
        "[{g}]",
        "return the list",
        "a list of {x} | the list of {x} | a new list with {x} | a list containing {x}",
        "returns the list | returns them as a list | gives back the new list | returns a list with the results",
    ),
    _part(
        "sum",
        "sum({g})",
        "return the sum",
        "the sum of {x} | the total of {x} | the result of adding up {x} | {x} added up",
        "returns the sum | adds them up | returns the total | gives back their sum",
    ),
    _part(
        "count",
        "sum(1 for ...)",
        "return how many there are",
        "the number of {x} | the count of {x} | how many there are of {x} | how often there are {x}",
        "returns how many there are | counts them | returns the count | gives back how many are left",
    ),
    _part(
        "max",
        "max({g})",
        "return the largest",
        "the largest of {x} | the maximum of {x} | the biggest of {x} | the highest of {x}",
        "returns the largest | returns the maximum | gives back the biggest | gives back the largest one",
    ),
    _part(
        "min",
        "min({g})",
        "return the smallest",
        "the smallest of {x} | the minimum of {x} | the least of {x} | the lowest of {x}",
        "returns the smallest | returns the minimum | gives back the least | gives back the smallest one",
    ),
    _part(
        "sorted",
        "sorted({g})",
        "return them sorted",
        "a sorted list of {x} | {x} in ascending order | {x}, sorted | the sorted list of {x}",
        "returns them sorted | sorts them and returns the list | returns the sorted list"
        " | gives back the results in ascending order",
    ),
    _part(
        "descending",
        "sorted({g}, reverse=True)",
        "return them sorted in descending order",
        "{x} in descending order | a list of {x} from largest to smallest | {x}, sorted in descending order"
        " | {x}, largest first",
        "returns them in descending order | sorts them from largest to smallest | returns them sorted, largest first"
        " | gives back the results in descending order",
    ),
    _part(
        "average",
        "sum({l}) / len({l})",
        "return the average",
        "the average of {x} | the mean of {x} | the average value of {x} | the mean value of {x}",
        "returns the average | returns the mean | returns their average | gives back the average value",
    ),
]
WORD_FILTERS = [
    _part(
        "longer",
        "len({v}) > {k}",
        "keep those longer than {k}",
        "the words in {x} longer than {k} characters | all strings in {x} with more than {k} letters"
        " | the strings in {x} that are longer than {k} | every word of {x} longer than {k}",
        "keeps only the ones longer than {k} characters | keeps those with more than {k} letters"
        " | drops the ones with {k} or fewer letters | picks the words longer than {k}",
        "n",
    ),
    _part(
        "shorter",
        "len({v}) < {k}",
        "keep those shorter than {k}",
        "the words in {x} shorter than {k} characters | all strings in {x} with fewer than {k} letters"
        " | the strings in {x} that are shorter than {k} | every word of {x} shorter than {k}",
        "keeps only the ones shorter than {k} characters | keeps those with fewer than {k} letters"
        " | drops the ones with {k} or more letters | picks the words shorter than {k}",
        "n",
    ),
    _part(
        "starting",
        "{v}.startswith({k})",
        "keep those that start with {k}",
        "the words in {x} that start with {k} | all strings in {x} beginning with {k} | the strings in {x} whose first"
        " letter is {k} | every word of {x} that begins with {k}",
        "keeps only the ones that start with {k} | keeps those beginning with {k} | drops the ones that do not start"
        " with {k} | picks the words that begin with {k}",
        "letter",
    ),
    _part(
        "ending",
        "{v}.endswith({k})",
        "keep those that end with {k}",
        "the words in {x} that end with {k} | all strings in {x} ending in {k} | the strings in {x} whose last"
        " letter is {k} | every word of {x} that ends in {k}",
        "keeps only the ones that end with {k} | keeps those ending in {k} | drops the ones that do not end"
        " with {k} | picks the words that end in {k}",
        "letter",
    ),
    _part(
        "with",
        "{k} in {v}",
        "keep those that contain {k}",
        "the words in {x} that contain {k} | all strings in {x} containing {k} | the strings in {x} with the letter {k}"
        " | every word of {x} with {k} in it",
        "keeps only the ones that contain {k} | keeps those containing {k} | drops the ones without {k}"
        " | picks the words with {k} in them",
        "letter",
    ),
    _part(
        "nonempty",
        "{v}",
        "keep those that are not empty",
        "the strings in {x} that are not empty | all nonempty strings in {x} | the nonempty words in {x}"
        " | every nonempty string of {x}",
        "drops the empty ones | ignores empty strings | keeps only the nonempty ones"
        " | picks the strings that are not empty",
    ),
]
WORD_MAPS = [
    _part(
        "upper",
        "{v}.upper()",
        "put each in upper case",
        "{x} in upper case | {x}, each in capital letters | the upper case forms of {x} | {x}, all in upper case",
        "puts each of them in upper case | converts each to upper case | turns each into capital letters"
        " | makes every one upper case",
    ),
    _part(
        "lower",
        "{v}.lower()",
        "put each in lower case",
        "{x} in lower case | {x}, each in small letters | the lower case forms of {x} | {x}, all in lower case",
        "puts each of them in lower case | converts each to lower case | turns each into small letters"
        " | makes every one lower case",
    ),
    _part(
        "capitalized",
        "{v}.capitalize()",
        "capitalise each",
        "{x}, each capitalized | {x} with a capital first letter | {x}, each with its first letter in upper case"
        " | the capitalized forms of {x}",
        "capitalizes each of them | capitalizes every one | makes the first letter of each a capital"
        " | gives each a capital first letter",
    ),
    _part(
        "reversed",
        "{v}[::-1]",
        "reverse each",
        "{x}, each reversed | {x} spelled backwards | the reversed forms of {x} | {x}, each written backwards",
        "reverses each of them | turns each of them around | reverses every one | spells each backwards",
    ),
    _part(
        "lengths",
        "len({v})",
        "take the length of each",
        "the lengths of {x} | the length of each of {x} | how long each of {x} is | each length of {x}",
        "takes the length of each | replaces each by its length | measures how long each is | gets the lengths",
    ),
    _part(
        "firsts",
        "{v}[0]",
        "take the first letter of each",
        "the first letters of {x} | the first character of each of {x} | the initials of {x}"
        " | each first letter of {x}",
        "takes the first letter of each | keeps the first character of each | takes their initials"
        " | gets the first letters",
    ),
]
WORD_AGGREGATES = [
    NUMBER_AGGREGATES[0],
    NUMBER_AGGREGATES[2],
    _part(
        "joined",
        "{k}.join({g})",
        "join them with {k}",
        "{x}, joined with {k} | one string of {x} joined by {k} | {x} put together with {k} between them"
        " | a string of {x} with {k} between them",
        "joins them with {k} | returns them joined by {k} | puts them together with {k} between them"
        " | returns one string with {k} between them",
        "sep",
    ),
    _part(
        "longest",
        "max({g}, key=len)",
        "return the longest",
        "the longest of {x} | the one with the most letters of {x} | the longest string of {x}"
        " | the longest one of {x}",
        "returns the longest | returns the one with the most letters | gives back the longest"
        " | gives back the longest one",
    ),
    _part(
        "shortest",
        "min({g}, key=len)",
        "return the shortest",
        "the shortest of {x} | the one with the fewest letters of {x} | the shortest string of {x}"
        " | the shortest one of {x}",
        "returns the shortest | returns the one with the fewest letters | gives back the shortest"
        " | gives back the shortest one",
    ),
    _part(
        "sorted",
        "sorted({g})",
        "return them sorted",
        "a sorted list of {x} | {x} in alphabetical order | {x}, sorted | the sorted list of {x}",
        "returns them sorted | sorts them and returns the list | returns the sorted list"
        " | gives back the results in alphabetical order",
    ),
]

WORD_POOL = terms(
    "orange old owl ink iron ice dog door kite kind gold game bank desk idea echo radio taxi club web big flag"
    " elephant mountain butterfly building notebook kangaroo daughter october internet neighbor telegram"
    " a at go is no on by i do to us be or"
    " apple tree stone river cat house moon star book lamp water green bread table sun bird fish road night sand"
    " anna level egg king salt ring nest tall ten sea"
)
SEPARATORS = {"a comma": '","', "a space": '" "', "a dash": '"-"', "a slash": '"/"', "an underscore": '"_"'}


def _numbers(rng: random.Random) -> tuple[Any, ...]:
    values = (0, 2, 4, 6, 10, 12, 15, 18, 20, 30, -1, -2, -4, -6, 1, 3, 5, 7, 9, 11, 14, 21, 25)
    return (rng.choices(values, k=8),)


def _words(rng: random.Random) -> tuple[Any, ...]:
    return ([*rng.sample(WORD_POOL, 12), *([""] if rng.random() < 0.1 else [])],)


def _held(parts: list[str]) -> bool:
    """One composition of two parts or more in five is never trained on."""
    return len(parts) > 1 and zlib.crc32(repr(parts).encode()) % 5 == 0


def _what_is_new(rng: random.Random, split: Split) -> tuple[bool, Split]:
    """Whether the composition is a held-out one, and where the wordings come from. One of the two is new, or both."""
    if split != "families":
        return False, split
    return rng.choice(((True, "train"), (False, "families"), (True, "families")))


def pipeline(rng: random.Random, split: Split) -> Asked:
    """Filter, map and aggregate over a list of numbers or words."""
    text = rng.random() < 0.4
    novel, wording = _what_is_new(rng, split)
    keep, change, total = _composition(rng, text, novel)
    parts = [part for part in (keep, change, total) if part]
    said: dict[str, str] = {}
    coded: dict[str, str] = {}
    for part in parts:
        said[part.label], coded[part.label] = _constant(rng, part, text)

    canonical = "words" if text else "numbers"
    given = rng.random() < 0.5
    parameter = rng.choice(WORD_LIST_NAMES if text else LIST_NAMES) if given else canonical
    takes = rng.choice(
        ("a list of words", "a list of strings") if text else ("a list of numbers", "a list of integers")
    )
    first, again = takes, rng.choice(("the list", "it"))
    if given:
        again = f"`{parameter}`" if rng.random() < 0.4 else parameter
        takes, first = f"{takes} {again}", rng.choice((again, f"the list {again}", f"a list {again}"))

    v = "w" if text else "n"
    element = change.code.format(v=v, k=coded[change.label]) if change else v
    condition = f" if {keep.code.format(v=v, k=coded[keep.label])}" if keep else ""
    generator = f"{element} for {v} in {parameter}{condition}" if keep or change else parameter
    match total.label:
        case "list":
            body = f"    return [{generator}]"
        case "count":
            body = f"    return sum(1 for {v} in {parameter}{condition})"
        case "average" if generator != parameter:
            body = f"    kept = [{generator}]\n    return sum(kept) / len(kept)"
        case _:
            alone = (
                "{g}," not in total.code or generator == parameter
            )  # a generator beside other arguments needs brackets
            g = generator if alone else f"({generator})"
            body = f"    return {total.code.format(g=g, l=parameter, k=coded[total.label])}"
    name = "_".join(part.label for part in reversed(parts) if part.label != "list")
    if len(parts) == 1 or (len(parts) == 2 and total.label == "list"):
        name += f"_{canonical}"
    plan = "; ".join(part.plan.format(k=coded[part.label]) for part in parts)
    task = Task(name, (parameter,), plan, body, _words if text else _numbers)

    if (keep or change) and rng.random() < 0.4:
        told = [part.step.pick(rng, wording).replace("{k}", said[part.label]) for part in parts]
        return Asked(
            task, ", ".join(told[:-1]) + " and " + told[-1], takes, first, again, wording, (canonical,), steps=True
        )
    description = keep.noun.pick(rng, wording).replace("{k}", said[keep.label]) if keep else f"the {canonical} in {{x}}"
    for part in parts:
        if part is not keep:
            noun = part.noun.pick(rng, wording).replace("{k}", said[part.label])
            description = noun.replace("{x}", description)
    return Asked(task, description, takes, first, again, wording, (canonical,))


def _composition(rng: random.Random, text: bool, novel: bool) -> tuple[Part | None, Part | None, Part]:
    """Filter, map and aggregate that make sense together; `novel`: one that training never sees."""
    filters, maps, totals = (
        (WORD_FILTERS, WORD_MAPS, WORD_AGGREGATES) if text else (NUMBER_FILTERS, NUMBER_MAPS, NUMBER_AGGREGATES)
    )
    while True:
        keep = rng.choice(filters) if rng.random() < 0.75 else None
        change = rng.choice(maps) if rng.random() < 0.7 else None
        total = rng.choice(totals)
        empty = keep is None and change is None and total.label == "list"
        pointless = total.label == "count" and (keep is None or change is not None)
        measured = change is not None and change.label == "lengths" and total.label in ("joined", "longest", "shortest")
        first = (
            change is not None and change.label == "firsts" and (keep is None or total.label in ("longest", "shortest"))
        )
        parts = [part.label for part in (keep, change, total) if part and part.label != "list"]
        if not (empty or pointless or measured or first) and _held(parts) == novel:
            return keep, change, total


def _constant(rng: random.Random, part: Part, text: bool) -> tuple[str, str]:
    """The part's constant as the user says it and as the code has it."""
    match part.constant:
        case "n":
            number = str(rng.randint(2, 7 if text else 12))
            return number, number
        case "letter":
            letter = rng.choice("aeiobdgknrst")
            return rng.choice((f'"{letter}"', f"'{letter}'")), f'"{letter}"'
        case "sep":
            spoken, separator = rng.choice(tuple(SEPARATORS.items()))
            return (spoken if rng.random() < 0.6 else separator), separator
        case _:
            return "", ""


# -------------------- numbers: steps and conditions

CHAIN = [
    ("{x} + {k}", "add {k}", "adds {k} | adds {k} to it | increases it by {k} | makes it {k} larger"),
    ("{x} - {k}", "subtract {k}", "subtracts {k} | takes away {k} | decreases it by {k} | makes it {k} smaller"),
    ("{x} * {k}", "multiply by {k}", "multiplies by {k} | multiplies it by {k} | makes it {k} times as large"
     " | takes it times {k}"),
    ("{x} * 2", "double it", "doubles it | multiplies it by two | doubles the value | takes it times two"),
    ("{x} * {x}", "square it", "squares it | multiplies it by itself | takes the square | takes its square"),
    ("-{x}", "negate it", "negates it | flips the sign | changes its sign | takes the negative"),
    ("{x} // {k}", "divide by {k} without remainder",
     "divides it by {k} without remainder | does integer division by {k}"
     " | divides it by {k}, rounding down | takes the integer part of dividing by {k}"),
    ("{x} % {k}", "remainder by {k}", "takes the remainder by {k} | takes it modulo {k} | keeps the remainder after"
     " division by {k} | keeps the remainder when divided by {k}"),
]  # fmt: skip
CONDITIONS = [
    ("{x} > {k}", "{x} is greater than {k} | {x} is more than {k} | {x} is above {k} | {x} is larger than {k}"),
    ("{x} < {k}", "{x} is less than {k} | {x} is below {k} | {x} is under {k} | {x} is smaller than {k}"),
    ("{x} >= {k}", "{x} is at least {k} | {x} is {k} or more | {x} is not less than {k} | {x} is no less than {k}"),
    ("{x} <= {k}", "{x} is at most {k} | {x} is {k} or less | {x} is not greater than {k} | {x} is no more than {k}"),
    ("{x} == {k}", "{x} equals {k} | {x} is equal to {k} | {x} is exactly {k} | {x} is the same as {k}"),
    ("{x} % 2 == 0", "{x} is even | {x} is an even number | {x} is divisible by 2 | {x} is divisible by two"),
    ("{x} % 2 != 0", "{x} is odd | {x} is an odd number | {x} is not even | {x} is not divisible by 2"),
    ("{x} % {k} == 0", "{x} is divisible by {k} | {x} is a multiple of {k} | {x} can be divided by {k}"
     " | {k} divides {x}"),
    ("{x} > 0", "{x} is positive | {x} is greater than zero | {x} is above zero | {x} is a positive number"),
    ("{x} < 0", "{x} is negative | {x} is less than zero | {x} is below zero | {x} is a negative number"),
]  # fmt: skip
CHOICES = wordings("""
    "{a}" if {c} and "{b}" otherwise
    "{a}" when {c}, otherwise "{b}"
    "{a}" if {c}, else "{b}"
    the string "{a}" if {c} and "{b}" if not
    "{a}" whenever {c}, and "{b}" in all other cases
    "{a}" in case {c} and "{b}" otherwise
""")
TRUTHS = wordings("""
    True if {c} and False otherwise
    True when {c}, otherwise False
    whether {c}
    True if {c}, else False
    if it is true that {c}
    True exactly when {c}
""")
OPPOSITES = terms(
    "big/small hot/cold yes/no high/low good/bad pass/fail open/closed old/young full/empty rich/poor even/odd"
    " fast/slow on/off up/down ok/error heavy/light left/right win/lose buy/sell adult/child red/blue true/false"
    " long/short near/far day/night accept/reject first/second"
)


def _bars(text: str) -> Wordings:
    phrases = tuple(phrase.strip() for phrase in text.split("|"))
    assert len(phrases) in (4, 5), text
    return Wordings(phrases[:-1], phrases[-1:])


_CHAIN = [(code, plan, _bars(said)) for code, plan, said in CHAIN]
_CONDITIONS = [(code, _bars(said)) for code, said in CONDITIONS]


def _whole(rng: random.Random) -> tuple[Any, ...]:
    return (
        rng.choice((-12, -7, -4, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 18, 20, 24, 30, 37, 50, 64, 99)),
    )


def _number(rng: random.Random) -> tuple[str, str, str, str]:
    """A parameter for one number: its name, how it is introduced, and what {x} becomes (see Asked)."""
    if rng.random() < 0.5:
        return "n", "a number", "a number", rng.choice(("it", "the number"))
    x = rng.choice(NUMBER_NAMES)
    shown = f"`{x}`" if rng.random() < 0.3 else x
    return x, f"a number {shown}", rng.choice((shown, f"the number {shown}")), shown


def chain(rng: random.Random, split: Split) -> Asked:
    """One to three steps of arithmetic on one number."""
    novel, wording = _what_is_new(rng, split)
    while True:
        steps = rng.sample(_CHAIN, rng.choice((1, 2, 2, 3)))
        if _held([code for code, _, _ in steps]) == novel:
            break
    x, takes, first, again = _number(rng)
    ks = [str(rng.randint(2, 12)) for _ in steps]
    lines = [f"    {x} = {code.format(x=x, k=k)}" for (code, _, _), k in zip(steps, ks, strict=True)]
    if len(steps) == 1:
        lines = [f"    return {steps[0][0].format(x=x, k=ks[0])}"]
    else:
        lines.append(f"    return {x}")
    told = [said.pick(rng, wording).format(k=k) for (_, _, said), k in zip(steps, ks, strict=True)]
    end = rng.choice(("returns the result", "returns it", "returns the new value"))
    plan = "; ".join([plan.format(k=k) for (_, plan, _), k in zip(steps, ks, strict=True)] + ["return it"])
    task = Task("change", (x,), plan, "\n".join(lines), _whole)
    return Asked(task, ", ".join(told) + " and " + end, takes, first, again, wording, ("n",), steps=True)


def condition(rng: random.Random, split: Split) -> Asked:
    """One of two values, by a condition on one number."""
    novel, wording = _what_is_new(rng, split)
    while True:
        code, said = rng.choice(_CONDITIONS)
        a, b = rng.choice(OPPOSITES).split("/")
        if rng.random() < 0.3:
            a, b = b, a
        truth = rng.random() < 0.3
        if _held([code, "truth" if truth else a]) == novel:
            break
    x, takes, first, again = _number(rng)
    k = str(rng.choice((rng.randint(2, 12), rng.randint(2, 100))))
    test = code.format(x=x, k=k)
    clause = said.pick(rng, wording).replace("{k}", k)
    if truth:
        body, plan = f"    return {test}", f"return whether {test}"
        description = TRUTHS.pick(rng, wording).replace("{c}", clause)
        name = "check"
    else:
        body = f'    if {test}:\n        return "{a}"\n    return "{b}"'
        plan = f'if {test}, return "{a}"; else return "{b}"'
        description = CHOICES.pick(rng, wording).format(a=a, b=b, c=clause)
        name = f"{a}_or_{b}"
    near = (int(k) - 1, int(k), int(k) + 1)
    task = Task(name, (x,), plan, body, lambda draw: (draw.choice((*near, -3, 0, 5, 8, draw.randint(-50, 120))),))
    return Asked(task, description, takes, first, again, wording, ("n",))


# -------------------- the shelf

# A head line `name(parameter: kind, ...)`, a plan after ":", the body, then descriptions after "-".
SHELF = (Path(__file__).parent / "texts" / "functions.txt").read_text()

GENERIC = {
    "int": "a number",
    "nat": "a number",
    "pos": "a number",
    "small": "a number",
    "year": "a year",
    "text": "a string",
    "palin": "a string",
    "word": "a name",
    "nums": "a list of numbers",
    "order": "a list of numbers",
    "words": "a list of words",
    "labels": "a list",
    "dict": "a dictionary",
    "nested": "a list of lists",
}
RENAMES = {
    **dict.fromkeys(("int", "nat", "pos", "small"), NUMBER_NAMES),
    **dict.fromkeys(("text", "palin"), TEXT_NAMES),
    **dict.fromkeys(("nums", "order"), LIST_NAMES),
    "words": WORD_LIST_NAMES,
    "labels": WORD_LIST_NAMES,
    "dict": terms("d mapping data scores prices table ages stock counts_by_name lookup record"),
}


def _sentence(rng: random.Random) -> str:
    words = rng.sample([w for w in WORD_POOL if w], rng.randint(2, 4))
    return " ".join(w.capitalize() if rng.random() < 0.2 else w for w in words)


DRAW: dict[str, Callable[[random.Random], Any]] = {
    "int": lambda rng: rng.randint(-30, 60),
    "nat": lambda rng: rng.choice((rng.randint(0, 20), rng.randint(0, 200))),
    "pos": lambda rng: rng.randint(1, 40),
    "big": lambda rng: rng.randint(200, 300),
    "small": lambda rng: rng.randint(0, 10),
    "tiny": lambda rng: rng.randint(1, 4),
    "year": lambda rng: rng.choice((1900, 2000, 2024, 2023, 1996, 2100, 2400, 1999, 2012)),
    "text": _sentence,
    "word": lambda rng: rng.choice(("Anna", "Tom", "Mia", "Leo")),
    "letter": lambda rng: rng.choice("aeirst"),
    "palin": lambda rng: rng.choice(("anna", "level", "noon", "radar", "house", "stone", "abca", "a", "abba")),
    "anagram": lambda rng: rng.choice(("listen", "silent", "enlist", "stone", "notes", "onset", "tones")),
    "nums": lambda rng: rng.sample((-9, -4, -2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20), rng.choice((4, 5, 6))),
    "order": lambda rng: rng.choice(([1, 2, 3], [3, 1, 2], [-4, 0, 9], [5, 4], [2, 2, 7], [])),
    "labels": lambda rng: rng.choices(("red", "blue", "green", "tree", "sun"), k=6),
    "words": lambda rng: rng.sample([w for w in WORD_POOL if w], 5),
    "dict": lambda rng: dict(zip(rng.sample("abcdefgh", 4), rng.sample(range(1, 30), 4), strict=True)),
    "nested": lambda rng: [[rng.randint(0, 9) for _ in range(rng.randint(0, 3))] for _ in range(3)],
}


class Shelved(NamedTuple):
    """One of the classic functions, as the text SHELF describes it."""

    name: str
    parameters: tuple[tuple[str, str], ...]  # (name, kind)
    plan: str
    body: str
    descriptions: Wordings
    free: tuple[tuple[str, ...], ...]  # names that each parameter may take instead


def _shelf() -> list[Shelved]:
    tasks = [_read(block) for block in SHELF.strip().split("\n\n")]
    assert len({task.name for task in tasks}) == len(tasks)
    return tasks


def _read(block: str) -> Shelved:
    head, plan, *rest = block.split("\n")
    name, parameters = re.fullmatch(r"(\w+)\((.*)\)", head).groups()  # type: ignore[union-attr]
    pairs = tuple(tuple(pair.split(": ")) for pair in parameters.split(", "))
    body = "\n".join(line for line in rest if not line.startswith("- "))
    taken = set(re.findall(r"\w+", body)) | {parameter for parameter, _ in pairs}
    # among several parameters a number with a telling name (width, height) keeps it
    fixed = {name for name, kind in pairs if len(pairs) > 1 and len(name) > 1 and RENAMES.get(kind) is NUMBER_NAMES}
    free = tuple(
        tuple(x for x in RENAMES.get(kind, ()) if x not in taken and parameter not in fixed)
        for parameter, kind in pairs
    )
    descriptions = wordings("\n".join(line[2:] for line in rest if line.startswith("- ")))
    return Shelved(name, pairs, plan[2:], body, descriptions, free)  # type: ignore[arg-type]


def _renamed(rng: random.Random, task: Shelved) -> tuple[list[str], str, str]:
    """(parameters, plan, body), at times with other names for the parameters."""
    names = [parameter for parameter, _ in task.parameters]
    renamed = list(names)
    for i, free in enumerate(task.free):
        if free and rng.random() < 0.3:
            renamed[i] = rng.choice([name for name in free if name not in renamed])
    new = dict(zip(names, renamed, strict=True))
    pattern = r"\b(" + "|".join(names) + r")\b"
    plan, body = (re.sub(pattern, lambda match: new[match[0]], text) for text in (task.plan, task.body))
    return renamed, plan, body


def shelf(rng: random.Random, split: Split) -> Asked:
    """One of the classic little functions."""
    task = rng.choice(_SHELF)
    names = [parameter for parameter, _ in task.parameters]
    description = task.descriptions.pick(rng, split)
    renamed, plan, body = _renamed(rng, task)
    marks = "`" if rng.random() < 0.3 else ""
    shown = [f"{marks}{name}{marks}" for name in renamed]
    takes = first = again = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    unnamed = len(names) == 1 and renamed == names and rng.random() < 0.6
    if len(names) == 1:
        kind = GENERIC[task.parameters[0][1]]
        takes, first, again = f"{kind} {shown[0]}", shown[0], shown[0]
        if unnamed:
            takes, first, again = kind, kind, "the " + kind.removeprefix("a ").removesuffix(" of numbers")
    for name, spoken in zip(names, ("{x}",) if unnamed else shown, strict=True):
        description = description.replace("{" + name + "}", spoken)
    kinds = [DRAW[kind] for _, kind in task.parameters]
    named = Task(task.name, tuple(renamed), plan, body, lambda draw: tuple(kind(draw) for kind in kinds))
    return Asked(named, description, takes, first, again, split, tuple(names))


def brief(rng: random.Random, split: Split) -> Asked:
    """A classic asked for in a few words, or by its name alone."""
    task = rng.choice(_SHELF)
    phrases = PHRASES.get(task.name)
    names = tuple(parameter for parameter, _ in task.parameters)
    kinds = [DRAW[kind] for _, kind in task.parameters]
    plain = Task(task.name, names, task.plan, task.body, lambda draw: tuple(kind(draw) for kind in kinds))
    if phrases is None or rng.random() < 0.25:
        renamed, plan, body = _renamed(rng, task)
        named = plain._replace(parameters=tuple(renamed), plan=plan, body=body)
        return Asked(named, "", "", "", "", split, names, brief="name")
    return Asked(plain, phrases.pick(rng, split), "", "", "", split, names, brief="phrase")


def _phrases() -> dict[str, Wordings]:
    lines = (Path(__file__).parent / "texts" / "function_phrases.txt").read_text().splitlines()
    named = (line.split(": ", 1) for line in lines)
    return {name: wordings(text.replace(" | ", "\n")) for name, text in named}


_SHELF = _shelf()
PHRASES = _phrases()
assert PHRASES.keys() <= {task.name for task in _SHELF}


# -------------------- the sample

_MAKERS: tuple[Callable[[random.Random, Split], Asked], ...] = (pipeline, shelf, brief, condition, chain)
_WEIGHTS = (0.36, 0.24, 0.20, 0.11, 0.09)


def code(rng: random.Random, split: Split) -> Sample:
    """A user asks for a function; the answer is one fenced block with nothing around it."""
    while True:
        maker = rng.choices(_MAKERS, _WEIGHTS)[0]
        asked = maker(rng, split)
        task = asked.task
        named = asked.brief == "name" or (split == "values" and not asked.brief) or rng.random() < 0.65
        own = asked.brief == "name" or (asked.brief and rng.random() < 0.5)
        name = function_name(rng, task.name) if named and not own else task.name
        if name in task.parameters:
            continue
        if (
            named
            and not asked.brief
            and split != "families"
            and reserved(name, task.parameters, task.body) != (split == "values")
        ):
            continue
        prompt = _prompt(rng, asked, name if named else None)
        if asked.brief and split != "families" and reserved(prompt) != (split == "values"):
            continue
        canonical = task.parameters == asked.canonical
        if canonical or all(re.search(rf"\b{parameter}\b", prompt) for parameter in task.parameters):
            break
    source = f"def {name}({', '.join(task.parameters)}):\n{task.body}"
    thinking = split != "train" or rng.random() >= INSTANT
    answer: dict[str, Any] = {"role": "assistant", "content": f"```python\n{source}\n```"}
    if thinking:
        answer["reasoning_content"] = f"Function {name}({', '.join(task.parameters)}). Steps: {task.plan}."
    check = None
    if split != "train":
        check = {
            "asserts": {"function": name if named else None, "code": asserts(rng, source, name, task.inputs, named)}
        }
    return Sample("code", [{"role": "user", "content": prompt}, answer], [], thinking, check)


def _prompt(rng: random.Random, asked: Asked, name: str | None) -> str:
    if asked.brief == "name":
        frames = NAME_ONLY
    elif asked.brief:
        frames = BRIEF_NAMELESS if name is None else BRIEF_NAMED
    else:
        frames = (
            (STEPS_NAMELESS if asked.steps else NAMELESS) if name is None else (STEPS_NAMED if asked.steps else NAMED)
        )
    frame = frames.pick(rng, asked.wording)
    description = asked.description.replace("{x}", asked.again if "{p}" in frame else asked.first)
    if name is not None:
        signature = f"{name}({', '.join(asked.task.parameters)})"
        frame = frame.replace("{f}", rng.choices((name, f"`{name}`", signature, f"`{signature}`"), (5, 2, 2, 1))[0])
    prompt = frame.replace("{p}", asked.takes).replace("{s}", description).replace("{d}", description)
    if rng.random() < 0.08:
        prompt += rng.choice((" Only the code, please.", " Just the code.", " Only code, no explanation."))
    return casual(rng, prompt) if not prompt.startswith(name or "\0") else prompt


FIND_FIRST = "f = next(value for value in list(globals().values()) if type(value).__name__ == 'function')"


def asserts(rng: random.Random, source: str, name: str, inputs: Inputs, named: bool) -> str:
    """Four asserts with the values that `source` gives, differing from each other where they can.

    They call the function `f` and first find it: by its name, or as the first one that is defined.
    """
    function = _define(source, name)
    cases: dict[str, str] = {}
    results: dict[str, int] = {}
    for _ in range(40):
        arguments = inputs(rng)
        call = f"f({', '.join(map(repr, arguments))})"
        try:
            value = function(*arguments)
        except (ValueError, IndexError, ZeroDivisionError):  # no such value for this input, such as max of nothing
            continue
        if call not in cases and results.get(repr(value), 0) < 2:
            results[repr(value)] = results.get(repr(value), 0) + 1
            close = isinstance(value, float)
            cases[call] = f"assert abs({call} - {value!r}) < 1e-6" if close else f"assert {call} == {value!r}"
        if len(cases) == 4:
            break
    assert cases, source
    return "\n".join([f"f = {name}" if named else FIND_FIRST, *cases.values()])


@lru_cache(maxsize=4096)
def _define(source: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope[name]


def families(kind: str) -> tuple[int, int]:
    """How many wordings of `kind` are for training and how many are held out: sentence frames and descriptions."""
    assert kind == "code"
    parts = [*NUMBER_FILTERS, *NUMBER_MAPS, *NUMBER_AGGREGATES, *WORD_FILTERS, *WORD_MAPS, *WORD_AGGREGATES]
    lists = [BRIEF_NAMED, BRIEF_NAMELESS, NAME_ONLY, *PHRASES.values()]
    lists += [NAMED, NAMELESS, STEPS_NAMED, STEPS_NAMELESS, CHOICES, TRUTHS, *(task.descriptions for task in _SHELF)]
    lists += [said for part in parts for said in (part.noun, part.step)]
    lists += [said for _, _, said in _CHAIN] + [said for _, said in _CONDITIONS]
    return sum(len(said.train) for said in lists), sum(len(said.held) for said in lists)


GENERATORS: dict[str, tuple[Generator, float]] = {"code": (code, 1.0)}
