"""Word problems. A story is a family; HELD stories are never trained on.

Slots: {n} and {m} people, {o} things, {d} a weekday, {a} {b} {c} numbers. After the bar: what the answer counts.
Two-step stories carry their plan: the operations in order, each applied to the result so far. Besides the stories
written out there are those woven from a situation, an event and a question; one in four woven ones is held out.
"""

from nano.data_tools_values import lines, reserved

STORIES: dict[str, tuple[str, ...]] = {
    "add": lines("""\
{n} has {a} {o}. {m} gives {n} {b} more. How many {o} does {n} have now?|{o}
{n} has {a} {o} and {m} has {b} {o}. How many {o} do they have together?|{o}
{n} collects {a} {o} on {d} and {b} on the next day. How many {o} is that in total?|{o}
There are {a} {o} in one box and {b} {o} in another. How many {o} are there altogether?|{o}
A shop sells {a} {o} in the morning and {b} in the afternoon. How many {o} does it sell that day?|{o}
{n} reads {a} pages on {d} and {b} pages the day after. How many pages has {n} read?|pages
A train carries {a} passengers. At the next stop {b} more get on. How many passengers are on the train?|passengers
{n} saves {a} dollars and then earns {b} dollars. How much money does {n} have now?|dollars
A farmer has {a} cows and {b} sheep. How many animals does the farmer have?|animals
{n} drives {a} km before lunch and {b} km after lunch. How far does {n} drive in total?|km
A school has {a} girls and {b} boys. How many children are there?|children
{n} bakes {a} muffins, then another {b}. How many muffins are there now?|muffins
A library owns {a} books and buys {b} new ones. How many books does it own now?|books
{n} finds {a} {o}. Later {n} finds {b} more. How many {o} has {n} found?|{o}
A tank holds {a} liters. {b} liters are added. How many liters are in it now?|liters
In a game {n} scores {a} points in the first round and {b} points in the second. What is the total score?|points
{n} plants {a} trees, and {m} plants {b} trees. How many trees did they plant?|trees
A museum has {a} visitors on Saturday and {b} on Sunday. How many visitors came on the weekend?|visitors
{n} spends {a} euros on food and {b} euros on a ticket. How much does {n} spend?|euros
There were {a} birds on a tree. {b} more birds came. How many birds are on the tree now?|birds
A jar has {a} red and {b} blue {o}. How many {o} are in the jar?|{o}
{n} wrote {a} words yesterday and {b} words today. How many words is that?|words
A bus drives {a} km to {v} and then {b} km further. How long is the whole trip?|km
{n} has {b} more {o} than {m}. {m} has {a} {o}. How many {o} does {n} have?|{o}
A theater sold {a} tickets online and {b} at the door. How many tickets were sold?|tickets
{n} walks {a} steps in the morning and {b} in the evening. How many steps is that in all?|steps
A baker uses {a} eggs for cakes and {b} eggs for bread. How many eggs does the baker use?|eggs
The price was {a} dollars. It goes up by {b} dollars. What is the price now?|dollars
{n} got {a} messages from {m} and {b} from others. How many messages did {n} get?|messages
On {d} {n} counted {a} cars, and {m} counted {b}. How many cars did they count together?|cars
A village has {a} people. {b} people move there. How many people live there now?|people
{n} owns {a} {o}. For a birthday {n} gets {b} {o}. What is the number of {o} now?|{o}
A team won {a} games last year and {b} games this year. How many games did it win?|games
Yesterday {n} made {a} {o}. Today {n} made {b} {o}. How many {o} were made on both days?|{o}
There are {a} seats downstairs and {b} seats upstairs. How many seats are there in all?|seats"""),
    "sub": lines("""\
{n} has {a} {o} and gives {b} to {m}. How many {o} does {n} have left?|{o}
{n} had {a} {o} but lost {b}. How many {o} are left?|{o}
There are {a} {o} in a box. {n} takes out {b}. How many {o} remain?|{o}
A shop has {a} {o} and sells {b} of them. How many {o} are left in the shop?|{o}
{n} has {a} dollars and spends {b}. How much money is left?|dollars
A train carries {a} passengers. {b} get off. How many passengers are still on the train?|passengers
A book has {a} pages. {n} has read {b} pages. How many pages are left to read?|pages
{n} has {a} {o} and {m} has {b} {o}. How many more {o} does {n} have than {m}?|{o}
{n} baked {a} cookies. The guests ate {b}. How many cookies are left?|cookies
A tank holds {a} liters. {b} liters leak out. How many liters remain?|liters
The trip is {a} km long. {n} has driven {b} km. How many km are left?|km
{n} needs {a} points and has {b}. How many points are missing?|points
There were {a} birds on a roof. {b} flew away. How many birds are still there?|birds
A farmer had {a} sheep and sold {b}. How many sheep does the farmer have now?|sheep
The price was {a} euros. It drops by {b} euros. What is the new price?|euros
A theater has {a} seats. {b} are taken. How many seats are free?|seats
{n} picked {a} {o}. {b} of them were bad and thrown away. How many good {o} are there?|{o}
A school has {a} children. {b} of them are girls. How many boys are there?|boys
{n} had {a} stamps, then sold {b} to {m}. How many stamps does {n} keep?|stamps
Out of {a} {o}, {b} are broken. How many {o} are not broken?|{o}
{n} is reading {a} pages this week and has finished {b}. How many pages remain?|pages
A baker made {a} rolls and sold {b} by noon. How many rolls are unsold?|rolls
{n} wants a bike for {a} dollars and has saved {b} dollars. How much is still needed?|dollars
A rope is {a} meters long. {n} cuts off {b} meters. How long is the rest?|meters
In {d}'s race {a} people started and {b} gave up. How many people finished?|people
{n} has {b} fewer {o} than {m}. {m} has {a} {o}. How many {o} does {n} have?|{o}
A garden had {a} flowers. The rabbits ate {b}. How many flowers are left?|flowers
{m} owed {n} {a} dollars and paid back {b}. How much does {m} still owe?|dollars
A phone had {a} photos. {n} deleted {b}. How many photos are on it now?|photos
{n} started with {a} cards and lost {b} in a game. How many cards does {n} have now?|cards
A factory made {a} {o}. {b} were shipped on {d}. How many {o} are still there?|{o}
There are {a} candies in a bowl. The children eat {b}. How many candies stay in the bowl?|candies
A plane had {a} seats and {b} were empty. How many seats were used?|seats
{n} weighed {a} pounds and lost {b} pounds. What does {n} weigh now?|pounds
Of {a} tickets, {b} were sold. How many tickets were not sold?|tickets"""),
    "mul": lines("""\
There are {b} boxes with {a} {o} each. How many {o} are there in total?|{o}
{n} buys {a} {o} for {b} dollars each. How much does {n} pay?|dollars
Each box holds {a} {o}. How many {o} are in {b} boxes?|{o}
{n} reads {a} pages every day. How many pages does {n} read in {b} days?|pages
A bus has {a} seats. How many seats do {b} buses have?|seats
One ticket costs {a} euros. How much do {b} tickets cost?|euros
{n} earns {a} dollars per hour and works {b} hours. How much does {n} earn?|dollars
A garden has {b} rows with {a} flowers in each row. How many flowers are there?|flowers
Each of {b} children gets {a} {o}. How many {o} are needed?|{o}
A machine makes {a} {o} per hour. How many {o} does it make in {b} hours?|{o}
{n} runs {a} km every day for {b} days. How far is that in total?|km
A pack contains {a} {o}. {n} buys {b} packs. How many {o} is that?|{o}
There are {b} classes with {a} students each. How many students are there?|students
A hotel has {b} floors with {a} rooms on each floor. How many rooms does it have?|rooms
A baker fills {b} trays with {a} rolls each. How many rolls is that?|rolls
{n} has {b} bags. Every bag has {a} {o} in it. How many {o} does {n} have?|{o}
A car drives {a} km per hour. How far does it go in {b} hours?|km
{b} friends each bring {a} {o}. How many {o} do they bring together?|{o}
A farmer has {b} fields with {a} trees on each field. How many trees are there?|trees
{n} sells {a} {o} a day. How many {o} are sold in {b} days?|{o}
A theater has {a} rows of {b} seats. How many seats is that?|seats
{n} saves {a} dollars every month. How much is saved after {b} months?|dollars
One crate weighs {a} kg. What do {b} crates weigh?|kg
{m} writes {a} letters per week. How many letters in {b} weeks?|letters
A rectangle is {a} cm long and {b} cm wide. What is its area?|square cm
Each shelf holds {a} books. How many books fit on {b} shelves?|books
A printer prints {a} pages a minute. How many pages does it print in {b} minutes?|pages
{n} has {b} albums with {a} photos each. How many photos are there altogether?|photos
Every wagon of a train has {a} seats. The train has {b} wagons. How many seats are there?|seats
{n} drinks {a} glasses of water a day. How many glasses is that in {b} days?|glasses
A box of {a} {o} is bought {b} times. How many {o} is that?|{o}
{b} workers carry {a} bricks each. How many bricks do they carry?|bricks
A film shows {a} pictures per second. How many pictures are shown in {b} seconds?|pictures
A lesson takes {a} minutes. How many minutes do {b} lessons take?|minutes
There are {a} tables with {b} chairs at each table. How many chairs are there?|chairs"""),
    "div": lines("""\
{n} shares {a} {o} equally among {b} friends. How many {o} does each friend get?|{o}
{a} {o} are packed into boxes of {b}. How many boxes are needed?|boxes
{n} has {a} {o} and puts them into {b} equal groups. How many {o} are in each group?|{o}
A rope of {a} meters is cut into {b} equal pieces. How long is each piece?|meters
{b} people share {a} dollars equally. How much does each person get?|dollars
{n} reads {a} pages in {b} days, the same number each day. How many pages a day is that?|pages
A teacher splits {a} students into {b} equal teams. How many students are in each team?|students
{b} tickets cost {a} euros. How much does one ticket cost?|euros
There are {a} {o} in {b} boxes, the same number in each box. How many {o} are in one box?|{o}
{n} has {a} {o}. A bag holds {b} {o}. How many bags can {n} fill?|bags
A machine makes {a} {o} in {b} hours. How many {o} does it make per hour?|{o}
{a} children sit at tables with {b} seats each. How many tables do they fill?|tables
A car drives {a} km in {b} hours at the same speed. How many km does it drive per hour?|km
{n} earns {a} dollars for {b} hours of work. How much is that per hour?|dollars
A farmer plants {a} trees in {b} equal rows. How many trees are in each row?|trees
{a} books stand on {b} shelves, the same number on each. How many books are on one shelf?|books
{n} pays {a} dollars in {b} equal payments. How big is each payment?|dollars
A baker puts {a} rolls into bags of {b}. How many bags does the baker get?|bags
{a} {o} are shared by {b} children. How many does each child get?|{o}
{n} and the family walk {a} km in {b} days, equally far each day. How far do they walk each day?|km
A ribbon of {a} cm is cut into parts of {b} cm. How many parts are there?|parts
{b} buses carry {a} people, the same number in each bus. How many people are in one bus?|people
{n} divides {a} cards equally between {b} players. How many cards does each player get?|cards
{a} chairs are put in rows of {b}. How many rows are there?|rows
A hotel has {a} rooms on {b} floors, all floors the same. How many rooms are on one floor?|rooms
{m} types {a} words in {b} minutes. How many words per minute is that?|words
{n} has {a} photos and puts {b} on each page. How many pages does {n} need?|pages
{b} identical crates weigh {a} kg. What does one crate weigh?|kg
{a} muffins fill {b} trays equally. How many muffins are on a tray?|muffins
{n} saves {b} dollars a week. After how many weeks does {n} have {a} dollars?|weeks
A team of {b} workers carries {a} bricks, each the same number. How many bricks does each worker carry?|bricks
{n} cuts {a} flowers and makes bunches of {b}. How many bunches are there?|bunches
{a} minutes are split into {b} equal lessons. How long is a lesson?|minutes
A prize of {a} euros is divided among {b} winners. How much does each winner get?|euros
{a} pencils come in packs of {b}. How many packs is that?|packs"""),
}  # fmt: skip
HELD_STORIES: dict[str, tuple[str, ...]] = {
    "add": lines("""\
{n} buys {a} {o} and then {b} more. How many {o} does {n} have in total?|{o}
One shelf has {a} books and another has {b} books. How many books are there together?|books
{n} and {m} have {a} and {b} {o}. What is the total number of {o}?|{o}
A zoo has {a} fish and {b} birds. How many animals are there altogether?|animals
{n} earned {a} dollars on {d} and {b} dollars today. How much is that in total?|dollars
A farm had {a} ducks and got {b} more. How many ducks are there now?|ducks
In the morning {a} people came, and in the afternoon {b} more. How many people came in all?|people
{m} cycles {a} km on Monday and {b} km on Tuesday. How many km in total?|km
{n} puts {a} {o} into a bag that already has {b} {o}. How many {o} are in the bag now?|{o}"""),
    "sub": lines("""\
{n} buys {a} {o} and gives away {b}. How many {o} are left?|{o}
There were {a} books on a shelf. {n} took {b}. How many books remain on the shelf?|books
{m} had {a} dollars and paid {b} for a ticket. How many dollars are left?|dollars
A bus has {a} people. {b} people get off. How many are still on the bus?|people
A pool holds {a} liters and {b} liters are taken out. How many liters are left?|liters
{n} has {a} {o}. {m} takes {b} of them. How many {o} does {n} still have?|{o}
A bakery made {a} cakes. It sold {b}. How many cakes are left?|cakes
A farm had {a} ducks and sold {b}. How many ducks are there now?|ducks
{n} had {a} balloons, but {b} flew away. How many balloons are left?|balloons"""),
    "mul": lines("""\
{n} has {b} boxes. There are {a} {o} in each box. How many {o} does {n} have?|{o}
A pen costs {a} dollars. How much do {b} pens cost?|dollars
There are {a} chairs in each of {b} rooms. How many chairs are there in total?|chairs
{n} writes {a} pages per day. How many pages is that in {b} days?|pages
A box holds {a} eggs. How many eggs do {b} boxes hold?|eggs
{n} buys {b} bags with {a} {o} each. How many {o} is that?|{o}
A worker makes {a} {o} per day. How many {o} in {b} days?|{o}
A garden has {a} rows of {b} trees. How many trees is that?|trees
Each of the {b} students brings {a} {o}. How many {o} do they bring in total?|{o}"""),
    "div": lines("""\
{n} puts {a} {o} equally into {b} boxes. How many {o} are in each box?|{o}
{b} friends share {a} {o} equally. How many {o} does each get?|{o}
{a} eggs are packed into boxes of {b}. How many boxes is that?|boxes
{b} pens cost {a} dollars. How much does one pen cost?|dollars
{n} splits {a} dollars equally among {b} children. How much does each child get?|dollars
A class of {a} students is split into teams of {b}. How many teams are there?|teams
{n} walks {a} km in {b} days, the same each day. How many km per day?|km
{a} {o} are divided equally between {b} people. How many does each person get?|{o}
A board of {a} cm is cut into {b} equal pieces. How long is one piece?|cm"""),
}  # fmt: skip

# PLAN|STORY|UNIT. The plan's letters are operands: "a+b-c" is (a + b) - c.
TWO_STEP: tuple[str, ...] = lines("""\
a*b-c|There are {b} bags with {a} {o} in each. {m} eats {c} {o}. How many {o} are left?|{o}
a*b-c|A shop has {b} crates with {a} {o} each. It sells {c} {o}. How many {o} remain?|{o}
a*b-c|{n} fills {b} boxes with {a} {o} each, but {c} {o} break. How many good {o} are there?|{o}
a*b+c|{n} has {b} bags of {a} {o} and {m} adds {c} {o}. How many {o} is that?|{o}
a*b+c|{n} buys {b} boxes of {a} {o} and finds {c} more {o}. What is the total number of {o}?|{o}
a*b+c|There are {b} tables with {a} chairs each and {c} chairs more. How many chairs are there in total?|chairs
a-b+c|A train has {a} people. {b} people leave and {c} people get in. How many people are there now?|people
a-b+c|{n} has {a} dollars, spends {b} dollars and earns {c} dollars. How many dollars does {n} have now?|dollars
a+b-c|{n} found {a} {o}, made {b} more and sold {c}. How many {o} remain?|{o}
a-b-c|A bus has {a} people. {b} get off, then {c} more get off. How many people are left?|people
a+b-c|{n} has {a} {o}, gets {b} more and gives {c} away. How many {o} does {n} have now?|{o}
a+b-c|A train carries {a} people. {b} get on and {c} get off. How many people are on the train?|people
a+b-c|{n} had {a} dollars, earned {b} dollars and spent {c} dollars. How much is left?|dollars
a+b+c|{n} picks {a} {o} on Monday, {b} on Tuesday and {c} on Wednesday. How many {o} is that in total?|{o}
a+b+c|{n} spends {a} dollars on shoes, {b} dollars on a shirt and {c} dollars on a hat. How much is that?|dollars
a-b-c|{n} has {a} {o}, gives {b} to {m} and loses {c}. How many {o} are left?|{o}
a-b-c|A shop has {a} {o}. It sells {b} in the morning and {c} in the afternoon. How many {o} are left?|{o}
a-b+c|{n} had {a} {o}, lost {b} and then found {c}. How many {o} does {n} have now?|{o}
a-b+c|A library has {a} books, lends {b} and gets {c} back. How many books are there now?|books
a*b+c|{n} has {b} boxes with {a} {o} each and {c} more on the table. How many {o} does {n} have?|{o}
a*b+c|{n} buys {b} tickets for {a} dollars each and a drink for {c} dollars. How much does {n} pay?|dollars
a*b-c|{n} has {b} bags with {a} {o} each and gives {c} {o} to {m}. How many {o} are left?|{o}
a*b-c|A baker fills {b} trays with {a} rolls each and sells {c} rolls. How many rolls are left?|rolls
a/b+c|{n} shares {a} {o} equally among {b} children. {m} is one of them and already had {c} {o}. \
How many {o} does {m} have now?|{o}
a/b-c|{a} {o} are shared equally by {b} people. {n} is one of them and loses {c}. How many {o} does {n} have left?|{o}
a+b*c|A box has {a} red and {b} blue {o}. How many {o} are in {c} such boxes?|{o}""")  # fmt: skip
HELD_TWO_STEP: tuple[str, ...] = lines("""\
a-b-c|{n} had {a} dollars, spent {b} dollars on food and {c} dollars on a book. How many dollars are left?|dollars
a+b-c|{n} had {a} {o}, bought {b} more and gave {c} to {m}. How many {o} does {n} have left?|{o}
a-b+c|A bus carries {a} people. {b} get off and {c} get on. How many people are on the bus?|people
a*b+c|{n} buys {b} packs of {a} {o} and {c} more {o}. How many {o} is that in total?|{o}
a*b-c|There are {b} boxes with {a} {o} each. {n} takes {c} {o}. How many {o} are left?|{o}""")  # fmt: skip

DISTRACTORS: tuple[str, ...] = (
    "{n} is {k} years old.", "The shop opens at {k} o'clock.", "It is {k} degrees outside.", "{m} has {k} cousins.",
    "{n} lives at number {k}.", "The bag weighs {k} kg.", "{n} got up at {k}.", "There are {k} people in the room.",
    "The bus ride takes {k} minutes.", "{m} is {k} years younger.",
)  # fmt: skip
HELD_DISTRACTORS: tuple[str, ...] = ("{m} is {k} years old.", "{n} has {k} cousins.", "The ride takes {k} minutes.")


def _woven(pairs: tuple[tuple[str, str, str], ...]) -> tuple[str, ...]:
    """Every situation of a row with every event and every question of the row."""
    return tuple(
        f"{situation} {event} {question}"
        for situations, events, questions in pairs
        for situation in lines(situations)
        for event in lines(events)
        for question in lines(questions)
    )


_LEFT = """\
How many {o} are left?|{o}
How many {o} does {n} have left?|{o}
How many {o} does {n} have now?|{o}
How many {o} remain?|{o}
How many {o} does {n} still have?|{o}
What is the number of {o} now?|{o}"""
_NOW = """\
How many {o} does {n} have now?|{o}
How many {o} does {n} have in total?|{o}
How many {o} is that altogether?|{o}
How many {o} are there in all?|{o}
What is the total number of {o}?|{o}
How many {o} does {n} have then?|{o}"""
_COUNT = """\
How many {o} are there in total?|{o}
How many {o} is that?|{o}
How many {o} are there altogether?|{o}
How many {o} are there in all?|{o}
What is the total number of {o}?|{o}"""
_OWN = """\
{n} has {a} {o}.
{n} had {a} {o}.
{n} owns {a} {o}.
{n} starts with {a} {o}.
On {d} {n} had {a} {o}.
There are {a} {o} in {n}'s bag.
{n} keeps {a} {o} in a box.
{n} bought {a} {o}.
{n} collected {a} {o}."""
_MONEY = """\
{n} has {a} dollars.
{n} had {a} dollars.
There are {a} dollars on {n}'s account.
{n} saved {a} dollars."""
_PLACE = """\
There were {a} people in the room.
A bus carries {a} people.
A train has {a} people on board.
{a} people were at a party.
{a} people sat in a cafe.
A ship has {a} people on it."""
_PEOPLE_NOW = """\
How many people are there now?|people
How many people is that now?|people
What is the number of people now?|people
How many people are there after that?|people"""
_DOLLARS = """\
How much money does {n} have now?|dollars
How many dollars does {n} have now?|dollars
How many dollars is that?|dollars
How much money is there now?|dollars"""
_MORE = """\
{n} gets {b} more.
{n} buys {b} more.
{n} finds {b} more {o}.
Then {n} wins {b} more.
{m} brings {b} more {o}.
{n} receives {b} {o} from {m}.
Later {n} collects {b} more.
{m} adds {b} {o}.
{n} picks up another {b}.
{n} makes {b} more {o}."""
_LESS = """\
{n} gives {b} to {m}.
{n} gives away {b}.
{n} loses {b}.
{n} sells {b} of them.
{m} takes {b} of them.
{b} of them break.
{n} throws away {b}.
{n} uses {b} {o}.
{b} {o} get lost.
{n} drops {b} of them.
{n} sends {b} {o} to {m}."""
_WEAVES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "add": (
        (_OWN, _MORE, _NOW),
        (_MONEY, "{n} earns {b} more dollars.\n{n} gets {b} dollars from {m}.\n{n} finds {b} dollars.\n"
         "{m} pays {n} {b} dollars.", _DOLLARS),
        (_PLACE, "{b} more come.\nThen {b} more people get in.\n{b} people join them.\n"
         "Another {b} arrive.", _PEOPLE_NOW),
        ("{n} has {a} {o}.\n{n} made {a} {o}.\nOn one table are {a} {o}.", "{m} has {b} {o}.\n{m} made {b} {o}.\n"
         "Another table has {b} {o}.", "How many {o} are there together?|{o}\n" + _COUNT),
    ),
    "sub": (
        (_OWN, _LESS, _LEFT),
        (_MONEY, "{n} spends {b} dollars.\n{n} pays {b} dollars for a ticket.\n{n} gives {m} {b} dollars.\n"
         "{n} loses {b} dollars.", "How much money is left?|dollars\nHow many dollars are left?|dollars\n" + _DOLLARS),
        (_PLACE, "{b} people leave.\n{b} of them go home.\nThen {b} leave.\n{b} people go out.",
         "How many people are left?|people\nHow many people are still there?|people\n" + _PEOPLE_NOW),
        ("{n} has {a} {o}.\n{n} found {a} {o}.", "{m} has {b} {o}.\n"
         "{m} found only {b}.", "How many more {o} does {n} have than {m}?|"
         "{o}\nWhat is the difference?|{o}"),
    ),
    "mul": (
        ("{n} has {b} boxes.\nThere are {b} bags.\nA shop has {b} baskets.\n{m} packs {b} bags.\n{n} buys {b} packs.\n"
         "There are {b} drawers.\nA truck brings {b} crates.", "Each one holds {a} {o}.\nThere are {a} {o} in each.\n"
         "Every one contains {a} {o}.\nIn each of them are {a} {o}.\nEach has {a} {o} in it.", _COUNT),
        ("{n} makes {a} {o} per day.\n{n} sells {a} {o} every day.\nA machine makes {a} {o} a day.\n"
         "{n} needs {a} {o} each day.\n"
         "A worker packs {a} {o} per day.", "This goes on for {b} days.\n{n} does this for {b} days.\n"
         "It takes {b} days.",
         _COUNT),
        ("One ticket costs {a} dollars.\nA pen costs {a} dollars.\nEach chair costs {a} dollars.\n"
         "The price of a book is {a} dollars.\n"
         "A lamp costs {a} dollars.", "{n} buys {b} of them.\n{n} needs {b}.\n{n} takes {b}.\n{n} orders {b}.",
         "How much does {n} pay?|dollars\nHow much is that?|dollars\nWhat does that cost in total?|dollars\n"
         "How many dollars is that?|dollars"),
        ("There are {b} rows of chairs.\nA hall has {b} rows of chairs.\nThere are {b} rooms with chairs.",
         "Each has {a} chairs.\nThere are {a} chairs in every one.", "How many chairs are there?|chairs\n"
         "How many chairs is that in total?|chairs\nHow many chairs are there altogether?|chairs"),
    ),
    "div": (
        ("{n} has {a} {o}.\nThere are {a} {o}.\n{n} bought {a} {o}.\n{n} brings {a} {o}.\nA box has {a} {o} in it.",
         "{b} children share them equally.\nThey are divided equally among {b} people.\n"
         "{b} friends get the same number each.\n"
         "{n} splits them equally between {b} people.\n{n} hands them out evenly to {b} people.",
         "How many {o} does each get?|{o}\nHow many {o} does each person get?|{o}\n"
         "How many {o} are there for each?|{o}\n"
         "How many {o} does one of them get?|{o}"),
        ("{n} has {a} {o}.\nThere are {a} {o}.\nA shop has {a} {o}.", "{n} puts them equally into {b} boxes.\n"
         "They are put into {b} equal groups.\nThey are spread evenly over {b} shelves.\n"
         "{m} sorts them into {b} equal piles.",
         "How many {o} are in each?|{o}\nHow many {o} are in one of them?|{o}\nHow many {o} does each hold?|{o}"),
        ("{n} has {a} {o}.\nThere are {a} {o}.\nA factory made {a} {o}.", "{b} of them fit into a box.\n"
         "They are packed into boxes of {b}.\nA box holds {b} of them.\n{n} puts {b} into every box.",
         "How many boxes are needed?|boxes\nHow many boxes is that?|boxes\nHow many boxes are full?|boxes"),
        ("A rope is {a} meters long.\nA board is {a} meters long.\nA ribbon is {a} meters long.\n"
         "A pipe is {a} meters long.",
         "It is cut into {b} equal pieces.\n{n} cuts it into {b} equal parts.\nIt is divided into {b} equal pieces.",
         "How long is each?|meters\nHow long is one of them?|meters\nHow many meters long is each?|meters"),
        ("{b} tickets cost {a} dollars.\n{n} pays {a} dollars for {b} chairs.\nThe price of {b} lamps is {a} dollars.\n"
         "{b} books cost {a} dollars.", "They all cost the same.\nEach has the same price.",
         "How much does one cost?|dollars\nWhat is the price of one?|dollars\nHow much is one of them?|dollars"),
    ),
}  # fmt: skip
_THEN_MORE = """\
Then {n} gets {c} more.
After that {n} buys {c} more.
Later {m} brings {c} more."""
_THEN_LESS = """\
Then {n} gives {c} to {m}.
After that {n} loses {c}.
Later {m} takes {c} of them."""


def _two_steps(plan: str, operation: str, then: str, questions: str) -> tuple[str, ...]:
    """A woven story with a second event. Only rows about {o}, the first one of the operation."""
    situations, events, _ = _WEAVES[operation][0]
    woven = _woven(((situations, events, then),))
    return tuple(f"{plan}|{story} {question}" for story in woven for question in lines(questions))


def _keep(stories: tuple[str, ...], held: bool) -> tuple[str, ...]:
    return tuple(story for story in stories if reserved("story", story, one_in=4) == held)


_WOVEN = {operation: _woven(rows) for operation, rows in _WEAVES.items()}
_WOVEN_TWO_STEP: tuple[tuple[str, ...], ...] = (
    _two_steps("a+b-c", "add", _THEN_LESS, _LEFT),
    _two_steps("a+b+c", "add", _THEN_MORE, _NOW),
    _two_steps("a-b+c", "sub", _THEN_MORE, _NOW),
    _two_steps("a-b-c", "sub", _THEN_LESS, _LEFT),
    _two_steps("a*b+c", "mul", "{c} more {o} lie on the table.\nThen {c} {o} are added.\n"
               "{m} brings {c} more {o}.", _COUNT),
    _two_steps("a*b-c", "mul", "{c} {o} are broken.\nThen {m} takes {c} {o}.\n{c} {o} are sold.",
               "How many {o} are left?|{o}\nHow many {o} remain?|{o}\nHow many {o} are still there?|{o}"),
)  # fmt: skip
WOVEN = {operation: _keep(stories, held=False) for operation, stories in _WOVEN.items()}
HELD_WOVEN = {operation: _keep(stories, held=True) for operation, stories in _WOVEN.items()}
WOVEN_TWO_STEP = tuple(_keep(stories, held=False) for stories in _WOVEN_TWO_STEP)
HELD_WOVEN_TWO_STEP = tuple(_keep(stories, held=True) for stories in _WOVEN_TWO_STEP)
