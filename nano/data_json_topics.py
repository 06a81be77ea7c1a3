"""What JSON is asked about: kinds of records with their fields, and the frames that ask for it.

A field says how its value is told in a text. Held records and held frames stay out of training.
"""

from nano.data_tools_topics import PARAMS, P, Param
from nano.data_tools_values import lines

NAME = P("name full_name person", "full_name", "Full name", "", "The name is {}.|This is {}.|Name: {}.")
AGE = P("age years age_years", "small", "Age in years", "", "The age is {}.|{} years old.|Age {}.")
TITLE = P("title name", "title", "Title", " called {}| titled {}", "The title is {}.|It is called {}.")
CITY = P("city town location place", "city", "City", " in {}| from {}", "The city is {}.|It is in {}.|City: {}.")
YEAR = P("year released year_made since", "year", "Year", " from {}", "It is from {}.|The year is {}.|Year: {}.")
PRICE = P("price cost amount", "decimal", "Price", " for {}| that costs {}", "It costs {}.|The price is {}.|Price: {}.")
COLOR = P("color colour", "color", "Color", " in {}", "It is {}.|The color is {}.|Color: {}.")
EMAIL = P(
    "email mail email_address", "email", "E-mail", " with the email {}", "The email is {}.|Write to {}.|Email: {}."
)
COUNTRY = P("country nation", "country", "Country", " in {}", "It is in {}.|The country is {}.|Country: {}.")
PHONE = P("phone phone_number tel", "phone", "Phone", " with the number {}", "The phone number is {}.|Call {}.")
DATE = P("date day on", "date", "Date", " on {}", "It is on {}.|The date is {}.|Date: {}.")
TIME = P("time start starts_at", "clock", "Time", " at {}", "It starts at {}.|The time is {}.")
RATING = P("rating score stars", "small", "Rating", " rated {}", "The rating is {}.|It is rated {}.")
CODE = P("id code number", "code", "Id", " with the id {}", "The id is {}.|Its number is {}.|Id: {}.")
TAGS = P("tags keywords labels", "words", "Tags", " with the tags {}", "The tags are {}.|Tags: {}.")


def flag(name: str, yes: str, no: str) -> Param:
    """A field that is true or false. yes, no: sentences that say the one or the other, separated by bars."""
    return P(name, "flag", "Yes or no", "", yes, no)


# What the record is called -> its fields.
RECORDS: dict[str, tuple[Param, ...]] = {
    "person": (
        NAME,
        AGE,
        CITY,
        EMAIL,
        PHONE,
        P(
            "job profession occupation",
            "enum:teacher,doctor,baker,pilot,nurse,lawyer,farmer,chef,painter",
            "Job",
            " who is a {}",
            "Job: {}.|Works as a {}.",
        ),
        flag("married is_married", "The person is married.|It is a married person.", "The person is not married."),
    ),
    "book": (
        TITLE,
        YEAR,
        P("author writer", "full_name", "Author", " by {}", "It was written by {}.|The author is {}."),
        P("pages page_count", "medium", "Pages", " with {} pages", "It has {} pages."),
        P("language lang", "language", "Language", " in {}", "It is in {}.|The language is {}."),
        PRICE,
    ),
    "movie": (
        TITLE,
        YEAR,
        RATING,
        P("director made_by", "full_name", "Director", " by {}", "It was directed by {}.|The director is {}."),
        P("genre kind", "enum:comedy,drama,horror,action,romance", "Genre", "", "It is a {}.|The genre is {}."),
        P("minutes length duration", "medium", "Minutes", " of {} minutes", "It lasts {} minutes."),
    ),
    "product": (
        P("product name item", "product", "Product", "", "The product is a {}.|It is a {}.|Product: {}."),
        PRICE,
        COLOR,
        CODE,
        P("stock quantity in_stock count", "medium", "Pieces in stock", "", "There are {} in stock.|Stock: {}."),
        flag("available is_available", "It is available.", "It is not available."),
        TAGS,
    ),
    "event": (
        TITLE,
        DATE,
        TIME,
        CITY,
        P("guests people attendees", "people", "Guests", " with {}", "The guests are {}.|{} will come."),
        flag("online is_online", "It is online.", "It is not online."),
    ),
    "order": (
        CODE,
        P("customer buyer client", "full_name", "Customer", " for {}", "The customer is {}.|It was ordered by {}."),
        P("item product article", "product", "What was ordered", " of a {}", "The item is a {}.|Item: {}."),
        P("quantity count pieces", "small", "How many", "", "The quantity is {}.|{} pieces."),
        PRICE,
        flag("paid is_paid", "It is paid.|It has been paid.", "It is not paid.|It has not been paid."),
        P("status state", "enum:open,shipped,cancelled,delivered", "Status", "", "The status is {}.|Status: {}."),
    ),
    "car": (
        P("brand maker make", "pseudo", "Brand", " made by {}", "The brand is {}.|Brand: {}."),
        YEAR,
        COLOR,
        PRICE,
        P("doors door_count", "small", "Doors", " with {} doors", "It has {} doors."),
        flag("electric is_electric", "It is electric.", "It is not electric."),
    ),
    "hotel": (
        TITLE,
        CITY,
        COUNTRY,
        P("stars star_count", "small", "Stars", " with {} stars", "It has {} stars."),
        P("rooms room_count", "medium", "Rooms", " with {} rooms", "It has {} rooms."),
        flag("breakfast has_breakfast", "Breakfast is included.", "Breakfast is not included."),
    ),
    "song": (
        TITLE,
        P("artist singer band", "full_name", "Artist", " by {}", "The artist is {}.|It is sung by {}."),
        YEAR,
        P("seconds length", "medium", "Seconds", " of {} seconds", "It lasts {} seconds."),
        TAGS,
    ),
    "company": (
        P("name company", "pseudo", "Name", " called {}", "The company is called {}.|The name is {}."),
        CITY,
        COUNTRY,
        P("employees staff people", "large", "Employees", " with {} employees", "It has {} employees.|Employees: {}."),
        P("founded year since", "year", "Year of founding", " founded in {}", "It was founded in {}."),
        P("ceo boss head", "full_name", "Head", " led by {}", "The boss is {}.|It is led by {}."),
    ),
    "pet": (
        P("name pet_name", "person", "Name", " named {}", "The name is {}.|The pet is called {}."),
        AGE,
        COLOR,
        P(
            "species animal kind",
            "enum:dog,cat,bird,fish,horse,rabbit",
            "Animal",
            "",
            "It is a {}.|The animal is a {}.",
        ),
        P("owner keeper", "full_name", "Owner", " of {}", "The owner is {}.|It belongs to {}."),
    ),
    "task": (
        P("task text title", "message", "Task", "", 'The task is "{}".|Task: "{}".'),
        P(
            "priority importance",
            "enum:low,medium,high",
            "Priority",
            " with {} priority",
            "The priority is {}.|Priority: {}.",
        ),
        P("assignee owner person", "person", "Who does it", " for {}", "{} will do it.|It is for {}."),
        DATE,
        flag("done finished is_done", "It is done.", "It is not done."),
        TAGS,
    ),
    "city": (
        P("name city", "city", "City", "", "The city is {}.|The name is {}."),
        COUNTRY,
        P(
            "population inhabitants",
            "large",
            "People",
            " with {} people",
            "{} people live there.|The population is {}.",
        ),
        P("mayor head", "full_name", "Mayor", "", "The mayor is {}."),
    ),
    "student": (
        NAME,
        AGE,
        EMAIL,
        P("grade class level", "small", "Grade", " in grade {}", "The grade is {}.|In grade {}."),
        P("subjects courses", "words", "Subjects", "", "The subjects are {}.|Subjects: {}."),
        P("score points", "decimal", "Score", " with a score of {}", "The score is {}."),
    ),
    "device": (
        CODE,
        P("room place", "room", "Room", " in the {}", "It is in the {}.|The room is the {}."),
        P("state power", "enum:on,off,standby", "State", "", "It is {}.|The state is {}."),
        P("battery level", "medium", "Battery", " with {} percent battery", "The battery is at {} percent."),
    ),
    "ticket": tuple(PARAMS[key] for key in ("title", "id", "priority", "status", "email", "urgent", "tags")),
    "report": tuple(PARAMS[key] for key in ("title", "person", "date", "format", "page", "private", "note")),
}
HELD_RECORDS: dict[str, tuple[Param, ...]] = {
    "invoice": (
        P("invoice_number number invoice_id", "code", "Number", " {}", "The invoice number is {}.|Invoice number: {}."),
        P("client company payer", "full_name", "Client", " for {}", "The client is {}."),
        P("total sum", "decimal", "Total", " with a total of {}", "The total is {}."),
        DATE,
        flag("settled is_settled", "It is settled.", "It is not settled."),
    ),
    "flight": (
        P("flight flight_number", "code", "Flight", " {}", "The flight is {}.|Flight: {}."),
        P("gate gate_number", "small", "Gate", " at gate {}", "The gate is {}."),
        P("departure from_city", "city", "From", " from {}", "It starts in {}.|The departure is {}."),
        P("arrival to_city", "city", "To", " to {}", "The arrival is {}."),
        TIME,
    ),
    "patient": (
        P("patient patient_name", "full_name", "Patient", " called {}", "The patient is {}."),
        AGE,
        P("ward room_number", "small", "Ward", " in ward {}", "The ward is {}."),
        P("symptoms complaints", "words", "Symptoms", "", "The symptoms are {}."),
        flag(
            "insured is_insured",
            "The patient is insured.|It is insured.",
            "The patient is not insured.|It is not insured.",
        ),
    ),
    "house": (
        P("street address", "title", "Street", " in {}", "The street is {}."),
        CITY,
        PRICE,
        P("bedrooms bedroom_count", "small", "Bedrooms", " with {} bedrooms", "It has {} bedrooms."),
        flag("garden has_garden", "It has a garden.", "It has no garden."),
    ),
    "team": (
        P("team team_name", "title", "Team", " called {}", "The team is called {}."),
        P("players members", "people", "Players", " with {}", "The players are {}."),
        P("coach trainer", "full_name", "Coach", " led by {}", "The coach is {}."),
        P("wins games_won", "medium", "Wins", " with {} wins", "It has {} wins."),
    ),
}


def _frames(text: str) -> tuple[str, ...]:
    """One frame per line; a slash is a line break."""
    return tuple(frame.replace("/", "\n") for frame in lines(text))


FRAMES = _frames("""\
Extract the data as JSON.//Schema:/{schema}//Text: {text}
Return a JSON object that matches this schema:/{schema}//{text}
Answer only with JSON that follows the schema./{schema}/Text: {text}
{text}//Write this as JSON with this schema: {schema}
{text}/Give me a JSON object: {schema}
Schema: {schema}/Input: {text}/Output:
Fill this schema from the text./{schema}/{text}
Convert the text to JSON./Text: {text}/Format: {schema}
Please extract a {record} as JSON: {schema}//{text}
Read the text and produce JSON. {schema}/Text:/{text}
I need JSON for my program. Schema:/{schema}/Data: {text}
Make JSON from this {record}: {text}/Use this schema: {schema}
Parse this {record}: {text}//{schema}
Respond in JSON using the schema below.//{schema}//{text}
Turn this into JSON: {text}/The fields are: {schema}
JSON schema: {schema}/---/{text}
Given the text "{text}", return JSON like this: {schema}
Here is a {record}. {text} Return it as JSON. {schema}
Structure this as JSON./{text}/{schema}
{schema}/{text}
Get the {record} out of this text: {text}/Only JSON, with the schema {schema}
What is the JSON for this {record}? {text} Schema: {schema}
Create a JSON object for the {record}. {text}/Schema: {schema}
Output JSON only./{schema}/###/{text}""")
HELD_FRAMES = _frames("""\
Write the JSON for this text./{schema}/Text: {text}
Extract this {record} into JSON./Schema: {schema}//{text}
{text}//Return JSON that matches the schema./{schema}
Give me the {record} as a JSON object with this schema: {schema}/Text: {text}
Use the schema to make JSON from the input./Schema:/{schema}/Input: {text}
I have this text: {text}/Please give me JSON with the fields {schema}""")
