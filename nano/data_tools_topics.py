"""What tools can do: hand-written topics, and the parts that composed topics are made of.

A topic knows how its function may be called and described, its parameters, how users ask for it, and what a
result holds. The last fifth of its wordings, and every topic in HELD_TOPICS, stay out of training.
"""

from typing import NamedTuple

from nano.data_tools_values import lines, words_of


class Param(NamedTuple):
    """`kind` is a key of KINDS, `enum:a,b,c`, `flag`, or `people`. A flag's `denies` are the ways to say false."""

    names: tuple[str, ...]
    kind: str
    about: tuple[str, ...]
    inline: tuple[str, ...] = ()  # goes into the sentence: " in {}"
    says: tuple[str, ...] = ()  # a sentence of its own: "Use {}."
    denies: tuple[str, ...] = ()


class Topic(NamedTuple):
    """What a function may be about: its names, parameters, the ways to ask for it, and what its result holds."""

    names: tuple[str, ...]  # words of the function's name, joined later in some style
    about: tuple[str, ...]
    required: dict[str, Param]
    optional: dict[str, Param]
    asks: tuple[str, ...]
    fields: dict[str, str]  # what a result holds: field -> kind
    label: str  # what it is about, in a word that users say
    bare: tuple[str, ...] = ()  # asking without the first required parameter


def P(names: str, kind: str, about: str, inline: str = "", says: str = "", denies: str = "") -> Param:
    """A Param from text: names separated by blanks, all wordings by bars."""

    def split(text: str) -> tuple[str, ...]:
        return tuple(text.split("|")) if text else ()

    return Param(words_of(names), kind, split(about), split(inline), split(says), split(denies))


def T(
    names: str,
    about: str,
    required: dict[str, Param],
    asks: str,
    fields: dict[str, str],
    label: str,
    optional: dict[str, Param] | None = None,
    bare: str = "",
) -> Topic:
    """A Topic from text: names and descriptions are separated by bars, ways to ask by line ends."""
    return Topic(
        lines(names.replace("|", "\n")),
        lines(about.replace("|", "\n")),
        required,
        optional or {},
        lines(asks.strip()),
        fields,
        label,
        tuple(bare.split("|")) if bare else (),
    )


CITY = P("city location town place city_name", "city", "Name of the city|The city|City to look up", " in {}")
DAY = P("day date when", "day", "Day, as the user said it|Which day", "", "The day is {}.|I mean {}.|For {}.")
LANGUAGE = P(
    "language lang locale",
    "language",
    "Language of the answer|Language name",
    "",
    "Answer in {}.|Use {}.|Language: {}.",
)
LIMIT = P(
    "limit max_results count top",
    "small",
    "How many results at most",
    "",
    "Show at most {} results.|Limit it to {}.|Only {} results.|Give me {} results.",
)
FROM_CITY = P("origin from_city start departure from_place", "city", "Where the trip starts|Origin")
TO_CITY = P("destination to_city end arrival to_place", "city", "Where the trip ends|Destination")

TOPICS: dict[str, Topic] = {
    "weather": T(
        "get weather|weather|current weather|fetch weather|weather forecast|lookup weather|check weather",
        "Get the weather for a city|Current weather in a place|Returns the weather forecast|Look up the weather",
        {"city": CITY},
        """\
What's the weather in {city}?
What is the weather like in {city}?
How is the weather in {city}?
Tell me the weather in {city}.
Weather in {city}
weather {city}
Is it raining in {city}?
Will it rain in {city}?
Is it cold in {city}?
Do I need an umbrella in {city}?
Check the weather for {city}.
I am going to {city}. What will the weather be?
What's the forecast for {city}?
How warm is it in {city}?
How hot is it in {city} right now?
Wie ist das Wetter in {city}?
Quel temps fait-il à {city} ?
What is the temperature in {city}?
Can you look up the weather in {city}?
Give me the weather report for {city}.""",
        {"temperature": "small", "condition": "enum:sunny,cloudy,rainy,windy,foggy,snowy"},
        "weather",
        {
            "unit": P(
                "unit units temperature_unit scale",
                "enum:celsius,fahrenheit",
                "Unit of temperature",
                "",
                "Use {}.|In {}, please.|Show it in {}.|The unit is {}.",
            ),
            "day": DAY,
        },
        "What's the weather?|How is the weather?|Will it rain today?",
    ),
    "currency": T(
        "convert currency|currency converter|exchange money|exchange|fx convert|money converter|convert money",
        "Convert an amount between currencies|Convert money from one currency to another|Currency exchange",
        {
            "amount": P("amount value sum quantity", "medium", "Amount of money|How much to convert"),
            "from": P("from_currency source from base source_currency", "currency", "Currency to convert from"),
            "to": P("to_currency target to target_currency dest", "currency", "Currency to convert to"),
        },
        """\
Convert {amount} {from} to {to}.
How much is {amount} {from} in {to}?
What is {amount} {from} in {to}?
Change {amount} {from} into {to}.
I have {amount} {from}. How much is that in {to}?
Exchange {amount} {from} for {to}.
{amount} {from} to {to}
How many {to} do I get for {amount} {from}?
Please convert {amount} {from} into {to}.
I want to change {amount} {from} to {to}.
{amount} {from} in {to}?
Can you convert {amount} {from} to {to}?""",
        {"result": "decimal"},
        "currency",
    ),
    "email": T(
        "send email|send mail|email|compose email|mail send|email sender|write email|deliver mail",
        "Send an email|Send an e-mail to an address|Write and send an email message",
        {
            "to": P("to recipient address to_address receiver", "email", "E-mail address of the recipient"),
            "subject": P("subject title headline topic", "title", "Subject line"),
            "body": P("body message text content", "message", "Text of the message"),
        },
        """\
Send an email to {to} with the subject {subject} and the text "{body}".
Email {to} with subject {subject}: {body}
Write an email to {to}, subject {subject}, body "{body}".
Please send a mail to {to}. Subject: {subject}. Text: {body}
I need to email {to} about {subject}. Write: {body}
Mail {to} with the title {subject} and say "{body}".
Send {to} an email titled {subject} that says "{body}".
Send an email. To: {to}, subject: {subject}, message: {body}
Can you send an email to {to}? The subject is {subject} and the message is "{body}".
Compose an email to {to} with subject {subject} and body "{body}".""",
        {"status": "enum:sent,queued,delivered", "id": "code"},
        "email",
    ),
    "reminder": T(
        "set reminder|create reminder|remind|add reminder|reminder|remind me|new reminder",
        "Set a reminder|Remind the user at a time|Create a reminder with a text and a time",
        {
            "text": P("text message what reminder task", "message", "What to remind of"),
            "time": P("time at when clock_time", "clock", "Time of the reminder"),
        },
        """\
Remind me at {time}: {text}
Set a reminder for {time}: {text}
Set a reminder "{text}" at {time}.
At {time}, remind me: {text}
Please remind me at {time} with the text "{text}".
I need a reminder at {time} that says "{text}".
Create a reminder for {time} with the message "{text}".
Can you remind me at {time}? The text is "{text}".
Reminder at {time}: {text}
Make a reminder for {time} saying "{text}".""",
        {"id": "code"},
        "reminder",
        {"day": DAY},
    ),
    "timer": T(
        "set timer|start timer|timer|create timer|countdown|run timer|timer start",
        "Start a timer|Start a countdown of some minutes|Set a timer",
        {"minutes": P("minutes duration duration_minutes length mins", "medium", "Length in minutes|Minutes")},
        """\
Set a timer for {minutes} minutes.
Start a {minutes} minute timer.
Timer for {minutes} minutes, please.
Please start a timer of {minutes} minutes.
Set a {minutes}-minute timer.
Can you set a timer for {minutes} minutes?
Count down {minutes} minutes.
timer {minutes} min
I need a timer for {minutes} minutes.
Start a countdown of {minutes} minutes.""",
        {"id": "code"},
        "timer",
        {
            "label": P(
                "label name title", "title", "Name of the timer", " called {}| named {}", "Call it {}.|Name it {}."
            )
        },
        "Set a timer.|Start a timer for me.",
    ),
    "translate": T(
        "translate text|translate|translation|translator|text translate|get translation",
        "Translate a text into another language|Translates text|Translate a sentence",
        {
            "text": P("text sentence phrase source_text input", "message", "Text to translate"),
            "to": P("target_language language to target to_language", "language", "Language to translate into"),
        },
        """\
Translate "{text}" into {to}.
Translate "{text}" to {to}.
How do you say "{text}" in {to}?
What is "{text}" in {to}?
Please translate this into {to}: {text}
Give me the {to} translation of "{text}".
I need "{text}" in {to}.
Translate into {to}: {text}
Say "{text}" in {to}.
Can you translate "{text}" to {to}?""",
        {"translation": "title"},
        "translate",
    ),
    "stock": T(
        "get stock price|stock price|stock quote|get quote|share price|ticker price|fetch stock",
        "Get the price of a stock|Current share price by ticker|Look up a stock quote",
        {"ticker": P("ticker symbol stock stock_symbol", "ticker", "Ticker symbol")},
        """\
What's the stock price of {ticker}?
How much is a share of {ticker}?
Get me the price of {ticker} stock.
What is {ticker} trading at?
Stock price {ticker}
Check the stock {ticker}.
How is {ticker} stock doing?
What does one {ticker} share cost?
Look up the stock quote for {ticker}.
Tell me the current {ticker} share price.""",
        {"price": "decimal", "currency": "currency"},
        "stock",
        {"currency": P("currency quote_currency", "currency", "Currency of the price", "", "Show it in {}.|Use {}.")},
        "What's the stock price?|How much is a share?",
    ),
    "music": T(
        "play music|play song|music player|start song|play track|play|song player",
        "Play a song|Play music by title|Start playing a track",
        {"song": P("song track title song_name", "title", "Title of the song")},
        """\
Play the song {song}.
Play {song}.
Put on {song}.
I want to hear {song}.
Start the song {song}, please.
Can you play {song}?
Please play the track {song}.
Let me listen to {song}.
Play me {song}.
I would like to hear the song {song}.""",
        {"seconds": "medium"},
        "music",
        {
            "artist": P(
                "artist singer band performer", "full_name", "Who sings it", " by {}", "It is by {}.|The artist is {}."
            ),
            "shuffle": P(
                "shuffle random_order",
                "flag",
                "Whether to shuffle",
                "",
                "Turn shuffle on.|Use shuffle.",
                "Turn shuffle off.|No shuffle.",
            ),
        },
    ),
    "restaurant": T(
        "find restaurant|search restaurants|restaurant finder|restaurant search|lookup restaurants|places to eat",
        "Find restaurants by food and city|Search for a restaurant|Find places to eat",
        {"food": P("food cuisine dish kind", "food", "What to eat|Dish"), "city": CITY},
        """\
Find a restaurant with {food} in {city}.
Where can I eat {food} in {city}?
I want to eat {food} in {city}.
Look for {food} restaurants in {city}.
Search for a {food} place in {city}.
Which restaurant in {city} has {food}?
I am in {city} and hungry for {food}. Find a restaurant.
Show me restaurants with {food} in {city}.
Find me a place for {food} in {city}.
Can you find a {food} restaurant in {city}?""",
        {"name": "title", "rating": "decimal"},
        "restaurant",
        {
            "limit": LIMIT,
            "open": P(
                "open_now open only_open",
                "flag",
                "Only places that are open",
                "",
                "It must be open now.|Only open ones.",
                "It may be closed now.",
            ),
        },
    ),
    "table": T(
        "book table|reserve table|restaurant booking|table reservation|make reservation|reserve restaurant",
        "Book a table in a restaurant|Reserve a restaurant table|Make a table reservation",
        {
            "restaurant": P("restaurant place restaurant_name venue", "title", "Name of the restaurant"),
            "people": P("people guests party_size persons seats", "small", "Number of guests"),
            "time": P("time at hour", "clock", "Time of the booking"),
        },
        """\
Book a table at {restaurant} for {people} people at {time}.
Reserve a table for {people} at {restaurant} at {time}.
I want a table for {people} at {restaurant}, {time}.
Please reserve a table at {restaurant} at {time} for {people} people.
We are {people} people. Get us a table at {restaurant} at {time}.
Table for {people} at {time} in {restaurant}, please.
Make a reservation at {restaurant} for {people} at {time}.
Can you book {restaurant} for {people} people at {time}?""",
        {"code": "code"},
        "table",
        {"day": DAY},
    ),
    "flight": T(
        "search flights|find flight|flight search|flights|get flights|lookup flights|flight finder",
        "Search flights between two cities|Find a flight|Look for flights",
        {"from": FROM_CITY, "to": TO_CITY, "date": P("date departure_date day fly_on", "date", "Day of the flight")},
        """\
Find a flight from {from} to {to} on {date}.
I want to fly from {from} to {to} on {date}.
Search flights from {from} to {to} for {date}.
Are there flights from {from} to {to} on {date}?
Show me flights on {date} from {from} to {to}.
Flights {from} to {to}, {date}
I need to get from {from} to {to} by plane on {date}.
Look for a flight to {to} from {from} on {date}.
Which flights go from {from} to {to} on {date}?
Can you find flights to {to} on {date}, starting in {from}?""",
        {"flight": "code", "price": "medium"},
        "flight",
        {
            "cabin": P(
                "cabin class seat_class",
                "enum:economy,business,first,premium",
                "Class of travel",
                " in {} class",
                "I want {} class.|Book {}.",
            ),
            "direct": P(
                "direct nonstop direct_only",
                "flag",
                "Only direct flights",
                "",
                "Only direct flights.|It must be direct.",
                "It need not be direct.|Stops are fine.",
            ),
            "passengers": P(
                "passengers travelers adults",
                "small",
                "Number of travelers",
                " for {} passengers",
                "We are {} people.|{} passengers.",
            ),
        },
    ),
    "hotel": T(
        "find hotel|search hotels|hotel search|hotels|book hotel|hotel finder",
        "Find a hotel in a city|Search hotels|Look for a hotel room",
        {"city": CITY, "nights": P("nights stay number_of_nights length_of_stay", "small", "How many nights")},
        """\
Find a hotel in {city} for {nights} nights.
I need a hotel in {city} for {nights} nights.
Search hotels in {city}, {nights} nights.
Look for a room in {city} for {nights} nights.
We stay in {city} for {nights} nights. Find a hotel.
Hotel in {city}, {nights} nights
Show me hotels for {nights} nights in {city}.
Can you find us a hotel in {city} for {nights} nights?""",
        {"hotel": "title", "price": "medium"},
        "hotel",
        {
            "from": P(
                "check_in arrival start_date from_date",
                "date",
                "First day",
                " from {}",
                "We arrive on {}.|Check-in is {}.",
            ),
            "stars": P(
                "stars min_stars rating", "small", "Stars at least", "", "It should have {} stars.|At least {} stars."
            ),
            "breakfast": P(
                "breakfast with_breakfast",
                "flag",
                "Whether breakfast is wanted",
                "",
                "With breakfast.",
                "Without breakfast.|No breakfast.",
            ),
        },
    ),
    "event": T(
        "create event|add event|calendar add|schedule meeting|new event|create calendar event|add to calendar",
        "Create a calendar event|Add an event to the calendar|Schedule a meeting",
        {
            "title": P("title name event summary", "title", "Title of the event"),
            "date": P("date day event_date on", "date", "Day of the event"),
            "time": P("time start_time start at", "clock", "Start time"),
        },
        """\
Add {title} to my calendar on {date} at {time}.
Create an event {title} on {date} at {time}.
Schedule {title} for {date} at {time}.
Put {title} in my calendar: {date}, {time}.
Plan a meeting called {title} on {date} at {time}.
On {date} at {time} I have {title}. Add it to the calendar.
New event: {title}, {date}, {time}
Set up a meeting {title} for {date} at {time}.
Please add the event {title} on {date}, starting at {time}.
Can you schedule the meeting {title} on {date} at {time}?""",
        {"id": "code"},
        "calendar",
        {
            "guests": P("guests attendees participants people", "people", "Who comes", " with {}", "Invite {}."),
            "minutes": P(
                "duration minutes length", "medium", "Length in minutes", " for {} minutes", "It takes {} minutes."
            ),
        },
    ),
    "light": T(
        "set light|switch light|light control|control light|lights|toggle light|smart light",
        "Turn a light on or off|Switch the light in a room|Control the lights",
        {
            "state": P("state power mode action", "enum:on,off", "On or off"),
            "room": P("room where area location", "room", "Which room"),
        },
        """\
Turn {state} the light in the {room}.
Turn the {room} light {state}.
Switch {state} the lights in the {room}.
Please switch the light in the {room} {state}.
Lights {state} in the {room}
Make the {room} lights go {state}.
I want the light in the {room} {state}.
Can you turn the light in the {room} {state}?
Switch the {room} lights {state}, please.""",
        {"power": "small"},
        "light",
        {
            "brightness": P(
                "brightness level dim percent",
                "medium",
                "Brightness in percent",
                "",
                "Set the brightness to {}.|Brightness {}.",
            )
        },
    ),
    "heating": T(
        "set temperature|set heating|thermostat|heating control|change temperature|set thermostat",
        "Set the temperature of a room|Control the heating|Set the thermostat",
        {
            "room": P("room zone area where", "room", "Which room"),
            "degrees": P("degrees temperature target value", "small", "Wanted temperature"),
        },
        """\
Set the {room} to {degrees} degrees.
Heat the {room} to {degrees} degrees.
Make the {room} {degrees} degrees warm.
Set the heating in the {room} to {degrees}.
Change the temperature in the {room} to {degrees} degrees.
I want {degrees} degrees in the {room}.
Put the thermostat in the {room} on {degrees}.
Please set the temperature of the {room} to {degrees} degrees.""",
        {"temperature": "small"},
        "temperature",
    ),
    "shopping": T(
        "add to shopping list|shopping list add|add item|add to cart|cart add|put in cart",
        "Add a thing to the shopping list|Put an item on the list|Add an item to buy",
        {
            "item": P("item product thing article", "product", "What to buy"),
            "count": P("quantity count amount number", "small", "How many"),
        },
        """\
Add {count} {item} to my shopping list.
Put {item} on the shopping list, {count} pieces.
I need to buy {item}, quantity {count}. Add it to the list.
Shopping list: {count} {item}
Please add {item} to the list. Quantity: {count}.
Write {count} {item} on my shopping list.
Add {item} to the cart, quantity {count}.
Can you put {count} {item} on the shopping list?""",
        {"total": "small"},
        "list",
    ),
    "order": T(
        "track order|order status|get order|check order|lookup order|where is order|shipment status",
        "Get the status of an order|Track an order by its number|Look up an order",
        {"order": P("order_id order number order_number id", "code", "Number of the order")},
        """\
Where is my order {order}?
What's the status of order {order}?
Track order {order}.
Check order {order} for me.
Has order {order} been shipped?
When will my order {order} arrive?
My order number is {order}. Where is it?
I am waiting for order {order}. What is its status?
Status of {order}, please. It is an order.
Can you track my order {order}?""",
        {"status": "enum:shipped,pending,delivered,delayed,packed", "arrival": "iso_date"},
        "order",
        {},
        "Where is my order?|Can you track my order?",
    ),
    "products": T(
        "search products|product search|find product|shop search|search shop|find in store",
        "Search products in the shop|Find a product to buy|Search the store",
        {"product": P("query product keyword what search_term", "product", "What to search for")},
        """\
Search the shop for a {product}.
I want to buy a {product}.
Find me a {product} in the store.
Do you sell a {product}?
Show me a {product} I can buy.
Look for a {product} in the shop.
I am looking for a new {product} to buy.
Search products: {product}
Can you find a {product} in the shop?""",
        {"name": "title", "price": "decimal"},
        "shop",
        {
            "price": P(
                "max_price price_limit budget",
                "medium",
                "Highest price",
                "",
                "It should cost at most {}.|My budget is {}.|The price limit is {}.",
            ),
            "color": P("color colour", "color", "Wanted color", " in {}", "The color should be {}.|In {}."),
            "limit": LIMIT,
        },
    ),
    "route": T(
        "get route|directions|route planner|find route|navigate|get directions|plan route",
        "Get directions between two places|Plan a route|Find the way from one place to another",
        {"from": FROM_CITY, "to": TO_CITY},
        """\
How do I get from {from} to {to}?
Show me the way from {from} to {to}.
Give me directions from {from} to {to}.
Plan a route from {from} to {to}.
Navigate from {from} to {to}.
What's the best route from {from} to {to}?
I am in {from} and want to go to {to}. Show me the way.
Route {from} to {to}
Can you plan the route from {from} to {to}?""",
        {"distance": "medium", "hours": "small"},
        "route",
        {
            "mode": P(
                "mode transport vehicle by",
                "enum:car,train,bike,bus,foot",
                "How to travel",
                " by {}",
                "I go by {}.|Mode: {}.",
            )
        },
    ),
    "news": T(
        "get news|news|search news|latest news|news search|headlines",
        "Get news about a topic|Latest news|Search for news articles",
        {"topic": P("topic subject about query keyword", "title", "What the news is about")},
        """\
What's the latest news about {topic}?
Show me news about {topic}.
Any news on {topic}?
Find news articles about {topic}.
What's new about {topic} in the news?
Get the headlines on {topic}.
News: {topic}
Give me the news on {topic}.
Can you get the latest news about {topic}?""",
        {"headline": "message"},
        "news",
        {"limit": LIMIT, "language": LANGUAGE},
        "What's the latest news?",
    ),
    "search": T(
        "web search|search web|internet search|search|google|search online|search internet",
        "Search the web|Search the internet|Find pages on the web",
        {"query": P("query q search_query keywords text", "title", "What to search for")},
        """\
Search the web for {query}.
Search for {query} on the internet.
Look up {query} online.
Google {query}.
Find pages about {query} on the web.
Search the internet: {query}
What does the web say about {query}?
Do a web search for {query}.
Can you search the web for {query}?""",
        {"title": "title", "file": "path"},
        "web",
        {"limit": LIMIT, "language": LANGUAGE},
    ),
    "calculator": T(
        "calculate|calculator|compute|eval expression|math|evaluate|calc",
        "Calculate an expression|Evaluate a math expression|Does arithmetic",
        {"expression": P("expression formula input math", "expression", "Expression to calculate")},
        """\
Calculate {expression}.
What is {expression}?
How much is {expression}?
Use the calculator for {expression}.
Compute {expression}.
What's {expression}?
Please calculate {expression} with the tool.
{expression} = ?
Can you compute {expression}?
Evaluate {expression} for me.""",
        {"result": "large"},
        "calculate",
    ),
    "clock": T(
        "get time|current time|time in city|world clock|local time|what time",
        "Get the local time in a city|Current time at a place|World clock",
        {"city": CITY},
        """\
What time is it in {city}?
What's the time in {city}?
Tell me the local time in {city}.
Current time in {city}
How late is it in {city}?
Give me the time in {city} right now.
I need the local time for {city}.
Do you know what time it is in {city}?""",
        {"time": "clock"},
        "time",
        {"style": P("format style clock", "enum:12h,24h", "Clock format", "", "Use the {} format.|Format {}.")},
        "What time is it there?|Tell me the local time there.",
    ),
    "contact": T(
        "find contact|get contact|lookup contact|contact search|address book|search contacts",
        "Find a contact|Look up a person in the address book|Get phone number and mail of a person",
        {"name": P("name person contact who full_name", "full_name", "Name of the person")},
        """\
What's the phone number of {name}?
Find {name} in my contacts.
Look up the contact {name}.
Do I have a number for {name}?
Get me the contact details of {name}.
Search my address book for {name}.
How can I reach {name}?
Show me the contact {name}.
Can you find the number of {name} in my contacts?""",
        {"phone": "phone", "email": "email"},
        "contact",
    ),
    "sms": T(
        "send sms|send text message|text message|send message|message send|sms",
        "Send a text message|Send an SMS to a person|Send a short message",
        {
            "to": P("to recipient person contact receiver", "person", "Who gets the message"),
            "text": P("text message body content", "message", "Text of the message"),
        },
        """\
Text {to}: {text}
Send a message to {to}: {text}
Tell {to} by text message: {text}
Send {to} a text saying "{text}".
Message {to} that says "{text}".
Write a text message to {to} with "{text}".
Please send an SMS to {to}: {text}
Send a text to {to} with the message "{text}".
Can you text {to} "{text}"?""",
        {"status": "enum:sent,delivered,queued"},
        "message",
    ),
    "todo": T(
        "add task|create todo|todo add|new task|add todo|task create",
        "Add a task to the to-do list|Create a to-do|Add a new task",
        {"task": P("task text title todo what", "message", "What is to be done")},
        """\
Add a task: {task}
Put "{task}" on my to-do list.
New task: {task}
Add "{task}" to my tasks.
Create a to-do: {task}
Please add the task "{task}".
I have to do this, add it to my list: {task}
My to-do list needs "{task}".
Can you add "{task}" to my to-do list?""",
        {"id": "code", "count": "small"},
        "task",
        {
            "priority": P(
                "priority importance urgency",
                "enum:low,medium,high,urgent",
                "How important it is",
                "",
                "The priority is {}.|Priority: {}.|Give it {} priority.",
            )
        },
    ),
    "define": T(
        "define word|dictionary|lookup word|word definition|get definition|define",
        "Get the definition of a word|Look up a word in the dictionary|Explain a word",
        {"word": P("word term entry", "pseudo", "Word to look up")},
        """\
What does the word {word} mean?
Define {word}.
Look up the word {word} in the dictionary.
What is the meaning of {word}?
Give me the definition of {word}.
Explain the word {word}.
I do not know the word "{word}". Look it up.
Can you look up {word} in the dictionary?""",
        {"meaning": "title"},
        "define",
        {"language": LANGUAGE},
    ),
    "units": T(
        "convert units|unit converter|unit conversion|convert unit|measure converter",
        "Convert a value between units|Unit conversion|Convert a measure into another unit",
        {
            "value": P("value amount number quantity", "medium", "Value to convert"),
            "from": P("from_unit source_unit from unit", "enum:meters,feet,miles,inches,yards", "Unit of the value"),
            "to": P("to_unit target_unit to into", "enum:kilometers,centimeters,millimeters,decimeters", "Wanted unit"),
        },
        """\
Convert {value} {from} to {to}.
How many {to} are {value} {from}?
What is {value} {from} in {to}?
{value} {from} in {to}
Change {value} {from} into {to}.
I have {value} {from}. How much is that in {to}?
Please convert {value} {from} into {to}.
Can you convert {value} {from} to {to}?""",
        {"result": "decimal"},
        "units",
    ),
    "recipe": T(
        "find recipe|get recipe|recipe search|search recipes|recipes|how to cook",
        "Find a recipe for a dish|Search recipes|How to cook something",
        {"dish": P("dish food meal recipe query", "food", "What to cook")},
        """\
How do I cook {dish}?
Find a recipe for {dish}.
I want to make {dish}. Find a recipe.
Give me a {dish} recipe.
Show me how to cook {dish}.
Search recipes for {dish}.
What do I need to cook {dish}?
Recipe for {dish}
Can you find me a recipe for {dish}?""",
        {"name": "title", "minutes": "medium"},
        "recipe",
        {
            "servings": P(
                "servings people portions", "small", "How many portions", " for {} people", "We are {} people."
            ),
            "vegan": P(
                "vegan vegetarian meatless",
                "flag",
                "Without meat",
                "",
                "It must be {name}.|Make it {name}.",
                "It need not be {name}.",
            ),
        },
    ),
    "account": T(
        "create user|create account|add user|register user|new user|sign up",
        "Create a user account|Register a new user|Add a user",
        {
            "username": P("username login user user_name", "pseudo", "Name to log in with"),
            "email": P("email mail e_mail address", "email", "E-mail address"),
        },
        """\
Create a user {username} with the email {email}.
Create an account for {username}, email {email}.
Register the user {username} with {email}.
Add a new user: {username}, {email}
Sign up {username} with the address {email}.
We need an account {username}. The email is {email}.
New user {username}, mail {email}
Please create the account {username} with the email {email}.""",
        {"id": "large"},
        "account",
        {
            "admin": P(
                "admin is_admin administrator",
                "flag",
                "Whether the user is an admin",
                "",
                "Make them an admin.|The user is an admin.",
                "They are not an admin.|No admin rights.",
            ),
            "role": P(
                "role group team", "enum:editor,viewer,author,manager", "Role of the user", " as {}", "The role is {}."
            ),
        },
    ),
    "file": T(
        "read file|open file|load file|get file|file reader|show file|cat file",
        "Read a file|Show what is in a file|Load the content of a file",
        {"path": P("path file filename file_path", "path", "Path of the file")},
        """\
Read the file {path}.
Open {path}.
Show me the content of {path}.
What is in {path}?
What does {path} contain?
Load the file {path}, please.
Print {path}.
Can you read {path} for me?
Please open the file {path}.""",
        {"lines": "medium", "title": "title"},
        "file",
        {
            "lines": P(
                "lines max_lines line_count", "medium", "How many lines", "", "Only the first {} lines.|Show {} lines."
            )
        },
    ),
    "query": T(
        "query database|run query|db query|select rows|get rows|database query|fetch rows",
        "Get rows of a database table|Query the database|Read rows from a table",
        {"table": P("table table_name source", "word", "Name of the table")},
        """\
Get rows from the table {table}.
Query the database table {table}.
Show the table {table} of the database.
What is in the database table {table}?
Select from {table} in the database.
Read the rows of table {table}.
Give me the rows in the {table} table.""",
        {"rows": "medium"},
        "database",
        {
            "limit": P("limit max_rows rows", "medium", "How many rows", "", "At most {} rows.|Limit {}."),
            "columns": P("columns fields select", "words", "Which columns", "", "Only the columns {}.|Columns: {}."),
        },
    ),
    "population": T(
        "get population|population|country population|inhabitants|lookup population",
        "Get the population of a country|How many people live in a country",
        {"country": P("country nation country_name", "country", "Name of the country")},
        """\
How many people live in {country}?
What's the population of {country}?
Population of {country}
Look up how many people live in {country}.
How big is the population of {country}?
Tell me the population of {country}.
How many inhabitants does {country} have?""",
        {"population": "large"},
        "population",
        {"year": P("year in_year", "year", "Year of the count", " in {}", "For the year {}.")},
    ),
    "battery": T(
        "battery level|get battery|battery status|check battery|battery",
        "Get the battery level of this device|How full the battery is",
        {},
        """\
How full is my battery?
What's the battery level?
Check the battery.
How much battery is left?
Show the battery status.
Is my battery full?
Tell me the battery level.""",
        {"level": "small"},
        "battery",
    ),
    "location": T(
        "get location|current location|where am i|my location|gps|locate user",
        "Get the current location of the user|Where the user is",
        {},
        """\
Where am I?
What's my location?
Get my current location.
Which city am I in?
Tell me where I am.
Show my location.
Find out where I am right now.""",
        {"city": "city"},
        "location",
    ),
}

HELD_TOPICS: dict[str, Topic] = {
    "air": T(
        "air quality|get air quality|check air quality|air quality index",
        "Get the air quality in a city|Air quality of a place",
        {"city": CITY},
        """\
How is the air quality in {city}?
What's the air quality in {city}?
How clean is the air in {city}?
Check the air quality for {city}.""",
        {"index": "medium"},
        "air quality",
    ),
    "alarm": T(
        "set alarm|create alarm|alarm|alarm clock|add alarm",
        "Set an alarm|Create an alarm at a time|Alarm clock",
        {"time": P("time at alarm_time hour", "clock", "Time of the alarm")},
        """\
Set an alarm for {time}.
Set an alarm at {time}.
Please create an alarm for {time}.
I need an alarm at {time}.""",
        {"id": "code"},
        "alarm",
        {"label": P("label name title", "title", "Name of the alarm", " called {}", "Call it {}.")},
    ),
    "taxi": T(
        "order taxi|call taxi|book taxi|taxi|get taxi",
        "Order a taxi|Book a taxi from one place to another",
        {
            "from": P("pickup origin start from_place", "city", "Where the taxi starts|Origin"),
            "to": P("destination to_place end dropoff", "city", "Where the taxi goes|Destination"),
        },
        """\
Order a taxi from {from} to {to}.
I need a taxi from {from} to {to}.
Get me a taxi from {from} to {to}.
Book a taxi from {from} to {to}, please.""",
        {"minutes": "small", "price": "medium"},
        "taxi",
        {"passengers": P("passengers people seats", "small", "How many people", " for {} people", "We are {} people.")},
    ),
    "parcel": T(
        "send parcel|ship parcel|parcel|create parcel|deliver parcel",
        "Send a parcel to a person|Ship a parcel",
        {
            "to": P("recipient person receiver name", "full_name", "Who gets the parcel"),
            "city": CITY,
            "weight": P("weight kg weight_kg", "small", "Weight in kg"),
        },
        """\
Send a parcel to {to} in {city}. The weight is {weight} kg.
Ship a parcel of {weight} kg to {to} in {city}.
I want to send a parcel of {weight} kg to {to} in {city}.""",
        {"code": "code"},
        "parcel",
    ),
    "holidays": T(
        "get public holidays|public holidays|list public holidays|public holidays info",
        "Get the public holidays of a country|List the public holidays in a year",
        {
            "country": P("country nation region", "country", "Name of the country"),
            "year": P("year in_year for_year", "year", "Which year"),
        },
        """\
What are the public holidays in {country} in {year}?
List the public holidays in {country} for {year}.
Show me the public holidays of {country} in {year}.
Which public holidays does {country} have in {year}?""",
        {"count": "small"},
        "public holidays",
    ),
    "random": T(
        "random number|get random number|generate random number",
        "Get a random number between two bounds|Generate a random number",
        {
            "low": P("min low lower minimum", "small", "Lowest number"),
            "high": P("max high upper maximum", "large", "Highest number"),
        },
        """\
Give me a random number between {low} and {high}.
Generate a random number from {low} to {high}.
Pick a random number between {low} and {high}.""",
        {"number": "medium"},
        "random number",
    ),
    "score": T(
        "get score|score|latest score|score info",
        "Get the last score of a team|Score of a team",
        {"team": P("team club team_name", "title", "Name of the team")},
        """\
What's the score of the team {team}?
What was the last score of {team}?
Get me the score of {team}.
Show the score of the team {team}.""",
        {"score": "phone"},
        "score",
    ),
    "note": T(
        "create note|save note|add note|note|new note|write note",
        "Save a note|Create a note with a title and a text",
        {
            "title": P("title name heading", "title", "Title of the note"),
            "text": P("text content body note", "message", "Text of the note"),
        },
        """\
Save a note titled {title} with the text "{text}".
Create a note with the title {title}: {text}
Make a note called {title} that says "{text}".
Write a note. Title: {title}, text: {text}""",
        {"id": "code"},
        "note",
    ),
    "reset": T(
        "reset password|password reset|send password reset|new password",
        "Reset the password of an account|Send a new password to an address",
        {"email": P("email address mail account", "email", "E-mail address of the account")},
        """\
Reset the password for {email}.
Reset my password. My email is {email}.
Please reset the password of the account {email}.
I forgot my password. My account is {email}.""",
        {"status": "enum:sent,queued,delivered"},
        "password",
    ),
}

_PLACE = ("Get the {noun} of a city|{Noun} in a place", {"city": CITY}, """\
What is the {noun} in {city}?
How is the {noun} in {city}?
I want to know the {noun} for {city}.
Tell me about the {noun} in {city}.
{Noun} in {city}, please.
Is there a {noun} in {city}?
Which {noun} does {city} have?
Check the {noun} for {city}.
Show the {noun} of {city}.
List the {noun} in {city}.
What about the {noun} in {city}?
How good is the {noun} in {city}?
Can you see the {noun} of {city}?""")  # fmt: skip
_CODE = ("{Noun} by its number|Look at the {noun} of an account", {"code": P("code id key", "code", "Code")}, """\
What about the {noun} with the number {code}?
I forgot my {noun}. My code is {code}.
Where is the {noun} {code}?
Tell me about {noun} {code}.
How is my {noun} {code} doing?
I am waiting for the {noun} {code}.
I lost my {noun}. It was {code}.
Reset my {noun}. The code is {code}.
Please reset the {noun} of the account {code}.
My {noun} is gone, the code is {code}.
Renew the {noun} for {code}.
Is my {noun} {code} there?
Is the {noun} {code} all right?""")  # fmt: skip
_PERSON = ("{Noun} for a person|A new {noun} for somebody", {
    "name": P("name person recipient who", "full_name", "Name of the person"),
    "day": P("day date on", "date", "Which day"),
}, """\
I need a {noun} for {name} on {day}.
{name} needs a {noun} on {day}.
Get me a {noun} for {name} on {day}.
Set up a {noun} on {day} for {name}.
Order a {noun} for {name} on {day}.
Set a {noun} for {name}, {day}.
Send a {noun} to {name} on {day}.
Ship the {noun} to {name} on {day}.
Book a {noun} on {day} for {name}.
Please create a {noun} on {day} for {name}.
We want a {noun} for {name}, on {day}.
On {day} I want a {noun} for {name}.
Can I have a {noun} for {name} on {day}?""")  # fmt: skip
_FROM_TO = ("{Noun} from one place to another|Get a {noun} between two cities", {"from": FROM_CITY, "to": TO_CITY}, """\
I need a {noun} from {from} to {to}.
Get a {noun} from {from} to {to}.
Is there a {noun} from {from} to {to}?
{Noun} from {from} to {to}
We want a {noun} from {from} to {to}.
Order a {noun} from {from} to {to}.
Book a {noun} from {from} to {to}, please.
Get me a {noun} from {from} to {to}.
What is the {noun} from {from} to {to}?
Pick a {noun} between {from} and {to}.
Find the {noun} from {from} to {to}.
Show a {noun} between {from} and {to}.
Give me the {noun} between {from} and {to}.
Generate a {noun} from {from} to {to}.""")  # fmt: skip
_TEXT = ("Keep a {noun} with a text|Write a {noun}", {
    "title": P("title name heading", "title", "Title"),
    "text": P("text content body words", "message", "Text"),
}, """\
Write a {noun} called {title} with the text "{text}".
I need a {noun} titled {title} that says "{text}".
There is a {noun} {title} to write: "{text}".
Put "{text}" in a {noun} called {title}.
Save a {noun} titled {title} with the text "{text}".
Create a {noun} with the title {title}: {text}
Make a {noun} called {title} that says "{text}".
A {noun}. Title: {title}, text: {text}
Add a {noun} {title} with "{text}".
Write a {noun} with the title {title}: {text}
A {noun} please, title {title}, text "{text}".""")  # fmt: skip


def invented(noun: str, shape: int) -> Topic:
    """A topic about anything: only its noun tells what a user wants. `shape`: from 0 to SHAPES - 1."""
    about, required, asks = (_PLACE, _CODE, _PERSON, _FROM_TO, _TEXT)[shape]

    def named(text: str) -> str:
        return text.replace("{noun}", noun).replace("{Noun}", noun.capitalize())

    verbs = "get|new|my|create|send|book|set|check|reset|list|save|order"
    names = "\n".join([noun, *(f"{verb} {noun}" for verb in verbs.split("|")), f"{noun} info", f"{noun} service"])
    return T(names, named(about), required, named(asks), {"status": "enum:fine,ready,open,late", "id": "code"}, noun)


SHAPES = 5
SHAPES_OF_ONE = 2  # the first ones, with one parameter

# Composed topics: a verb, a noun and some parameters. The verbs of one line mean the same.
VERBS: tuple[tuple[str, ...], ...] = (
    ("create", "make", "add", "open"),
    ("delete", "remove", "erase"),
    ("update", "change", "edit", "modify"),
    ("find", "search", "look up"),
    ("send", "forward", "share"),
    ("cancel", "stop"),
    ("book", "reserve"),
    ("start", "begin", "launch"),
    ("archive",),
    ("approve", "accept"),
    ("reject", "decline"),
    ("assign",),
    ("print",),
    ("export", "download"),
    ("copy", "duplicate", "clone"),
    ("schedule", "plan"),
    ("pause",),
    ("check", "verify", "inspect"),
    ("rename",),
    ("move",),
    ("order", "buy"),
    ("rate", "review"),
    ("lock",),
    ("close", "finish"),
    ("count",),
    ("publish", "release"),
    ("restore", "recover"),
    ("renew", "extend"),
)
NOUNS = words_of(
    """invoice ticket booking playlist contract appointment document report coupon subscription shipment
    album article backup badge campaign certificate channel comment course customer dashboard device discount donation
    employee expense folder form game goal group image job label lesson license loan membership movie patient payment
    permit photo poll post profile project quiz quote refund room sensor server session shift song story
    survey team template test tour trip vehicle video voucher website workshop warehouse"""
)
HELD_NOUNS = words_of(
    "parking policy receipt vaccine locker ballot garden machine garage printer exam concert grant sticker bouquet "
    "pipeline"
)
FRAMES = lines("""\
{do}
{do}.
Please {do}.
Can you {do}?
Could you {do}?
Could you please {do}?
I want to {do}.
I need to {do}.
I want you to {do}.
We have to {do}.
Help me {do}.
Go ahead and {do}.
Now {do}.
I have to {do}, please help.
It is time to {do}.
Let's {do}.
{do}, please.
{do} for me.
{do} now.
I'd like to {do}.
My boss wants me to {do}.""")
HELD_FRAMES = lines("""\
Would you {do}?
Will you please {do}?
I would like you to {do}.
We need to {do}.
Can you help me {do}?
You should {do}.""")

PARAMS: dict[str, Param] = {
    "title": P(
        "title name label heading subject",
        "title",
        "Title|Name of it",
        " called {}| named {}| with the title {}| titled {}",
    ),
    "person": P(
        "customer owner assignee user client recipient guest member manager",
        "person",
        "The person|Who it is for",
        " for {}",
    ),
    "city": P("city location place town branch site", "city", "City|Where", " in {}"),
    "date": P("date day due_date start_date deadline", "date", "Date|Day, as given", " on {}| for {}"),
    "time": P("time start_time hour at", "clock", "Time of day|Clock time", " at {}"),
    "quantity": P(
        "quantity count number_of_items pieces units", "medium", "How many", " with quantity {}| with a count of {}"
    ),
    "price": P(
        "price amount cost total fee", "decimal", "Price|Amount of money", " with a price of {}| at a price of {}"
    ),
    "priority": P(
        "priority level importance",
        "enum:low,medium,high,urgent,normal",
        "Priority|How urgent it is",
        " with {} priority| with priority {}",
        "The priority is {}.|Priority: {}.",
    ),
    "status": P(
        "status state stage",
        "enum:open,closed,draft,active,done,blocked",
        "Status|Current state",
        " with status {}",
        "The status is {}.|Set the status to {}.",
    ),
    "color": P("color colour", "color", "Color", " with color {}| in the color {}", "The color is {}."),
    "id": P("id code reference key number", "code", "Id|Reference code", " {}| with id {}| number {}"),
    "tags": P(
        "tags labels keywords topics",
        "words",
        "Tags|List of labels",
        " with tags {}| tagged {}",
        "Tags: {}.|Tag it with {}.",
    ),
    "note": P(
        "note comment remark reason",
        "message",
        "A note|Reason in words",
        ' with the note "{}"',
        'The note is "{}".|Note: "{}".',
    ),
    "email": P(
        "email mail email_address", "email", "E-mail address", " with email {}", "The email is {}.|Use the email {}."
    ),
    "language": P("language lang", "language", "Language", " in {}", "The language is {}.|Use {}."),
    "format": P(
        "format file_type type output",
        "enum:pdf,csv,json,xml,html,txt",
        "File format",
        " as {}| in {} format",
        "Format: {}.",
    ),
    "minutes": P(
        "minutes duration length",
        "medium",
        "Length in minutes",
        " lasting {} minutes| of {} minutes",
        "It takes {} minutes.|The duration is {} minutes.",
    ),
    "people": P(
        "people members participants guests", "people", "Who takes part", " with {}", "Invite {}.|The people are {}."
    ),
    "limit": LIMIT,
    "size": P(
        "size format_size", "enum:small,medium,large,tiny,huge", "Size", " in size {}", "The size is {}.|Size {}."
    ),
    "percent": P("percent percentage rate discount", "small", "Percent", " with {} percent", "Set it to {} percent."),
    "page": P("page page_number", "medium", "Page number", " on page {}", "Go to page {}."),
    "private": P(
        "private is_private hidden",
        "flag",
        "Whether it is private",
        "",
        "Make it private.|It is private.|Keep it private.",
        "It is not private.|Do not make it private.",
    ),
    "urgent": P(
        "urgent is_urgent rush",
        "flag",
        "Whether it is urgent",
        "",
        "It is urgent.|This is urgent.",
        "It is not urgent.|No rush, not urgent.",
    ),
    "notify": P(
        "notify send_notification alert",
        "flag",
        "Whether to notify people",
        "",
        "Notify everyone.|Send a notification.",
        "Do not notify anyone.|No notification.",
    ),
    "paid": P(
        "paid is_paid",
        "flag",
        "Whether it is paid",
        "",
        "It is paid.|It has been paid.",
        "It is not paid.|It has not been paid.",
    ),
}
RESULT_FIELDS: dict[str, str] = {
    "id": "code", "status": "enum:open,closed,done,active,pending,confirmed", "total": "decimal", "count": "medium",
    "creation": "iso_date", "owner": "person", "name": "title", "position": "small", "code": "code", "price": "decimal",
    "city": "city", "room": "room", "color": "color", "score": "medium", "level": "small", "weight": "decimal",
    "user": "person", "title": "title", "date": "iso_date", "start": "clock", "end": "clock", "length": "medium",
    "phone": "phone", "email": "email", "author": "full_name", "language": "language", "file": "path", "size": "large",
    "year": "year", "tax": "decimal", "queue": "small", "version": "decimal", "token": "pseudo", "group": "pseudo",
    "balance": "decimal", "rank": "small", "speed": "medium", "product": "product", "reference": "code",
    "message": "message", "unit": "word", "seat": "code", "floor": "small", "update": "iso_date", "manager": "person",
}  # fmt: skip
HELD_RESULT_FIELDS: dict[str, str] = {
    "number": "large", "deadline": "iso_date", "contact": "person", "key": "code", "gate": "code", "depth": "medium",
    "planet": "title", "driver": "full_name", "closing": "clock", "amount": "decimal", "station": "city",
}  # fmt: skip
