"""Values that questions are made of: people, places, titles, dates, codes, and words that nobody has seen.

Closed pools and open shapes are divided by a hash. `train` draws from most of a division; `values` and `families` draw
from the rest, which training never sees: an eighth of a pool's words, and a tenth of a shape's values unless said.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from nano.sample import Split


def reserved(*parts: object, one_in: int = 10) -> bool:
    """Whether this combination is kept out of training, as one in `one_in` is: the same on every machine."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % one_in == 0


def fresh(rng: random.Random, split: Split, make: Callable[[random.Random], Any], one_in: int = 10) -> Any:
    """Draws until the value is one that this split may use; one in `one_in` values is kept out of training."""
    while True:
        value = make(rng)
        if reserved(value, one_in=one_in) == (split != "train"):
            return value


def lines(text: str) -> tuple[str, ...]:
    """The lines of `text`, each an item."""
    return tuple(text.split("\n"))


def words_of(text: str) -> tuple[str, ...]:
    """The words of `text`, which stand between blanks."""
    return tuple(text.split())


class Pool:
    """A closed list of words, divided into a training part and a reserved part. A `common` pool is not divided."""

    def __init__(self, words: str, separator: str | None = None, common: bool = False) -> None:
        self.all = tuple(word.strip() for word in words.split(separator) if word.strip())
        self.held = self.all if common else tuple(word for word in self.all if reserved(word, one_in=8))
        self.train = self.all if common else tuple(word for word in self.all if word not in self.held)

    def draw(self, rng: random.Random, split: Split) -> str:
        """A random word of the part that the split may use."""
        words = self.train if split == "train" else self.held
        return words[int(rng.random() * len(words))]


def pick(rng: random.Random, items: Sequence[Any]) -> Any:
    """`rng.choice`, three times as fast."""
    return items[int(rng.random() * len(items))]


FIRST = Pool(
    """Anna Ben Carla David Emma Felix Grace Henry Ida Jonas Kira Liam Mia Noah Olga Paul Rosa Sam Tina Uma Victor Wanda
    Xenia Yusuf Zoe Amir Bella Chen Dora Elif Farid Gina Hana Igor Julia Karim Lena Marco Nina Oscar Priya Quinn Ravi
    Sofia Tom Ulrich Vera Will Yara Zack Aiko Bruno Clara Diego Eva Finn Georg Helen Ivan Jack Kate Luca Maya Nadia Otto
    Pablo Rita Simon Theo Ursula Vikram Wendy Yuki Alice Bob Carol Dan Ella Frank Greta Hugo Irene James Kim Laura Max
    Nora Omar Petra Ruth Sara Tariq Leo John Mary Peter Susan Linda Mark Lucy Adam Sophie Tim Jane Alex Chris Pat Kevin
    Maria Carlos Ahmed Fatima Ali Mei Hiro Sven Ingrid Lars Astrid Pierre Chloe Marie Luis Elena Olivia Ethan Ava"""
)
LAST = Pool(
    """Weber Smith Garcia Rossi Novak Tanaka Kim Okafor Silva Meyer Dubois Jensen Khan Patel Lopez Brown Wagner Costa
    Larsen Moreau Ivanova Haddad Sato Nguyen Murphy Walker Fischer Bauer Keller Vogel Berg Lind Ortiz Vega Marin Duarte
    Park Chen Wong Singh Ahmadi Demir Kaya Petrov Horvath Kovacs Nagy Popescu Romano Greco Bianchi Taylor Evans Hughes
    Clark Hill Baker Cook Turner Reed Morgan Bell Cooper Ward Gray Foster Hayes Stone"""
)
CITIES = Pool(
    """Paris,Berlin,Rome,Madrid,Lisbon,Vienna,Prague,Oslo,Helsinki,Dublin,London,Boston,Chicago,Denver,Seattle,Austin,
    Toronto,Montreal,Lima,Quito,Bogota,Santiago,Cairo,Tunis,Lagos,Nairobi,Accra,Dakar,Cape Town,Mumbai,Delhi,Chennai,
    Tokyo,Osaka,Kyoto,Seoul,Busan,Beijing,Shanghai,Hanoi,Bangkok,Manila,Jakarta,Sydney,Perth,Auckland,Munich,Hamburg,
    Cologne,Zurich,Geneva,Basel,Milan,Turin,Naples,Venice,Lyon,Nice,Marseille,Seville,Valencia,Porto,Athens,Sofia,Warsaw,
    Krakow,Budapest,Zagreb,Belgrade,Riga,Tallinn,Vilnius,Stockholm,Malmo,Bergen,Copenhagen,Brussels,Ghent,Amsterdam,
    Utrecht,New York,Los Angeles,San Francisco,Miami,Dallas,Houston,Phoenix,Portland,Atlanta,Mexico City,Buenos Aires,
    Rio de Janeiro,Istanbul,Ankara,Dubai,Doha,Tehran,Karachi,Dhaka,Singapore,Hong Kong,Taipei,Reykjavik,Edinburgh,
    Glasgow,Leeds,Bristol,Cardiff,Salzburg,Graz,Dresden,Leipzig,Bremen""",
    separator=",",
)
COUNTRIES = Pool(
    """France Germany Italy Spain Portugal Austria Norway Finland Ireland Canada Peru Chile Egypt Kenya Ghana India
    Japan Korea China Vietnam Thailand Australia Greece Poland Hungary Sweden Denmark Belgium Brazil Mexico Turkey Iran
    Iceland Cuba Nepal Morocco Tunisia Nigeria Latvia Croatia""",
    common=True,
)
COLORS = Pool("red blue green yellow black white orange purple pink brown gray silver golden violet teal", common=True)
WORDS = Pool(
    """river garden summer winter bridge castle market forest mountain island harbor station library museum school
    office kitchen window mirror candle pepper lemon cotton copper marble velvet thunder shadow morning evening holiday
    journey signal rocket planet comet falcon tiger dolphin rabbit turtle beetle anchor barrel basket blanket bottle
    button camera carpet circle cloud corner desert dragon engine feather finger flower folder frame galaxy ginger glove
    hammer
    jacket jungle kettle ladder lantern letter magnet maple meadow monkey needle nickel number ocean olive orchid paper
    parrot pencil pepperoni piano pillow pocket potato powder puzzle ribbon saddle salmon sample sandal shield silver
    spider spring square stable string sunset temple ticket timber tunnel valley vessel violin wagon walnut willow
    winner wizard yellow zebra budget report design launch review project account support travel training release"""
)
ITEMS = Pool(
    """apples,pears,books,pencils,stamps,marbles,coins,cards,stickers,shells,eggs,cookies,oranges,lemons,tickets,balloons,
    buttons,beads,flowers,roses,tulips,trees,chairs,tables,lamps,cups,plates,bottles,boxes,bags,toys,dolls,cars,bikes,
    photos,letters,postcards,songs,videos,files,pages,bricks,tiles,nails,screws,candies,muffins,cakes,pizzas,sandwiches,
    potatoes,carrots,tomatoes,onions,peaches,plums,cherries,grapes,nuts,melons,shirts,socks,hats,gloves,pens,crayons,
    erasers,notebooks,magazines,newspapers,badges,keys,batteries,bulbs,phones,sheep,cows,ducks,fish,birds,stones,leaves,
    ribbons,candles,spoons,forks,towels,pillows,blankets,seeds,bananas,mangoes,kiwis,figs,walnuts,almonds,robots,puzzles""",
    separator=",",
)
LANGUAGES = Pool(
    "English German French Spanish Italian Portuguese Dutch Polish Turkish Japanese Korean Chinese Arabic Hindi",
    common=True,
)
CURRENCIES = Pool("USD EUR GBP JPY CHF CAD AUD SEK NOK INR CNY BRL MXN PLN KRW TRY", common=True)
FOODS = Pool(
    """pizza,pasta,sushi,salad,soup,bread,rice,curry,tacos,noodles,pancakes,burgers,steak,risotto,lasagna,omelette,
    falafel,hummus,ramen,dumplings,waffles,chili,stew,paella,quiche,goulash""",
    separator=",",
    common=True,
)
PRODUCTS = Pool(
    """laptop,headphones,keyboard,monitor,backpack,jacket,coffee machine,blender,desk lamp,office chair,phone case,
    water bottle,running shoes,sunglasses,watch,camera,tablet,printer,microphone,suitcase,tent,umbrella,toaster,kettle,
    vacuum cleaner,yoga mat,bicycle helmet,board game,guitar,drone""",
    separator=",",
)
TICKERS = Pool("AAPL MSFT NVDA TSLA AMZN META GOOG INTC AMD IBM ORCL SAP NFLX BMW SHEL UBER DIS NKE KO PEP VOW SIE")
ROOMS = Pool(
    "kitchen,bedroom,living room,bathroom,office,garage,hallway,garden,basement,attic,dining room,balcony",
    separator=",",
    common=True,
)
RELATIVE_DAYS = Pool(
    "today,tomorrow,tonight,Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday,next Monday,next Friday,next week,"
    "this weekend,next month,on the weekend",
    separator=",",
    common=True,
)
MONTHS = words_of("January February March April May June July August September October November December")
MESSAGES = Pool(
    """I will be late;see you at noon;the meeting moved to room 4;dinner is ready;please call me back;happy birthday;
    the package arrived;thanks for your help;I am on my way;can we talk tomorrow;the report is done;lunch at one;
    do not forget the keys;the train is delayed;we need more milk;good luck today;I found your jacket;the door is open;
    our flight was cancelled;the invoice is attached;I sent the files;the server is down again;please review my draft;
    congratulations on the new job;are you free on Sunday;the doctor can see you at nine;bring the blue folder;
    water the plants;buy eggs and bread;pick up the kids;pay the rent;charge the car;feed the cat;take out the trash;
    call the bank;book the hotel;clean the kitchen;renew the passport;send the contract;check the oven""",
    separator=";",
)

_ONSETS = words_of("b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl qu sk sn st tr zw")
_VOWELS = words_of("a e i o u a e i o u ai ee io ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "k", "m", "t", "x", "nd", "rt", "sh"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _pseudo(rng: random.Random) -> str:
    if rng.random() < 0.12:
        return "".join([pick(rng, _LETTERS) for _ in range(rng.randint(3, 6))])
    syllables = 2 + (rng.random() < 0.3)
    return "".join([pick(rng, _ONSETS) + pick(rng, _VOWELS) for _ in range(syllables)]) + pick(rng, _CODAS)


def pseudo(rng: random.Random, split: Split) -> str:
    """A pronounceable word that means nothing (`trovelk`), sometimes just letters."""
    return fresh(rng, split, _pseudo)


def person(rng: random.Random, split: Split) -> str:
    """A first name, a full name, or a made-up name."""
    if rng.random() < 0.2:
        return pseudo(rng, split).capitalize()
    return full_name(rng, split) if rng.random() < 0.4 else FIRST.draw(rng, split)


def full_name(rng: random.Random, split: Split) -> str:
    """A first and a last name, either of which may be made up."""
    last = pseudo(rng, split).capitalize() if rng.random() < 0.45 else LAST.draw(rng, split)
    first = pseudo(rng, split).capitalize() if rng.random() < 0.1 else FIRST.draw(rng, split)
    return f"{first} {last}"


def city(rng: random.Random, split: Split) -> str:
    """A city, or a made-up name."""
    return pseudo(rng, split).capitalize() if rng.random() < 0.2 else CITIES.draw(rng, split)


def title(rng: random.Random, split: Split) -> str:
    """One to four words that do not belong together, as a title."""
    words = [pick(rng, WORDS.all) for _ in range(pick(rng, (1, 2, 2, 3, 3, 4)))]
    words[-1] = pseudo(rng, split) if rng.random() < 0.25 else WORDS.draw(rng, split)
    text = " ".join(words)
    return text.title() if rng.random() < 0.7 else text


_SMALL_WORDS = words_of("the a my your our we I you is are was to in on for with and of not at by it this will can see")


def message(rng: random.Random, split: Split) -> str:
    """A few words: ones that make sense, or any, so that copying them takes reading and no memory."""
    if rng.random() < 0.4:
        text = MESSAGES.draw(rng, split)
    else:
        parts = [pick(rng, _SMALL_WORDS if rng.random() < 0.4 else WORDS.all) for _ in range(rng.randint(1, 6))]
        new = pseudo(rng, split) if rng.random() < 0.3 else WORDS.draw(rng, split)
        parts.insert(rng.randint(0, len(parts)), new)
        text = " ".join(parts)
    return text[0].upper() + text[1:] if rng.random() < 0.3 else text


def iso_date(rng: random.Random, split: Split) -> str:
    """A date such as `2024-05-17`."""
    return fresh(rng, split, lambda r: f"20{r.randint(20, 35)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}")


def date(rng: random.Random, split: Split) -> str:
    """A date such as `2024-05-17`, `17 May` or `May 17`."""
    how = rng.random()
    if how < 0.5:
        return iso_date(rng, split)
    if how < 0.75:
        return fresh(rng, split, lambda r: f"{r.randint(1, 28)} {pick(r, MONTHS)}")
    return fresh(rng, split, lambda r: f"{pick(r, MONTHS)} {r.randint(1, 28)}")


def day(rng: random.Random, split: Split) -> str:
    """A date, or a day that is told from today, such as tomorrow."""
    return date(rng, split) if rng.random() < 0.5 else RELATIVE_DAYS.draw(rng, split)


def clock(rng: random.Random, split: Split) -> str:
    """A time such as `14:30` or `3 pm`."""
    if rng.random() < 0.75:
        return fresh(
            rng, split, lambda r: f"{r.randint(0, 23):02d}:{pick(r, ('00', '15', '30', '45', '05', '20', '50'))}"
        )
    return fresh(rng, split, lambda r: f"{r.randint(1, 12)} {pick(r, ('am', 'pm'))}", one_in=4)


def _code(rng: random.Random) -> str:
    letters = "".join([pick(rng, _LETTERS).upper() for _ in range(rng.randint(1, 3))])
    digits = str(rng.randint(10, 99999))
    return f"{letters}{pick(rng, ('-', '', '-', '_'))}{digits}"


def code(rng: random.Random, split: Split) -> str:
    """An order number or the like: one to three capital letters, then two to five digits."""
    return fresh(rng, split, _code)


def email(rng: random.Random, split: Split) -> str:
    """An address at one of a few example domains."""
    name = pseudo(rng, split) if rng.random() < 0.45 else FIRST.draw(rng, split).lower()
    if rng.random() < 0.3:
        name += "." + LAST.draw(rng, split).lower()
    return f"{name}@{pick(rng, ('example.com', 'mail.com', 'example.org', 'work.net', 'post.de'))}"


def phone(rng: random.Random, split: Split) -> str:
    """A number such as `555-0123`."""
    return fresh(rng, split, lambda r: f"{r.randint(200, 999)}-{r.randint(0, 9999):04d}")


def small(rng: random.Random, split: Split) -> int:
    """1 to 12, the same in every split: too few to reserve."""
    return 1 + int(rng.random() * 12)


def medium(rng: random.Random, split: Split) -> int:
    """1 to 999. Only training has numbers up to 12."""
    if split == "train" and rng.random() < 0.06:
        return small(rng, split)
    return fresh(rng, split, lambda r: r.randint(13, 99) if r.random() < 0.5 else r.randint(13, 999))


def large(rng: random.Random, split: Split) -> int:
    """100 to 99,999."""
    return fresh(rng, split, lambda r: r.randint(100, 99999))


def decimal(rng: random.Random, split: Split) -> float:
    """0.1 to 500, with one or two decimals."""
    return fresh(rng, split, lambda r: round(r.uniform(0.1, 500), 1 + (r.random() < 0.5)))


def year(rng: random.Random, split: Split) -> int:
    """1900 to 2035."""
    return fresh(rng, split, lambda r: r.randint(1900, 2035))


def words(rng: random.Random, split: Split) -> list[str]:
    """Two to four different words; only the first one, and made-up ones, are of the split's own part."""
    count = 2 + int(rng.random() * 2.3)
    found: list[str] = []
    while len(found) < count:
        word = (
            pseudo(rng, split)
            if rng.random() < 0.15
            else (WORDS.draw(rng, split) if not found else pick(rng, WORDS.all))
        )
        if word not in found:
            found.append(word)
    return found


def people(rng: random.Random, split: Split) -> list[str]:
    """Two or three different first names; only the first one is of the split's own part."""
    names = [FIRST.draw(rng, split)]
    while len(names) < 2 + (rng.random() < 0.4):
        name = pick(rng, FIRST.all)
        if name not in names:
            names.append(name)
    return names


def expression(rng: random.Random, split: Split) -> str:
    """Two numbers and an operator, such as `17 * 4`."""
    return fresh(rng, split, lambda r: f"{r.randint(2, 999)} {pick(r, '+-*/')} {r.randint(2, 99)}")


def path(rng: random.Random, split: Split) -> str:
    """A file's path, absolute or relative, with an extension."""
    folder = pick(rng, ("", "/tmp/", "docs/", "src/", "/home/data/", "./", "notes/"))
    name = pseudo(rng, split) if rng.random() < 0.4 else WORDS.draw(rng, split)
    return f"{folder}{name}.{pick(rng, ('txt', 'md', 'csv', 'json', 'py', 'log'))}"


def product(rng: random.Random, split: Split) -> str:
    """A thing, or a made-up name, so that it must be read letter by letter."""
    return pseudo(rng, split) if rng.random() < 0.3 else PRODUCTS.draw(rng, split)


def _from(pool: Pool) -> Callable[[random.Random, Split], str]:
    return pool.draw


# Kind of value -> (JSON type, how to draw one).
KINDS: dict[str, tuple[str, Callable[[random.Random, Split], Any]]] = {
    "person": ("string", person),
    "full_name": ("string", full_name),
    "city": ("string", city),
    "country": ("string", _from(COUNTRIES)),
    "color": ("string", _from(COLORS)),
    "language": ("string", _from(LANGUAGES)),
    "currency": ("string", _from(CURRENCIES)),
    "food": ("string", _from(FOODS)),
    "product": ("string", product),
    "ticker": ("string", _from(TICKERS)),
    "room": ("string", _from(ROOMS)),
    "title": ("string", title),
    "message": ("string", message),
    "pseudo": ("string", pseudo),
    "date": ("string", date),
    "iso_date": ("string", iso_date),
    "day": ("string", day),
    "clock": ("string", clock),
    "code": ("string", code),
    "email": ("string", email),
    "phone": ("string", phone),
    "small": ("integer", small),
    "medium": ("integer", medium),
    "large": ("integer", large),
    "decimal": ("number", decimal),
    "year": ("integer", year),
    "words": ("array", words),
    "people": ("array", people),
    "expression": ("string", expression),
    "path": ("string", path),
    "word": ("string", WORDS.draw),
}

# Kinds with values that training sees all of; a question with only such values cannot be new.
CLOSED = frozenset({"flag", "small", "day", "room", "food", "color", "language", "currency", "country"})


def is_open(kind: str) -> bool:
    """Whether values of this kind are divided between training and evaluation."""
    return kind not in CLOSED and not kind.startswith("enum:")
