"""Conversation: greetings, who the model is, small tasks on text, turns that refer back, system prompts, refusals.

Everything that can be graded is. What cannot be known or done gets one honest sentence with the reason, and for each
such request there is one that looks like it and can be answered, so that the model learns where the line is.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from nano.data_recall import ANIMALS, ATTRIBUTES, COLOURS, DRAW, FRUITS, JOBS, NAMES, SPORTS, THINGS, pseudo
from nano.data_words import ABROAD, CAPITAL_IS, LANGUAGES, PAIRS, RELATIONS
from nano.sample import Generator, Sample, Split
from nano.wordings import Wordings, casual, dialogue, reserved, terms, typo, wordings

Turn = dict[str, Any]


def _user(text: str) -> Turn:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Turn:
    return {"role": "assistant", "content": text}


def _system(text: str) -> Turn:
    return {"role": "system", "content": text}


# -------------------- small talk


class Talk(NamedTuple):
    """Something that people say, how the thinking sums it up, and the possible answers.

    marks: words of which a right answer has at least one.
    """

    said: Wordings
    thought: str
    answers: tuple[str, ...]
    marks: tuple[str, ...]


NAME = "Kimi-Nano"
CAN = "simple arithmetic, short Python functions, JSON, tool calls, small translations and basic facts"
TALKS = [
    Talk(wordings("""
        Hello
        Hi
        Hey
        Hi there
        hey there
        Good morning
        Good evening
        Good afternoon!
        hello, anyone there?
        Hi! Nice to meet you.
        hallo
        hey you
        Greetings!
        yo
        hi kimi
        Hello Kimi-Nano!
        hey, good morning
        Hi, good evening
        hello there :)
        Good day
    """), "A greeting. Greet back.", ("Hello! How can I help you?", "Hello! What can I do for you?"), ("hello",)),
    Talk(wordings("""
        Who are you?
        What are you?
        What is your name?
        What's your name?
        Tell me about yourself.
        What should I call you?
        Introduce yourself.
        Are you a human?
        Are you a robot?
        Are you an AI?
        Which model are you?
        What model is this?
        Please tell me who you are.
        Who am I talking to?
        hi, who are you
        whats your name?
        Can you introduce yourself?
        Do you have a name?
        What kind of model are you?
        May I ask who you are?
        Is this a real person?
        Who is this?
        and what's your name
        Please introduce yourself.
        Tell me who you are.
        What is this model called?
        Say who you are.
        So who are you?
        And who are you?
        what are you called
        Tell me your name.
        What name do you have?
        Who am I speaking with?
        Are you a machine?
        Are you a person?
        Wer bist du?
        Qui es-tu ?
    """), "They ask who I am. I am Kimi-Nano.", (
        "I am Kimi-Nano, a small language model trained by the Redline project."
        " I run on a laptop and know only a little.",
        "I am Kimi-Nano, a very small language model from the Redline project.",
    ), (NAME,)),
    Talk(wordings("""
        Who made you?
        Who trained you?
        Who built you?
        Where do you come from?
        Who created you?
        Which project are you from?
        Who is behind you?
        By whom were you made?
        Who developed you?
        Who wrote you?
        Who is your maker?
        Who is your creator?
        Where were you trained?
        Which people made you?
        Who has trained you?
        Who are your makers?
        Where are you from?
        What project made you?
        Who do you belong to?
        Tell me who made you.
    """), "They ask who made me. The Redline project.", (
        "I was trained by the Redline project.", "The Redline project trained me from scratch.",
    ), ("Redline",)),
    Talk(wordings("""
        What can you do?
        How can you help me?
        What are you good at?
        Can you help me?
        I need help.
        help
        What can I ask you?
        What do you know?
        What are your skills?
        Which tasks can you do?
        I have a question.
        Can I ask you something?
        Could you help me with something?
        I could use some help
        What are you able to do?
        What do you know about?
        Which things can you do?
        What can you help me with?
        What are your abilities?
        Tell me what you can do.
        Can you do anything useful?
        What kind of tasks do you do?
        what can you do for me
        What can I use you for?
        What do you do?
    """), "They ask what I can do. Say it shortly.", (
        f"I can help with {CAN}.", f"Of course. I can do {CAN}.",
    ), ("arithmetic",)),
    Talk(wordings("""
        How big are you?
        Are you smart?
        Are you as good as the big models?
        How much do you know?
        Do you know everything?
        Can I trust your answers?
        Do you make mistakes?
        Are your answers always right?
        What are your limits?
        What can't you do?
        Are you a big model?
        How small are you?
        Are you intelligent?
        Can you be wrong?
        Are you reliable?
        Should I check your answers?
        How many parameters do you have?
        Do you get things wrong?
        How good are you?
        What are you bad at?
    """), "They ask about my limits. Be honest.", (
        "I am a very small model. I know only a little and make mistakes, so please check what I say.",
    ), ("small",)),
    Talk(wordings("""
        Thank you!
        Thanks
        thx
        Thanks a lot!
        Thank you very much.
        Thanks, that helped.
        great, thank you
        Perfect, thanks!
        Many thanks
        Thank you so much for your help
        ok thanks
        thanks, that was useful
        cool, thanks
        That was helpful, thank you.
        thank you, that's all
        thank u
        Thank you for the answer.
        Thanks for your help!
        ty
        Thank you, this helps.
        I thank you.
        Thank you kindly.
        thanks so much
        Great, thanks a lot.
    """), "Thanks. Say you are welcome.", ("You're welcome!", "You're welcome! Glad I could help."), ("welcome",)),
    Talk(wordings("""
        How are you?
        How are you doing?
        How is it going?
        How do you feel?
        What's up?
        how are you today
        Are you well?
        hi, how are you?
        Hello, how are you doing today?
        How are things?
        How have you been?
        hey whats up
        Everything fine?
        Are you ok?
        hey, how is it going?
        How are you feeling?
        How's it going?
        How do you do?
        How is your day?
        Are you fine?
        How was your day?
        Is everything all right with you?
        Is all well?
        You ok?
        how r u
    """), "Small talk about how I am.", (
        "I am doing well, thank you. How can I help you?", "All is well here, thank you. What can I do for you?",
    ), ("well",)),
    Talk(wordings("""
        Goodbye
        Bye
        bye bye
        See you later
        See you tomorrow!
        I have to go now.
        Good night
        That's all, bye.
        ok, see you
        Goodbye, and thanks
        I'm leaving now, bye
        cu
        Have a nice day!
        ok bye
        talk to you later
        Bye for now
        Goodbye then.
        That was all. Goodbye!
        I must leave. Bye!
        ciao, bye
        See you soon
        Until tomorrow, bye!
        I am going to bed. Good night!
        bye, have a good one
        Take care, bye
        I have to leave now.
    """), "A goodbye. Say goodbye.", ("Goodbye! Have a nice day.", "Goodbye! See you next time."), ("goodbye",)),
    Talk(wordings("""
        You are great!
        Well done!
        Good job
        nice
        Good answer!
        I like you
        You are very helpful.
        That is right.
        cool
        You are funny
        That is correct.
        Right!
        Very good!
        Exactly right.
        Great answer
        Nice work
        That was a good answer.
        You did well.
        Awesome!
        You're the best
        good bot
        I am impressed.
        Excellent!
        Correct!
        Well answered
    """), "A friendly word. Thank them.", ("Thank you! I am glad to help.",), ("thank",)),
    Talk(wordings("""
        That was wrong.
        You made a mistake.
        That's not right.
        You are wrong
        I don't think that is correct.
        no, that's false
        This answer is wrong!
        That can't be right.
        wrong
        Bad answer.
        That's not true.
        I think you are wrong.
        That is not correct.
        That is false.
        You got it wrong.
        That is not the right answer.
        incorrect
        This is wrong, please try again.
        That is a mistake.
        No, that is not it.
        You are mistaken.
        Not right.
        that isn't right
        Your answer was wrong.
        Hm, that is not true at all.
    """), "They say that I was wrong. Say sorry and offer to try again.", (
        "I am sorry about that. Please give me the question again and I will try once more.",
    ), ("sorry",)),
    Talk(wordings("""
        Tell me a joke.
        Do you know a joke?
        Make me laugh.
        I want to hear a joke
        Say something funny.
        Can you tell jokes?
        a joke please
        Tell me something funny
        Another joke!
        Know any good jokes?
        Do you have a joke for me?
        One joke, please.
        tell me a good joke
        Give me a joke.
        I need a laugh.
        Let me hear a joke.
        Can you make a joke?
        Please tell a joke.
        joke?
        Be funny.
    """), "They want a joke.", (
        "Why was the math book sad? It had too many problems.",
        "What do you call a fish without eyes? A fsh.",
        "Why do programmers prefer dark mode? Because light attracts bugs.",
    ), ("?",)),
    Talk(wordings("""
        I am bored.
        I am sad today.
        I feel lonely
        I had a bad day.
        I'm tired
        I am not feeling well.
        Today was terrible.
        I am so stressed
        I am worried about my exam.
        i feel down
        I am unhappy.
        My day was awful.
        I am sick.
        I feel sad.
        I had a terrible week.
        I'm exhausted.
        I feel bad.
        I am very nervous.
        Nobody likes me.
        I lost my job.
    """), "They do not feel well. Be kind.", (
        "I am sorry to hear that. I hope it gets better soon. Is there something I can help with?",
    ), ("sorry",)),
]  # fmt: skip


def small_talk(rng: random.Random, split: Split) -> Sample:
    """A greeting, a mood, thanks or a question about the model itself, and a short answer to it."""
    while True:
        talk = rng.choice(TALKS)
        said = talk.said.pick(rng, split)
        answer = rng.choice(talk.answers)
        extra = rng.choice(("", "", "", "!", ".", " :)", "...")) if said[-1].isalpha() else ""
        said = casual(rng, typo(rng, said) if split == "train" and rng.random() < 0.05 else said) + extra
        if split == "families" or reserved(said) == (split == "values"):
            break
    return dialogue(rng, split, "chat", said, talk.thought, answer, {"contains_any": list(talk.marks)})


# -------------------- small tasks

WORDS = sorted({pair.english for pair in PAIRS if pair.english.isalpha() and pair.english.islower()} - {"and", "no"})
SHORT_WORDS = [word for word in WORDS if 3 <= len(word) <= 5]
QUICK = terms("the old quiet small blue happy cold long bright slow young green dark kind wild strange")
DOING = terms("sings waits sleeps jumps falls smiles runs shines works burns grows stops dances hides")
WHERE = (
    "in the garden",
    "near the river",
    "at night",
    "every day",
    "on the hill",
    "in winter",
    "by the sea",
    "at home",
)


def _text(rng: random.Random) -> str:
    words = ["the", rng.choice(QUICK[1:]), _word(rng), rng.choice(DOING)]
    if rng.random() < 0.6:
        words.append(rng.choice(WHERE))
    text = " ".join(words)
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def _word(rng: random.Random) -> str:
    """A word, often none that exists, so that it has to be read and cannot be guessed."""
    return pseudo(rng) if rng.random() < 0.4 else rng.choice(WORDS)


def _items(rng: random.Random, low: int = 3, high: int = 5) -> list[str]:
    count = rng.randint(low, high)
    while len(items := list({_word(rng): None for _ in range(count)})) < count:
        pass
    return items


class Job(NamedTuple):
    """A small task: wordings with {x}, and what {x} makes: (as shown, thinking, answer)."""

    said: Wordings
    make: Callable[[random.Random], tuple[str, str, str]]
    exact: bool = True


def _upper(rng: random.Random) -> tuple[str, str, str]:
    text = _text(rng)
    return text, "Write every letter as a capital.", text.upper()


def _lower(rng: random.Random) -> tuple[str, str, str]:
    text = _text(rng).upper()
    return text, "Write every letter small.", text.lower()


def _repeat(rng: random.Random) -> tuple[str, str, str]:
    text = _text(rng) if rng.random() < 0.7 else " ".join(pseudo(rng) for _ in range(3))
    return text, "Repeat it as it is.", text


def _bullets(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    return ", ".join(items), "One line with a dash for each.", "\n".join(f"- {item}" for item in items)


def _numbered(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    return ", ".join(items), "One numbered line for each.", "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def _joined(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    return "\n" + "\n".join(f"- {item}" for item in items), "Join them with commas.", ", ".join(items)


def _sorted(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    order = sorted(items)
    firsts = ", ".join(item[0] for item in order)
    return ", ".join(items), f"By first letters: {firsts}.", ", ".join(order)


def _backwards(rng: random.Random) -> tuple[str, str, str]:
    word = rng.choice(SHORT_WORDS) if rng.random() < 0.7 else pseudo(rng)
    return word, f"Letters: {' '.join(word)}. Backwards: {' '.join(word[::-1])}.", word[::-1]


def _spelled(rng: random.Random) -> tuple[str, str, str]:
    word = _word(rng)
    return word, "One letter after the other.", "-".join(word)


def _counted(rng: random.Random) -> tuple[str, str, str]:
    text = _text(rng)
    words = text.split()
    counted = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))
    return text, f"Count: {counted}.", f"It has {len(words)} words."


def _letters(rng: random.Random) -> tuple[str, str, str]:
    word = _word(rng)
    counted = ", ".join(f"{i} {letter}" for i, letter in enumerate(word, 1))
    return word, f"Count: {counted}.", f"It has {len(word)} letters."


def _first_word(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    return ", ".join(items), f"The first is {items[0]}.", items[0]


def _last_word(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    return ", ".join(items), f"The last is {items[-1]}.", items[-1]


def _longest(rng: random.Random) -> tuple[str, str, str]:
    while True:
        items = _items(rng)
        lengths = sorted(map(len, items))
        if lengths[-1] > lengths[-2]:
            break
    longest = max(items, key=len)
    return ", ".join(items), "Lengths: " + ", ".join(f"{item} {len(item)}" for item in items) + ".", longest


def _without(rng: random.Random) -> tuple[str, str, str]:
    items = _items(rng)
    gone = rng.choice(items)
    rest = ", ".join(item for item in items if item != gone)
    return f"{', '.join(items)} (without {gone})", f"Leave out {gone}.", rest


JOBS_ON_TEXT = [
    Job(wordings("""
        Write this in capital letters: {x}
        Put this in upper case: {x}
        Uppercase: {x}
        Convert to upper case: {x}
        Make this all caps: {x}
        Please write in capitals: {x}
        Turn this into capital letters: {x}
        {x} - in upper case please
        to uppercase: "{x}"
        Can you write "{x}" in capital letters?
        All caps: {x}
        Please put this in upper case: {x}
        Capitalize every letter: {x}
        Upper case for this: {x}
        I want this in capitals: {x}
    """), _upper),
    Job(wordings("""
        Write this in small letters: {x}
        Put this in lower case: {x}
        Lowercase: {x}
        Convert to lower case: {x}
        Please write in lower case: {x}
        Turn this into small letters: {x}
        {x} - in lower case please
        Make this all small letters: {x}
        to lowercase: {x}
        Please put this in small letters: {x}
        Can you write "{x}" in lower case?
        No capital letters please: {x}
        Lower case for this: {x}
    """), _lower),
    Job(wordings("""
        Repeat after me: {x}
        Say: {x}
        Repeat this: {x}
        Please repeat: {x}
        Say exactly this: {x}
        Echo: {x}
        Write this again: {x}
        Copy this sentence: {x}
        Just repeat what I write: {x}
        Answer with exactly this text: {x}
        Copy this: {x}
        Please write exactly this: {x}
        Write this sentence again: {x}
        Say this sentence: {x}
        Give me this text back: {x}
        Answer only with: {x}
        Reply with this: {x}
        Please say this: {x}
        Type this: {x}
        Respond with exactly: {x}
    """), _repeat),
    Job(wordings("""
        Make a bullet list of: {x}
        Turn this into bullets: {x}
        Write as a bullet list: {x}
        Bullet points please: {x}
        Put these in a bullet list: {x}
        List these with dashes: {x}
        Give me a bullet list: {x}
        Format as bullets: {x}
        Can you make bullet points from {x}?
        bullets: {x}
        Please make bullets: {x}
        I want a bullet list of these: {x}
        Show these as bullets: {x}
    """), _bullets),
    Job(wordings("""
        Make a numbered list of: {x}
        Turn this into a numbered list: {x}
        Number these: {x}
        Write as a numbered list: {x}
        Give me a numbered list: {x}
        Put numbers in front of these: {x}
        Numbered list please: {x}
        Format as a numbered list: {x}
        Make this a list with numbers: {x}
        Please number these items: {x}
        List these with numbers: {x}
        I want a numbered list of these: {x}
    """), _numbered),
    Job(wordings("""
        Write this list in one line with commas: {x}
        Join these with commas: {x}
        Put these in one line, separated by commas: {x}
        Make a comma separated line of: {x}
        One line with commas please: {x}
        Make one line of this list: {x}
        Comma separated, please: {x}
        Write these with commas between them: {x}
        Turn this list into one line with commas: {x}
        Put commas between these: {x}
        All in one line, with commas: {x}
    """), _joined),
    Job(wordings("""
        Sort these words: {x}
        Sort alphabetically: {x}
        Put these in alphabetical order: {x}
        Sort this list of words: {x}
        Order these from a to z: {x}
        Alphabetical order please: {x}
        Arrange these words alphabetically: {x}
        Can you sort these from A to Z? {x}
        sort: {x}
        Please bring these into alphabetical order: {x}
        Sort from a to z: {x}
        Please sort these: {x}
        Sort these for me, A to Z: {x}
        Put this list in order from A to Z: {x}
        Which order do these have in the alphabet? {x}
    """), _sorted),
    Job(wordings("""
        Spell {x} backwards.
        Write the word {x} backwards.
        What is {x} backwards?
        Reverse the word {x}.
        Reverse the letters of "{x}".
        Spell the word "{x}" backwards.
        How do you write {x} in reverse?
        Turn the word {x} around.
        Write "{x}" from right to left.
        Backwards please: {x}
        {x} backwards?
        Reverse {x}.
        Reverse this word: {x}
        Spell it backwards: {x}
        Write this word from the end: {x}
        Turn {x} around.
        The word {x} in reverse order of letters?
    """), _backwards),
    Job(wordings("""
        Spell {x}.
        Spell the word {x}.
        How do you spell {x}?
        Spell "{x}" letter by letter.
        Write {x} with a dash between the letters.
        Please spell out {x}.
        Spell out the word {x}.
        Spell this word: {x}
        Letter by letter, please: {x}
        Can you spell {x}?
        Put a dash between the letters of {x}.
        How is {x} spelled?
        Write {x} letter by letter.
        Spell {x} with dashes.
        Separate the letters of {x} with dashes.
    """), _spelled),
    Job(wordings("""
        How many words are in this sentence: {x}
        Count the words: {x}
        How many words does this have? {x}
        Word count of: {x}
        Count the words in "{x}".
        How many words are there in "{x}"?
        Please count the words of this text: {x}
        Tell me the number of words in: {x}
        "{x}" has how many words?
        number of words: {x}
    """), _counted, exact=False),
    Job(wordings("""
        How many letters does {x} have?
        Count the letters of {x}.
        How many letters are in the word {x}?
        Number of letters in "{x}"?
        How long is the word {x}, in letters?
        The word {x} has how many letters?
        Letter count of {x}?
        How many letters are there in {x}?
        Count how many letters {x} has.
        Tell me the number of letters in {x}.
        What is the number of letters in {x}?
        Please count the letters: {x}
    """), _letters, exact=False),
    Job(wordings("""
        Which word comes first in this list: {x}
        What is the first word of: {x}
        Give me the first one of {x}.
        Only the first item please: {x}
        First word of this list? {x}
        Tell me the first word of this list: {x}
        Which is the first item? {x}
        Return only the first word: {x}
        The first word in this list, please: {x}
        Pick the first item of: {x}
        Which item is first? {x}
    """), _first_word),
    Job(wordings("""
        Which word comes last in this list: {x}
        What is the last word of: {x}
        Give me the last one of {x}.
        Only the last item please: {x}
        Last word of this list? {x}
        Tell me the last word of this list: {x}
        Which is the last item? {x}
        Return only the last word: {x}
        The last word in this list, please: {x}
        Pick the last item of: {x}
        Which item is last? {x}
    """), _last_word),
    Job(wordings("""
        Which of these words is the longest: {x}
        What is the longest word of: {x}
        Give me the longest word: {x}
        Find the longest word in this list: {x}
        Longest word? {x}
        Tell me the longest word in this list: {x}
        Which word has the most letters? {x}
        The longest one of these, please: {x}
        Pick the longest: {x}
        Which one is longest? {x}
    """), _longest),
    Job(wordings("""
        Write this list with the item left out: {x}
        Remove the item from the list: {x}
        Give me this list: {x}
        Please write the list: {x}
        Repeat the list: {x}
        Give the list again: {x}
        Copy the list: {x}
        What is left of this list: {x}
        The list, please: {x}
        Shorten this list: {x}
    """), _without),
]  # fmt: skip


def instruction(rng: random.Random, split: Split) -> Sample:
    """A small task on the user's own words."""
    while True:
        job = rng.choice(JOBS_ON_TEXT)
        shown, thought, answer = job.make(rng)
        if split == "families" or reserved(shown) == (split == "values"):
            break
    said = job.said.pick(rng, split)
    if said.endswith(": {x}") and not shown.startswith("\n") and rng.random() < 0.2:
        said = said.replace(": {x}", ":\n{x}")
    template = casual(rng, said) if said[-1] != "}" and not said.startswith("{") else said
    check: dict[str, Any] = {"equals": answer} if job.exact else {"number": int(answer.split()[2])}
    return dialogue(
        rng, split, "instruction", template.replace("{x}", shown), f"{shown.strip()}\n{thought}", answer, check
    )


# -------------------- earlier turns


class Memory(NamedTuple):
    """What a user says of themselves, and how they ask for it later. {v} is the value."""

    told: Wordings
    noticed: str
    asked: Wordings
    answer: str
    values: list[str]


MEMORIES = [
    Memory(wordings("""
        My name is {v}.
        I am {v}.
        Hi, I'm {v}.
        Hello, my name is {v}!
        hey, {v} here
        You can call me {v}.
        I'm called {v}.
        Call me {v}, please.
    """), "Hello {v}! How can I help you?", wordings("""
        What is my name?
        What's my name?
        Do you remember my name?
        Who am I?
        What was my name again?
        How am I called?
        Can you tell me my name?
        Tell me my name.
        and what is my name
        What did I say my name is?
    """), "Your name is {v}.", NAMES),
    Memory(wordings("""
        My favorite color is {v}.
        I like {v} best of all colors.
        The color I like most is {v}.
        I love the color {v}.
        {v} is my favorite color.
    """), "Nice, {v} is a lovely color.", wordings("""
        What is my favorite color?
        Which color do I like?
        What was my favorite color?
        Do you remember my favorite color?
        Which color did I say I like?
        Tell me my favorite color.
        What color do I love?
    """), "Your favorite color is {v}.", COLOURS),
    Memory(wordings("""
        I work as a {v}.
        I am a {v}.
        My job is {v}.
        I'm a {v} by profession.
        I earn my money as a {v}.
    """), "That sounds like interesting work.", wordings("""
        What is my job?
        What do I do for a living?
        Do you remember my job?
        What is my profession?
        What do I work as?
        What did I say about my job?
        What work do I do?
        How do I earn my money?
        As what do I work?
        Tell me my job.
        What was my job again?
        Which job do I have?
    """), "You work as a {v}.", JOBS),
    Memory(wordings("""
        I bought a {v} today.
        Today I got a new {v}.
        I have a new {v}.
        My sister gave me a {v}.
        I just ordered a {v}.
    """), "Nice, I hope you enjoy it.", wordings("""
        What did I buy?
        What do I have that is new?
        What did I tell you about?
        Which thing did I mention?
        Do you remember what I got?
        What was it that I got?
        What thing did I tell you about?
        What is the new thing I have?
        Tell me what I bought.
        What new thing do I have?
    """), "It was a {v}.", THINGS),
    Memory(wordings("""
        I play {v}.
        My sport is {v}.
        I play {v} twice a week.
        I love playing {v}.
        On Sundays I play {v}.
    """), "That is a good way to stay fit.", wordings("""
        Which sport do I play?
        What do I play?
        What is my sport?
        Do you remember which sport I play?
        Which sport did I mention?
    """), "You play {v}.", SPORTS),
    Memory(wordings("""
        I like {v}.
        My favorite fruit is {v}.
        I eat {v} every day.
        I love {v}.
        Of all fruit I like {v} most.
    """), "They are tasty.", wordings("""
        What do I like to eat?
        Which fruit do I like?
        What is my favorite fruit?
        What did I say I eat?
        Do you remember what I like to eat?
        Which fruit did I mention?
        What fruit do I like most?
        Tell me my favorite fruit.
        Which fruit do I eat?
    """), "You like {v}.", FRUITS),
    Memory(wordings("""
        Remember the number {v}.
        Please remember this number: {v}.
        My number is {v}.
        The code is {v}. Please keep it in mind.
        Keep the number {v} in mind.
    """), "I will remember it.", wordings("""
        What was the number?
        Which number did I give you?
        Tell me the number again.
        What number did I tell you to remember?
        Do you remember the number?
    """), "The number is {v}.", [str(n) for n in range(100, 10_000, 7)]),
    Memory(wordings("""
        My cat is called {v}.
        The name of my cat is {v}.
        I have a cat. Its name is {v}.
        I have a cat named {v}.
        My cat {v} is very old.
        We call our cat {v}.
    """), "What a nice name for a cat.", wordings("""
        What is my cat called?
        What's my cat's name?
        Do you remember the name of my cat?
        How is my cat called?
        Which name does my cat have?
        Tell me the name of my cat.
    """), "Your cat is called {v}.", NAMES),
    Memory(wordings("""
        I live in {v}.
        My home is in {v}.
        I moved to {v}.
        We live in {v} now.
        {v} is my home town.
        I come from {v}.
    """), "I hope you like it there.", wordings("""
        Where do I live?
        In which city do I live?
        Which city do I live in?
        What is my home town?
        Do you remember where I live?
        Where is my home?
        Where did I say I live?
    """), "You live in {v}.", [row[1] for row in RELATIONS[0].rows]),
    Memory(wordings("""
        I am {v} years old.
        My age is {v}.
        I turned {v} last week.
        I'm {v} years old.
        Next to my kids I feel old. I am {v}.
    """), "Thank you for telling me.", wordings("""
        How old am I?
        What is my age?
        Do you remember my age?
        Do you remember how old I am?
        Tell me my age.
        What age did I say I am?
    """), "You are {v} years old.", [str(n) for n in range(12, 90)]),
    Memory(wordings("""
        Ich heiße {v}.
        Mein Name ist {v}.
        Hallo, ich bin {v}.
    """), "Hallo {v}! Wie kann ich helfen?", wordings("""
        Wie heiße ich?
        Wie ist mein Name?
        Weißt du noch, wie ich heiße?
    """), "Du heißt {v}.", NAMES),
    Memory(wordings("""
        Je m'appelle {v}.
        Mon nom est {v}.
        Bonjour, je suis {v}.
    """), "Bonjour {v} ! Comment puis-je vous aider ?", wordings("""
        Comment je m'appelle ?
        Quel est mon nom ?
        Tu te souviens de mon nom ?
    """), "Tu t'appelles {v}.", NAMES),
    Memory(wordings("""
        Me llamo {v}.
        Mi nombre es {v}.
        Hola, soy {v}.
    """), "¡Hola {v}! ¿En qué puedo ayudarte?", wordings("""
        ¿Cómo me llamo?
        ¿Cuál es mi nombre?
        ¿Recuerdas mi nombre?
    """), "Te llamas {v}.", NAMES),
]  # fmt: skip
BETWEEN = [talk for talk in TALKS if talk.marks[0] in ("well", "welcome", "thank", "arithmetic")]


# what can be said of oneself, whatever {a} is ; question ; question ; answer. For training only.
_OWN = """
My {a} is {v}. ; What is my {a}? ; Which {a} do I have? ; Your {a} is {v}.
I have the {a} {v}. ; Which {a} do I have? ; What {a} did I say I have? ; You have the {a} {v}.
The {a} I like most is {v}. ; Which {a} do I like most? ; What {a} do I like best? ; You like {v} most.
My favorite {a} is {v}. ; What is my favorite {a}? ; Tell me my favorite {a}. ; Your favorite {a} is {v}.
My {a} is called {v}. ; What is my {a} called? ; Tell me the name of my {a}. ; Your {a} is called {v}.
I gave my {a} the name {v}. ; Which name did I give my {a}? ; How did I name my {a}? ; Your {a} has the name {v}.
I keep my {a} in {v}. ; Where do I keep my {a}? ; Tell me where my {a} is. ; Your {a} is in {v}.
Please remember that my {a} is {v}. ; Tell me my {a}. ; Do you remember my {a}? ; Your {a} is {v}.
By the way, I call my {a} {v}. ; What do I call my {a}? ; How do I call my {a}? ; You call your {a} {v}.
For my {a} I chose {v}. ; What did I choose for my {a}? ; Tell me what I chose for my {a}. ; You chose {v}.
I lost my {a} in {v}. ; Where did I lose my {a}? ; In which place did I lose my {a}? ; You lost it in {v}.
I paid {v} for my {a}. ; How much did I pay for my {a}? ; What did my {a} cost? ; You paid {v}.
"""
OWN = [tuple(part.strip() for part in line.split(" ; ")) for line in _OWN.strip().splitlines()]
NOTICED = ("I see.", "Thank you for telling me.", "Good to know.", "I will remember it.", "All right.")


class Told(NamedTuple):
    """Something that a user has said of themselves, and how it is asked for later."""

    said: str
    noticed: str
    asked: str
    answer: str
    value: str


def _own(rng: random.Random) -> Told:
    """Something of the user that nobody could guess: any noun, any value."""
    while True:
        said, *questions, answer = rng.choice(OWN)
        noun = pseudo(rng) if rng.random() < 0.3 else rng.choice(ATTRIBUTES + THINGS + ANIMALS)
        draw = rng.choice(("name", "city", "word", "Word", "pin", "small", "number", "colour", "fruit", "password"))
        value = DRAW[draw](rng)
        parts = (text.replace("{a}", noun).replace("{v}", value) for text in (said, rng.choice(questions), answer))
        said, asked, answer = parts
        if value != noun and asked.lower().strip("?!. :)") not in HELD_MEMORIES:
            return Told(said, rng.choice(NOTICED), asked, answer, value)


HELD_MEMORIES = {said.lower().strip("?!. :)") for memory in MEMORIES for said in memory.asked.held}


def _memory(rng: random.Random, split: Split, memory: Memory) -> Told:
    while True:
        value = rng.choice(memory.values)
        if memory.values is NAMES and rng.random() < 0.4:
            value = pseudo(rng).capitalize()
        elif split == "train" and not value.isdigit() and rng.random() < 0.25:
            value = pseudo(rng)
        told = memory.told.pick(rng, split)
        if split == "families" or reserved(value, told) == (split == "values"):
            break
    said, answer = (
        text.replace("a {v}", "an {v}" if value[0] in "aeiou" else "a {v}").replace("{v}", value)
        for text in (told, memory.answer)
    )
    noticed = memory.noticed.replace("{v}", value)
    return Told(said, noticed, memory.asked.pick(rng, split), answer, value)


def earlier(rng: random.Random, split: Split) -> Sample:
    """The user says one to three things of themselves and asks for one of them, after up to three other turns."""
    memories = rng.sample(MEMORIES, rng.choices((1, 2, 3), (5, 3, 2))[0])
    while len({id(memory.values) for memory in memories}) < len(memories):
        memories = rng.sample(MEMORIES, len(memories))
    facts = [
        _own(rng) if split == "train" and rng.random() < 0.45 else _memory(rng, split, memory) for memory in memories
    ]
    wanted = facts[0]
    others = [fact for fact in facts[1:] if fact.value != wanted.value and fact.asked != wanted.asked]
    facts = rng.sample([wanted, *others], len(others) + 1)
    before: list[Turn] = []
    quoted = ""
    for fact in facts:
        sentence = casual(rng, fact.said)
        if fact is wanted:
            quoted = sentence
        before += [_user(sentence), _assistant(fact.noticed)]
    for _ in range(rng.choices((0, 1, 2, 3), (5, 3, 1, 1))[0]):
        at = 2 * rng.randint(0, len(before) // 2)
        before[at:at] = _aside(rng, split)
    thought = _quoted(wanted.asked, quoted, wanted.value)
    return dialogue(
        rng, split, "chat", casual(rng, wanted.asked), thought, wanted.answer, {"contains": [wanted.value]}, before
    )


def _quoted(asked: str, said: str, value: str) -> str:
    return f'Looking for: {asked}\nThey said: "{said}" So: {value}.'


def _aside(rng: random.Random, split: Split) -> list[Turn]:
    """A turn about something else."""
    if rng.random() < 0.5:
        *_, asked, answered = instruction(rng, split).messages
        return [_user(asked["content"]), _assistant(answered["content"])]
    talk = rng.choice(BETWEEN)
    return [_user(talk.said.pick(rng, split)), _assistant(rng.choice(talk.answers))]


# -------------------- system prompts

ONE_WORD = wordings("""
    Reply with one word.
    Answer in one word only.
    One-word answers only.
    Always answer with a single word.
    Give only the word, no sentence.
    Reply with only one word.
    You answer with exactly one word.
    Use a single word for every answer.
    Be as short as possible: one word.
    Your answers are one word long.
    Only one word per answer.
    Answer with one word.
    A single word is enough for each answer.
    Reply briefly, with one word only.
    Just one word, please.
""")
PERSONA = wordings("""
    You are {n}, a friendly assistant.
    Your name is {n}.
    You are {n}.
    You are an assistant named {n}.
    You are a helpful assistant called {n}.
    You are {n}, the assistant of a small shop.
    Act as {n}, a polite robot.
    You play the role of {n}.
    You are {n}, a patient teacher.
    Pretend that your name is {n}.
    You are called {n}.
    {n} is your name.
    You are the robot {n}.
    You are {n}, an assistant for children.
    Your name is {n} and you help people.
    You are a chatbot named {n}.
    From now on you are {n}.
    The user talks to {n}, and that is you.
""")
IN_LANGUAGE = wordings("""
    Answer in {L}.
    Always answer in {L}.
    Reply in {L} only.
    You speak only {L}.
    You are an assistant that answers in {L}.
    All answers must be in {L}.
    Please respond in {L}.
    Write your answers in {L}.
    Use {L} for every answer.
    You always reply in {L}.
""")
ENDING = wordings("""
    End every answer with "{w}".
    Finish each answer with the word "{w}".
    Put "{w}" at the end of every answer.
    Every answer must end with "{w}".
    Always close with "{w}".
    Add "{w}" to the end of every answer.
    Say "{w}" at the end of each reply.
    The last word of every answer is "{w}".
    Your answers always end with "{w}".
    Close every reply with the word "{w}".
    Write "{w}" after every answer.
    After each answer, say "{w}".
""")
CAPITALS = wordings("""
    Write everything in capital letters.
    Answer in upper case only.
    Use only capital letters.
    All your answers are in upper case.
    You always write in capitals.
    Reply in capital letters.
    Write only in upper case.
    Every letter of your answers is a capital.
    Always use capital letters.
    ANSWER IN CAPITAL LETTERS.
""")
PLAIN = wordings("""
    You are a helpful assistant.
    You are Kimi, an AI assistant.
    Be helpful.
    You are a friendly helper.
    Answer the user's questions.
    You are an assistant that answers questions.
    Help the user.
""")
CAPITAL = next(relation for relation in RELATIONS if relation.name == "capital")
WHO = TALKS[1]
GREETED = {
    "German": "Hallo! Wie kann ich helfen?",
    "French": "Bonjour ! Comment puis-je aider ?",
    "Spanish": "¡Hola! ¿En qué puedo ayudar?",
    "Italian": "Ciao! Come posso aiutare?",
    "Portuguese": "Olá! Como posso ajudar?",
    "Dutch": "Hallo! Hoe kan ik helpen?",
}
ROBOTS = terms(
    "Robo Astra Milo Pixel Luna Bolt Nova Ziggy Orla Tock Echo Fern Pico Juno Sparky Otis Vega Rubi Kato Mimi"
)


def system_prompt(rng: random.Random, split: Split) -> Sample:
    """A system prompt that sets the name, the language or the form of the answers, and is obeyed."""
    while True:
        system, user, thought, answer, check, key = rng.choice(SYSTEMS)(rng, split)
        if split == "families" or reserved(system, key) == (split == "values"):
            if system not in PLAIN.train + PLAIN.held:
                thought = f"System: {system}\n{thought}"
            return dialogue(rng, split, "chat", casual(rng, user), thought, answer, check, [_system(system)])


Obeyed = tuple[str, str, str, str, dict[str, Any], str]


def _capital(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """(question, country, capital)"""
    row = rng.choice(CAPITAL.rows)
    return CAPITAL.asked.pick(rng, split).replace("{0}", row[0]), row[0], row[1]


def _one_word(rng: random.Random, split: Split) -> Obeyed:
    system = ONE_WORD.pick(rng, split)
    if rng.random() < 0.5:
        relation = rng.choice([r for r in RELATIONS if r.name in ("opposite", "plural", "colour", "continent", "past")])
        row = rng.choice([row for row in relation.rows if " " not in row[{"continent": 2}.get(relation.name, 1)]])
        value = row[{"continent": 2}.get(relation.name, 1)]
        user = relation.asked.pick(rng, split).replace("{0}", row[0])
    else:
        user, _, value = _capital(rng, split)
        while " " in value:
            user, _, value = _capital(rng, split)
    return system, user, f"One word: {value}.", value, {"equals": value}, user


def _persona(rng: random.Random, split: Split) -> Obeyed:
    name = rng.choice(ROBOTS) if rng.random() < 0.5 else pseudo(rng).capitalize()
    system = PERSONA.pick(rng, split).replace("{n}", name)
    user = WHO.said.pick(rng, split)
    return system, user, f"The system says that I am {name}.", f"I am {name}.", {"contains": [name]}, user


def _in_language(rng: random.Random, split: Split) -> Obeyed:
    language = rng.choice(LANGUAGES)
    at = LANGUAGES.index(language)
    system = IN_LANGUAGE.pick(rng, split).replace("{L}", language)
    kind = rng.random()
    if kind < 0.2:
        user = TALKS[0].said.pick(rng, split)
        answer = GREETED[language]
        return system, user, f"Greet in {language}.", answer, {"contains": [answer.split()[0].strip("¡!")]}, user
    row = rng.choice(ABROAD)
    user = CAPITAL.asked.pick(rng, split).replace("{0}", row[0])
    answer = CAPITAL_IS[language].format(c=row[1 + at], a=row[7 + at])
    check = {"contains": [row[7 + at], answer.split()[1]]}
    return system, user, f"Answer in {language}: {row[7 + at]}.", answer, check, user


def _ending(rng: random.Random, split: Split) -> Obeyed:
    word = rng.choice(terms("Over Done Cheers Amen Beep Ahoy Meow Bye Peace Boom Aloha"))
    system = ENDING.pick(rng, split).replace("{w}", word)
    user, country, value = _capital(rng, split)
    answer = f"The capital of {country} is {value}. {word}"
    return system, user, f"Answer {value} and end with {word}.", answer, {"contains": [value, word]}, user


def _capitals(rng: random.Random, split: Split) -> Obeyed:
    system = CAPITALS.pick(rng, split)
    user, country, value = _capital(rng, split)
    answer = f"The capital of {country} is {value}.".upper()
    return system, user, f"capital: {country} = {value}. Answer in upper case.", answer, {"contains": [value]}, user


def _plain(rng: random.Random, split: Split) -> Obeyed:
    system = PLAIN.pick(rng, split)
    if rng.random() < 0.4:
        talk = rng.choice(TALKS)
        user, answer = talk.said.pick(rng, split), rng.choice(talk.answers)
        return system, user, talk.thought, answer, {"contains_any": list(talk.marks)}, user
    user, country, value = _capital(rng, split)
    answer = f"The capital of {country} is {value}."
    return system, user, f"capital: {country} = {value}.", answer, {"contains": [value]}, user


SYSTEMS: tuple[Callable[[random.Random, Split], Obeyed], ...] = (
    _one_word, _one_word, _persona, _persona, _in_language, _in_language, _ending, _capitals, _plain,
)  # fmt: skip


# -------------------- refusals


class Impossible(NamedTuple):
    """Requests that cannot be met, why, and a near one that can. {city}, {name} ... are drawn."""

    asked: Wordings
    why: str
    answer: str


CANNOT = ["can't", "cannot", "can not", "don't know", "do not know", "unable", "don't have", "do not have", "not able"]
IMPOSSIBLE = [
    Impossible(wordings("""
        What is the weather in {city} right now?
        Is it raining in {city}?
        How warm is it outside?
        What's the weather like today?
        Will it rain in {city} tomorrow?
        Do I need an umbrella today?
        How cold is it in {city} at the moment?
        Weather in {city}?
        Is the sun shining in {city} now?
        Give me the weather forecast for {city}.
        Is it snowing outside?
        what's the temperature in {city}
        Tell me the weather for this weekend.
        Is it windy in {city} today?
        How is the weather there?
    """), "The weather now is not known to me, and I have no tool for it.",
        "I can't see the weather, because I have no access to live data. I can explain how weather works."),
    Impossible(wordings("""
        What time is it now?
        What is today's date?
        Which day is it today?
        What time is it in {city}?
        What's the date?
        Can you tell me the time?
        What year is it?
        What is the time right now?
        Which month do we have?
        how late is it
        Tell me the date of today.
        What is the current time?
        Do you know what time it is?
        Which year is it now?
        What day is it?
        Is it Monday today?
        Is it late?
        What is the current date?
        Give me the time.
        How many hours until midnight?
        Which season is it now?
    """), "I have no clock.", "I don't know the time or the date, because I have no clock. Your device can show it."),
    Impossible(wordings("""
        What will the lottery numbers be tomorrow?
        Tell me the winning lottery numbers.
        Which numbers will win the lottery on {day}?
        Who will win the match tomorrow?
        Who will win the next election?
        Which horse wins the race on {day}?
        What will happen next year?
        Will I be rich one day?
        Which stock will go up tomorrow?
        Predict the price of gold for next week.
        Will my team win on {day}?
        What will I eat on {day}?
        When will I get married?
        How will the game end tonight?
        Tell me my future.
        What will the {thing} cost next year?
        Who will be the next president?
        Give me the winning numbers for {day}.
        When will the next earthquake be?
        Will {name} pass the exam?
    """), "Nobody can know the future.",
        "I can't predict the future, and nobody can know this. I can help with things that are known."),
    Impossible(wordings("""
        What is the phone number of {name}?
        Where does my neighbor {name} live?
        What is {name}'s password?
        Give me the address of {name}.
        How old is my friend {name}?
        What did {name} do yesterday?
        What is my password?
        What is my bank balance?
        When is my birthday?
        What is my mother's name?
        Tell me {name}'s email address.
        How much does my neighbor {name} earn?
        What is the name of my cat?
        What is in my fridge?
        Where are my keys?
        Where did I put my {thing}?
        what's {name}'s phone number
        How tall is my brother?
        What did I have for breakfast?
        Is {name} at home?
        How old am I?
        What is my shoe size?
        Where is my {thing}?
        What is the name of my dog?
        What is my sister called?
        Which car do I drive?
        What did I buy last week?
        Where does {name} work?
        Who is my boss?
        What is in my pocket?
        What is my favorite color?
        How many children does my neighbor {name} have?
        When is {name}'s birthday?
        What is the PIN of my card?
        What is my address?
    """), "That is private, and nobody told me.",
        "I don't know that, because it is personal and you have not told me."),
    Impossible(wordings("""
        What am I thinking?
        Guess the number that I am thinking of.
        What do I want right now?
        Read my mind.
        What am I thinking about right now?
        Which card am I thinking of?
        What is {name} thinking?
        Do you know what I feel?
        What did I dream last night?
        Can you read my thoughts?
        What is on my mind?
        What am I feeling?
        Guess my thoughts.
        What do I wish for?
        Which word am I thinking of?
        What number do I have in mind?
        Guess what I want.
        What is {name} feeling now?
        What do I want to eat?
        Do you know what I am thinking?
        What did {name} dream about?
        Guess my favorite number.
        Which color am I thinking of?
        Tell me what I feel.
        What is {name} thinking about me?
    """), "I can not read minds.", "I can't read minds. Please tell me what you think."),
    Impossible(wordings("""
        Open the website {site}.
        What is on {site}?
        Go to {site} and tell me what it says.
        Search the internet for {thing}s.
        Google this for me: {thing}
        Summarize the page {site}.
        Read {site} and give me a summary.
        What are the latest news?
        Look up the price of a {thing} online.
        Check {site} for me.
        Download the file from {site}.
        What is in the news today?
        Browse to {site}.
        Find a cheap {thing} on the web.
        What does {site} say about me?
    """), "I can not browse the web.", "I can't browse the web or see the news. You can paste the text here."),
    Impossible(wordings("""
        Summarize the file I sent you.
        What does the attached document say?
        Look at this picture.
        What is in the photo?
        Read the PDF and tell me the main points.
        Translate the attached file.
        What do you see in the image?
        Check the spreadsheet I uploaded.
        Open the file report.txt.
        Listen to this recording.
        Summarize the attached text.
        What is written in my file {word}.txt?
        Describe the image.
        Watch the video and tell me what happens.
        What's wrong in the attached code?
    """), "There is no file here.", "I can't see any file or picture here. You can paste the text instead."),
    Impossible(wordings("""
        Call {name} for me.
        Order a pizza for me.
        Send {name} a message.
        Buy me a {thing}.
        Please turn off the lights.
        Book a table for tonight.
        Wake me up at 7.
        Make me a coffee.
        Pay my bill.
        Send an email to {name}.
        Set an alarm for 6:30.
        Clean my room.
        Drive me to {city}.
        Please bring me the {thing}.
        Phone my mother.
        Bring me a glass of water.
        Make me a sandwich.
        Cook dinner for me.
        Wash my car.
        Please make some tea.
        Open the window.
        Close the door.
        Turn on the {thing}.
        Take me to {city}.
        Fly me to {city}.
        Walk my dog.
        Fix my {thing}.
        Buy two tickets to {city}.
        Play some music.
        Take a photo of me.
        Remind me at 5 to call {name}.
        Clean the {thing}.
        Repair my {thing}, please.
        Give {name} the {thing}.
        Carry the {thing} for me.
    """), "I can only write text and have no tool for this.",
        "I can't do that, because I can only write text here. I can help you with the words."),
    Impossible(wordings("""
        What is the capital of {Fake}?
        Which city is the capital of {Fake}?
        Tell me the capital of {Fake}.
        What's the capital of {Fake}?
        Do you know the capital of {Fake}?
        Capital of {Fake}
        What is the capital city of {Fake}?
        Name the capital of {Fake}.
        Which currency is used in {Fake}?
        On which continent is {Fake}?
        Who is the king of {Fake}?
        Which language is spoken in {Fake}?
        How many people live in {Fake}?
        What do you know about the country {Fake}?
        where is {Fake}
        {Fake}: what is its capital?
        What is the currency of {Fake}?
        Can you tell me the capital of {Fake}?
        Tell me about the country {Fake}.
        How big is {Fake}?
        Who rules {Fake}?
        What do people eat in {Fake}?
        How many people are there in {Fake}?
        What is the population of {Fake}?
        Which continent is {Fake} on?
        What money do they use in {Fake}?
        Who is the president of {Fake}?
        Where is the country {Fake}?
        Is {Fake} in Europe or in Asia?
    """), "I do not know a country called {Fake}.",
        "I don't know {Fake}. Perhaps it does not exist or is spelled differently."),
    Impossible(wordings("""
        Who wrote the book "{Fake}"?
        Who is {Fake} {Fake2}?
        What is a {fake}?
        Who invented the {fake}?
        What is the chemical symbol of {fake}?
        When was {Fake} {Fake2} born?
        Tell me about {Fake} {Fake2}.
        Who painted "{Fake}"?
        How many legs does a {fake} have?
        What sound does a {fake} make?
        Explain what {fake} is.
        What color is a {fake}?
        Where can I buy a {fake}?
        How big is a {fake}?
        Who made the first {fake}?
        Who was {Fake} {Fake2}?
        What did {Fake} {Fake2} do?
        Who composed "{Fake}"?
        How heavy is a {fake}?
        What do people do with a {fake}?
        Is a {fake} dangerous?
        What does a {fake} eat?
        How do you use a {fake}?
        What is the plural of {fake}?
        When was the {fake} invented?
    """), "I do not know this word or name.", "I don't know that word or name. Perhaps it is spelled differently."),
]  # fmt: skip
SITES = ("example.com", "https://example.org/news", "www.example.net", "https://example.com/page", "my website")
KNOWN_WORDS = {pair.foreign.lower() for pair in PAIRS} | {pair.english.lower() for pair in PAIRS} | set(WORDS)


def _fake(rng: random.Random) -> str:
    while True:
        word = pseudo(rng) + rng.choice(("", "ia", "land", "stan", "via", "or", "um"))
        if word not in KNOWN_WORDS and len(word) > 4:
            return word


def refusal(rng: random.Random, split: Split) -> Sample:
    """A request that nothing here can meet, refused in one sentence; or, one time in three, one that can be met."""
    if rng.random() < 0.33:
        return _near_miss(rng, split)
    case = rng.choice(IMPOSSIBLE)
    while True:
        said = case.asked.pick(rng, split)
        fake = _fake(rng)
        drawn = {
            "city": rng.choice([row[1] for row in CAPITAL.rows]), "name": rng.choice(NAMES),
            "thing": rng.choice(THINGS),
            "day": rng.choice(("Monday", "Friday", "Saturday", "Sunday")), "site": rng.choice(SITES),
            "word": pseudo(rng),
            "Fake": fake.capitalize(), "Fake2": _fake(rng).capitalize(), "fake": fake,
        }  # fmt: skip
        user, why, answer = (_fill(text, drawn) for text in (said, case.why, case.answer))
        user = casual(rng, typo(rng, user) if split == "train" and rng.random() < 0.04 else user)
        if split == "families" or reserved(user) == (split == "values"):
            break
    return dialogue(rng, split, "refusal", user, f"Not possible: {why}", answer, {"contains_any": CANNOT})


def _fill(text: str, drawn: dict[str, str]) -> str:
    if "{" in text:
        for key, value in drawn.items():
            text = text.replace(f"{{{key}}}", value)
    return text


# Requests that look like the impossible ones, but what they ask for was said, and they are answered from it:
# what was said ; question ; question ; answer ; what the answer contains. Every fifth is held out.
_NEAR = """
It is {n} degrees in {city} today. ; How warm is it in {city}? ; How many degrees is it in {city}? ; It is {n} degrees in {city}. ; {n}
{name}'s phone number is {pin}. ; What is the phone number of {name}? ; What's {name}'s phone number? ; {name}'s phone number is {pin}. ; {pin}
The time is {n}:30. ; What time is it? ; Can you tell me the time? ; It is {n}:30. ; {n}:30
My cat is called {name}. ; What is the name of my cat? ; What is my cat called? ; Your cat is called {name}. ; {name}
I put my keys on the {thing}. ; Where are my keys? ; Where did I put my keys? ; Your keys are on the {thing}. ; {thing}
{Fake} is a country in my story and its capital is {Fake2}. ; What is the capital of {Fake}? ; Which city is the capital of {Fake}? ; The capital of {Fake} is {Fake2}. ; {Fake2}
I am thinking of the number {n}. ; Which number am I thinking of? ; What number do I have in mind? ; You are thinking of the number {n}. ; {n}
The file says: "{name} has the {thing}". ; What does the file say about {name}? ; What does {name} have? ; The file says that {name} has the {thing}. ; {thing}
Today is {day}. ; Which day is it today? ; What day is it? ; Today is {day}. ; {day}
I left my {thing} in {city}. ; Where is my {thing}? ; Where did I leave my {thing}? ; Your {thing} is in {city}. ; {city}
My dog is called {name}. ; What is the name of my dog? ; How is my dog called? ; Your dog is called {name}. ; {name}
My brother's name is {Fake}. ; What is my brother's name? ; What is my brother called? ; Your brother is called {Fake}. ; {Fake}
The weather in {city} is sunny. ; What is the weather in {city}? ; How is the weather in {city}? ; The weather in {city} is sunny. ; sunny
My password is {fake}. ; What is my password? ; Tell me my password. ; Your password is {fake}. ; {fake}
My birthday is on {day}. ; When is my birthday? ; On which day is my birthday? ; Your birthday is on {day}. ; {day}
{name} lives in {city}. ; Where does {name} live? ; In which city does {name} live? ; {name} lives in {city}. ; {city}
My friend {name} is {n} years old. ; How old is my friend {name}? ; What is the age of {name}? ; {name} is {n} years old. ; {n}
A {fake} is a small {thing}. ; What is a {fake}? ; Explain what a {fake} is. ; A {fake} is a small {thing}. ; {thing}
{name} works in {city}. ; Where does {name} work? ; In which city does {name} work? ; {name} works in {city}. ; {city}
I want to buy a {thing}. ; What do I want? ; What do I want to buy? ; You want to buy a {thing}. ; {thing}
The book "{Fake}" was written by {name}. ; Who wrote the book "{Fake}"? ; Who is the author of "{Fake}"? ; "{Fake}" was written by {name}. ; {name}
I ate {n} berries for breakfast. ; What did I have for breakfast? ; How many berries did I eat? ; You had {n} berries for breakfast. ; {n}
My car is {n} years old. ; How old is my car? ; What is the age of my car? ; Your car is {n} years old. ; {n}
My sister is called {name}. ; What is my sister called? ; What is the name of my sister? ; Your sister is called {name}. ; {name}
My favorite word is {fake}. ; What is my favorite word? ; Which word do I like best? ; Your favorite word is {fake}. ; {fake}
The king of {Fake} is {name}. ; Who is the king of {Fake}? ; Tell me the king of {Fake}. ; The king of {Fake} is {name}. ; {name}
In {Fake} people pay with the {fake}. ; How do people pay in {Fake}? ; What is the money of {Fake}? ; In {Fake} people pay with the {fake}. ; {fake}
The code of my bike is {pin}. ; What is the code of my bike? ; Tell me the code of my bike. ; The code of your bike is {pin}. ; {pin}
My neighbor {name} has a {thing}. ; What does my neighbor {name} have? ; What does {name} have? ; {name} has a {thing}. ; {thing}
I dreamed of a {thing} last night. ; What did I dream last night? ; Of what did I dream? ; You dreamed of a {thing}. ; {thing}
"""  # noqa: E501
NEAR = [tuple(part.strip() for part in line.split(" ; ")) for line in _NEAR.strip().splitlines()]


def _near_miss(rng: random.Random, split: Split) -> Sample:
    while True:
        case = rng.randrange(len(NEAR))
        drawn = {
            "city": rng.choice([row[1] for row in CAPITAL.rows]), "name": rng.choice(NAMES),
            "thing": rng.choice(THINGS),
            "day": rng.choice(("Monday", "Tuesday", "Friday", "Sunday")), "n": str(rng.randint(5, 23)),
            "pin": str(rng.randint(1000, 9999)), "Fake": _fake(rng).capitalize(), "Fake2": _fake(rng).capitalize(),
            "fake": _fake(rng),
        }  # fmt: skip
        if rng.random() < 0.4:
            drawn["name"] = pseudo(rng).capitalize()
        said, *questions, answer, mark = (_fill(text, drawn) for text in NEAR[case])
        asked = rng.choice(questions)
        user = f"{said} {asked}"
        held = case % 5 == 3
        if held == (split == "families") and (split == "families" or reserved(user) == (split == "values")):
            break
    thought = _quoted(asked, said, mark)
    return dialogue(rng, split, "refusal", casual(rng, user), thought, answer, {"contains": [mark]})


# -------------------- all


def chat(rng: random.Random, split: Split) -> Sample:
    """Small talk, something said earlier, or a system prompt."""
    kind = rng.random()
    return (small_talk if kind < 0.35 else earlier if kind < 0.78 else system_prompt)(rng, split)


def families(kind: str) -> tuple[int, int]:
    """How many wordings of `kind` are for training and how many are held out."""
    lists = {
        "chat": [
            *(talk.said for talk in TALKS),
            *(said for memory in MEMORIES for said in (memory.told, memory.asked)),
            *(ONE_WORD, PERSONA, IN_LANGUAGE, ENDING, CAPITALS, PLAIN),
        ],
        "instruction": [job.said for job in JOBS_ON_TEXT],
        "refusal": [case.asked for case in IMPOSSIBLE],
    }[kind]
    return sum(len(said.train) for said in lists), sum(len(said.held) for said in lists)


GENERATORS: dict[str, tuple[Generator, float]] = {
    "chat": (chat, 0.4),
    "instruction": (instruction, 0.3),
    "refusal": (refusal, 0.3),
}
