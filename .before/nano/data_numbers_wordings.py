"""Ways to ask for a sum, a difference, a product or a quotient. A core is a family; HELD cores are never trained on.

A question is prefix + core + suffix. `{e}` is the task as an expression (`12 + 5`, `12 plus 5`), `{s}` the same in
symbols only; `{a}` and `{b}` are the operands in the order in which the operation takes them.
"""

from nano.data_tools_values import lines

EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "add": ("{a} + {b}", "{a} + {b}", "{a}+{b}", "{a} plus {b}"),
    "sub": ("{a} - {b}", "{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} \u2212 {b}"),
    "mul": ("{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} × {b}", "{a}×{b}", "{a} · {b}", "{a} times {b}", "{a}x{b}",
            "{a} multiplied by {b}"),
    "div": ("{a} / {b}", "{a}/{b}", "{a} ÷ {b}", "{a}÷{b}", "{a} : {b}", "{a} divided by {b}"),
}  # fmt: skip
SYMBOLS: dict[str, tuple[str, ...]] = {
    "add": ("{a} + {b}", "{a}+{b}"),
    "sub": ("{a} - {b}", "{a}-{b}", "{a} \u2212 {b}"),
    "mul": ("{a} * {b}", "{a} x {b}", "{a} × {b}", "{a} · {b}", "{a}×{b}"),
    "div": ("{a} / {b}", "{a} : {b}", "{a} ÷ {b}", "{a}/{b}"),
}

FRAMES: tuple[str, ...] = lines("""\
{e}
{s}
{s} =
{s} = ?
{s}?
{e}?
{s} is
What is {e}?
What's {e}?
Whats {e}
How much is {e}?
How much does {e} make?
Calculate {e}.
Calculate: {s}
Compute {e}.
Compute the following: {s}
Solve {e}.
Solve: {s} = ?
Evaluate {e}.
Evaluate the expression {s}.
Tell me what {e} is.
Can you calculate {e}?
Can you tell me {e}?
Could you compute {e} for me?
Give me the result of {e}.
What is the result of {e}?
What is the value of {e}?
Find {e}.
Find the value of {s}.
I want to know {e}.
I need the answer to {e}.
Do you know what {e} is?
What do you get for {e}?
What do I get if I calculate {e}?
My homework says {s}. What is the answer?
Question: {s}
Exercise: {s} = ____
Fill in the blank: {s} = _
Help me with {e}.
What does {e} equal?
{e} equals what?
{e} equals
Let x = {s}. What is x?
x = {s}, find x
Result of {s}?
The teacher asks: {e}?
What number is {e}?
Was ist {s}?
Wie viel ist {s}?
Berechne {s}.
Was ergibt {s}?
Rechne bitte {s} aus.
Combien font {s} ?
Calcule {s}.
Quel est le résultat de {s} ?
¿Cuánto es {s}?
¿Cuál es el resultado de {s}?
Quanto fa {s}?
Calcola {s}.
Qual è il risultato di {s}?""")  # fmt: skip

HELD_FRAMES: tuple[str, ...] = lines("""\
Work out {e}.
Could you tell me how much {e} is?
I would like to know the value of {e}.
Please give the answer: {s}
{e} makes how much?
What would {e} be?
Any idea what {e} is?
Tell me the result: {s}
Find the answer to {s}.
So what is {e} then?
I have to solve {s}. What is the result?
Can you help me compute {e}?
If x equals {s}, what is x?
Answer this: {e} = ?
Calculate the value of {s} for me.
Kannst du {s} berechnen?
Wie viel ergibt {s}?
Peux-tu calculer {s} ?
¿Puedes calcular {s}?
Puoi calcolare {s}?""")  # fmt: skip

CORES: dict[str, tuple[str, ...]] = {
    "add": (
        "Please increase {a} by {b}, what is the result?",
        "What happens if you increase {a} by {b}?",
        "Raise {a} by {b}.",
        "What is {b} added to {a}?",
        "What do I get when {b} is added to {a}?",
        "Please add {a} and {b} for me.",
        "Could you add {b} to {a}?",
        "The number {a} grows by {b}. What is it now?",
        "Tell me the total of {a} and {b}.",
        "What total do the numbers {a} and {b} have?",
        "Tell me what {a} and {b} add up to.",
        "I have {a} and get {b} more. How much is that?",
        "Name the number that is {b} more than {a}.",
        "Let me add {a} to {b}. How much is it?",
        "What is the sum of {a} and {b}?",
        "Add {a} and {b}.",
        "Add {b} to {a}.",
        "Sum of {a} and {b}",
        "Find the sum: {a}, {b}",
        "Calculate the total of {a} and {b}.",
        "What do {a} and {b} add up to?",
        "If I add {b} to {a}, what do I get?",
        "{a} and {b} together make how much?",
        "What number is {b} more than {a}?",
        "What is {a} increased by {b}?",
        "If {a} is increased by {b}, what is the result?",
        "Put {a} and {b} together. What is the total?",
        "What is the total if you have {a} and {b}?",
        "add({a}, {b})",
        "Sum: {a} and {b}",
        "Please sum up {a} and {b}.",
        "Start with {a} and add {b}.",
        "Take {a}, then add {b}. What is the result?",
        "The sum of two numbers, {a} and {b}, is?",
        "What is {a} and {b} combined?",
        "Was ist die Summe von {a} und {b}?",
        "Addiere {a} und {b}.",
        "Wie viel ist {a} plus {b}?",
        "Quelle est la somme de {a} et {b} ?",
        "Combien font {a} plus {b} ?",
        "¿Cuánto es {a} más {b}?",
        "¿Cuál es la suma de {a} y {b}?",
        "Quanto fa {a} più {b}?",
        "Qual è la somma di {a} e {b}?",
    ),
    "sub": (
        "Please reduce {a} by {b}, what is the result?",
        "Decrease {a} by {b}.",
        "Lower {a} by {b}.",
        "What is {b} subtracted from {a}?",
        "{b} is subtracted from {a}. How much is it?",
        "What do I get when {b} is subtracted from {a}?",
        "How much remains if you take {b} from {a}?",
        "What remains when {b} is taken from {a}?",
        "Please subtract {b} from {a} for me.",
        "Could you subtract {b} from {a}?",
        "The number {a} shrinks by {b}. What is it now?",
        "Name the number that is {b} less than {a}.",
        "I have {a} and take {b} away. How much is left?",
        "Tell me what is left of {a} without {b}.",
        "What is the difference of {a} and {b}, please?",
        "What is the difference between {a} and {b}?",
        "Subtract {b} from {a}.",
        "What do you get if you subtract {b} from {a}?",
        "Take {b} away from {a}.",
        "If I take {b} from {a}, what is left?",
        "What is {b} less than {a}?",
        "What is {a} decreased by {b}?",
        "What is {a} reduced by {b}?",
        "If {a} is reduced by {b}, what is the result?",
        "Find the difference: {a} and {b}",
        "Calculate the difference of {a} and {b}.",
        "How much is {a} less {b}?",
        "What remains of {a} after taking away {b}?",
        "Start with {a} and subtract {b}.",
        "Take {a}, then subtract {b}. What is the result?",
        "subtract({a}, {b})",
        "{a} take away {b}",
        "What is {a} take away {b}?",
        "From {a} subtract {b}.",
        "How much is left of {a} when {b} is removed?",
        "What number is {b} smaller than {a}?",
        "Was ist die Differenz von {a} und {b}?",
        "Ziehe {b} von {a} ab.",
        "Wie viel ist {a} minus {b}?",
        "Quelle est la différence entre {a} et {b} ?",
        "Combien font {a} moins {b} ?",
        "¿Cuánto es {a} menos {b}?",
        "¿Cuál es la diferencia entre {a} y {b}?",
        "Quanto fa {a} meno {b}?",
        "Qual è la differenza tra {a} e {b}?",
    ),
    "mul": (
        "What is {a} multiplied by {b}, please?",
        "What do I get when I multiply {a} with {b}?",
        "Please multiply {a} by {b} for me.",
        "Could you multiply {a} and {b}?",
        "{a} is multiplied by {b}. How much is it?",
        "Tell me what {a} times {b} is.",
        "Which product do {a} and {b} have?",
        "I have {b} times {a}. How much is that?",
        "Name the number that is {b} times {a}.",
        "Multiply the numbers: {a}, {b}",
        "How many are {a} groups with {b} in each?",
        "The product of {a} and {b}, please.",
        "Double check: {a} multiplied by {b}?",
        "What is the product of {a} and {b}?",
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "What do you get if you multiply {a} by {b}?",
        "Find the product: {a}, {b}",
        "Calculate the product of {a} and {b}.",
        "What is {a} multiplied with {b}?",
        "How much is {a} times {b}?",
        "If I multiply {a} by {b}, what do I get?",
        "Product of {a} and {b}",
        "multiply({a}, {b})",
        "mul({a}, {b}) = ?",
        "Start with {a} and multiply by {b}.",
        "Take {a}, then multiply it by {b}. What is the result?",
        "What is {b} times as much as {a}?",
        "What number is {b} times as large as {a}?",
        "What is the total of {a} groups of {b}?",
        "How many are {a} rows of {b}?",
        "The product of two numbers, {a} and {b}, is?",
        "What is {a} taken {b} times?",
        "Times: {a} and {b}",
        "Was ist das Produkt von {a} und {b}?",
        "Multipliziere {a} mit {b}.",
        "Wie viel ist {a} mal {b}?",
        "Quel est le produit de {a} et {b} ?",
        "Combien font {a} fois {b} ?",
        "¿Cuánto es {a} por {b}?",
        "¿Cuál es el producto de {a} y {b}?",
        "Quanto fa {a} per {b}?",
        "Qual è il prodotto di {a} e {b}?",
    ),
    "div": (
        "What is {a} divided by {b}, please?",
        "What do I get when I divide {a} by {b}?",
        "Please divide {a} by {b} for me.",
        "Could you divide {a} by {b}?",
        "{a} is divided by {b}. How much is it?",
        "Tell me what {a} divided by {b} is.",
        "Which quotient do {a} and {b} have?",
        "I have {a} and split it by {b}. How much is that?",
        "Divide {a} into {b} equal groups. How much is in each group?",
        "Split {a} equally into {b} parts. How much is one part?",
        "Tell me how often {b} fits into {a}.",
        "How many times is {b} contained in {a}?",
        "The quotient of {a} and {b}, please.",
        "Divide {a} by {b}.",
        "What do you get if you divide {a} by {b}?",
        "What is the quotient of {a} and {b}?",
        "How many times does {b} go into {a}?",
        "How often does {b} fit into {a}?",
        "Find the quotient: {a}, {b}",
        "Calculate the quotient of {a} and {b}.",
        "If I divide {a} by {b}, what do I get?",
        "Split {a} into {b} equal parts. How big is each?",
        "What is one of {b} equal parts of {a}?",
        "Quotient of {a} and {b}",
        "divide({a}, {b})",
        "div({a}, {b}) = ?",
        "Start with {a} and divide by {b}.",
        "Take {a}, then divide it by {b}. What is the result?",
        "Share {a} equally among {b}. How much does each get?",
        "{a} over {b}",
        "What is {a} over {b}?",
        "How many groups of {b} are in {a}?",
        "What number times {b} gives {a}?",
        "{b} times what is {a}?",
        "Was ist der Quotient von {a} und {b}?",
        "Teile {a} durch {b}.",
        "Wie viel ist {a} geteilt durch {b}?",
        "Divise {a} par {b}.",
        "Combien font {a} divisé par {b} ?",
        "¿Cuánto es {a} dividido entre {b}?",
        "Divide {a} entre {b}.",
        "Quanto fa {a} diviso {b}?",
        "Dividi {a} per {b}.",
    ),
}
HELD_CORES: dict[str, tuple[str, ...]] = {
    "add": (
        "What is the sum when you add {a} and {b}?",
        "How much do I get if I add {a} and {b}?",
        "{a} is increased by {b}. What is the result?",
        "Find the sum of {a} and {b}.",
        "Can you add {a} and {b} for me?",
        "What is the total of {a} and {b}?",
        "Increase {a} by {b}.",
        "What do you get when you add {b} to {a}?",
        "I have {a} and add {b}. How much is that?",
        "Tell me the sum of {a} and {b}.",
        "How much is {a} added to {b}?",
        "Which number is {b} more than {a}?",
    ),
    "sub": (
        "How much do I get if I subtract {b} from {a}?",
        "{a} is reduced by {b}. What is the result?",
        "Find the difference between {a} and {b}.",
        "Take away {b} from {a}.",
        "Can you subtract {b} from {a} for me?",
        "What is left if I take {b} away from {a}?",
        "Reduce {a} by {b}.",
        "Tell me the difference between {a} and {b}.",
        "I have {a} and subtract {b}. How much is that?",
        "What do you get when you take {b} from {a}?",
        "How much remains if {b} is subtracted from {a}?",
        "Which number is {b} less than {a}?",
    ),
    "mul": (
        "How much do I get if I multiply {a} by {b}?",
        "What is the product if you multiply {a} and {b}?",
        "Calculate {a} multiplied with {b}.",
        "Take {a} and multiply it with {b}.",
        "Can you multiply {a} by {b} for me?",
        "Tell me the product of {a} and {b}.",
        "I have {a} and multiply it by {b}. How much is that?",
        "What do you get when {a} is multiplied by {b}?",
        "Find the product of {a} and {b}.",
        "How many are {a} groups of {b}?",
        "Which number is {b} times {a}?",
        "Please multiply these: {a}, {b}",
    ),
    "div": (
        "How much do I get if I divide {a} by {b}?",
        "What is the quotient if you divide {a} by {b}?",
        "Take {a} and divide it by {b}.",
        "Share {a} equally between {b}. How much is that each?",
        "Can you divide {a} by {b} for me?",
        "Tell me the quotient of {a} and {b}.",
        "I have {a} and divide it by {b}. How much is that?",
        "What do you get when {a} is divided by {b}?",
        "Find the quotient of {a} and {b}.",
        "How many times does {b} fit into {a}?",
        "Divide {a} into {b} equal parts. How big is one part?",
        "Split {a} equally into {b} groups. How much is in each?",
    ),
}

PREFIXES: tuple[str, ...] = (
    "Hi! ", "Hello! ", "Hello, ", "Hey, ", "Hey Kimi, ", "Kimi, ", "Please: ", "Please help. ", "Quick question: ",
    "Math question: ", "OK, ", "So, ", "Good morning! ", "Good evening. ", "Hi there,\n", "Hello,\n\n", "Now: ",
    "Next one: ", "Another one: ", "I have a question. ", "A quick one: ", "Hallo! ", "Bonjour, ", "Hola, ", "Ciao! ",
    "1) ", "Q: ", "Arithmetic: ", "Maths: ", "Sorry to bother you. ", "Let's see. ",
)  # fmt: skip
SUFFIXES: tuple[str, ...] = (
    " Thanks!", " Thank you.", " Please.", " Just the number, please.", " Answer with a number only.",
    " Give only the result.", "\nThanks", "\n\nAnswer:", " Think step by step.", " I need it for school.",
    " Be careful.", " Show me the answer.", " No explanation needed.", " Reply with the number.", "\nOnly the number.",
    " Danke!", " Merci.", " Gracias.", " Grazie.",
)  # fmt: skip
