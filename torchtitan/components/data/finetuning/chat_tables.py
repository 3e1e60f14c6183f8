"""The tables of `Chats`: what is told, asked and answered.

How to read them: `{hero}`, `{friend}` are two children and `{he}`, `{him}`, `{his}` the hero's pronouns; a capital
first letter (`{He}`) begins a sentence. All other names are drawn once for a tale.
"""

from torchtitan.components.data.story_grammar import MOTIVES

DRAWN = {name: MOTIVES[name] for name in ("place", "color", "thing", "spot", "animal", "pet", "food", "sky", "fear")}
"""What a tale is about."""

OPENING = (
    "On a {sky} day, {hero} and {friend} went to {place}.",
    "{hero} went to {place} with {friend}. It was {sky}.",
    "It was {sky}, so {hero} asked {friend} to come to {place}.",
    "{hero} and {friend} liked to play at {place}. They went there on a {sky} day.",
)
FIRST_QUESTIONS = (
    ("Where did {hero} and {friend} go?", "to {place}", "{hero} and {friend} went to {place}."),
    ("How was the weather?", "{sky}", "It was {sky}."),
    ("Who went to {place} with {hero}?", "{friend}", "{friend} went to {place} with {hero}."),
)
"""What the opening answers: a question, the short answer to it, and the one in a sentence."""

EVENTS = (
    (
        (
            "{hero} had {a_thing} with {him}. Soon it was gone, but {friend} found it {spot}.",
            "{His} {color} {thing} got lost, and {friend} saw it {spot}.",
            "{hero} lost {his} {color} {thing}. They looked for it together. It lay {spot}, where {friend} found it.",
        ),
        (
            ("What color was the {thing}?", "{color}", "The {thing} was {color}."),
            ("Where was the {thing}?", "{spot}", "The {thing} was {spot}."),
            ("Who found the {thing}?", "{friend}", "{friend} found the {thing}."),
            ("What did {hero} lose?", "{a_thing}", "{hero} lost {a_thing}."),
        ),
    ),
    (
        (
            "Then they met a {animal}. Its name was {pet}.",
            "A {animal} called {pet} came to them and wanted to play.",
            "On the way, a {animal} ran after them. Everyone there called it {pet}.",
        ),
        (
            ("What was the name of the {animal}?", "{pet}", "The name of the {animal} was {pet}."),
            ("Which animal did they meet?", "a {animal}", "They met a {animal}."),
        ),
    ),
    (
        (
            "When they were hungry, {hero} and {friend} ate {food}.",
            "{friend} had brought {food}, and they shared it.",
            "After that, they had some {food}.",
        ),
        (("What did they eat?", "{food}", "They ate {food}."),),
    ),
    (
        (
            "{hero} was afraid of {fear}, but {friend} took {his} hand.",
            "Suddenly {hero} stopped, because {he} was afraid of {fear}. {friend} helped {him}.",
        ),
        (
            ("What was {hero} afraid of?", "{fear}", "{hero} was afraid of {fear}."),
            ("Who helped {hero}?", "{friend}", "{friend} helped {hero}."),
        ),
    ),
)
"""What may happen after the opening, in this order: the ways to tell it, and the questions that it answers."""

ENDINGS = (
    "They went home happy.",
    "What a lovely day it was!",
    "From then on, they were even better friends.",
    "{hero} never forgot that day.",
)
ASK_ABOUT = (
    "Here is a story. {tale} {question}",
    "{tale}\n\n{question}",
    "{question}\n\n{tale}",
    "Listen! {tale} {question}",
)
ASK_FOR = (
    "Tell me a story about {hero} and {friend}.",
    "Please tell me a story. {hero} and {friend} should be in it.",
    "Can you tell me about {hero} and {friend}?",
)

COUNTED = "apples/coins/shells/cookies/stones/flowers/balloons/pencils/nuts/cards".split("/")
"""What the sums are about."""
HAVE = (
    "{hero} has {n} {things}.",
    "There are {n} {things} in the basket of {hero}.",
)
GET = ("{friend} gives {him} {k} more.", "{He} finds {k} more.", "{He} gets {k} more from {friend}.")
LOSE = ("{He} gives {k} of them to {friend}.", "{He} loses {k} of them.", "{friend} takes {k} of them.")
HOW_MANY = (
    "How many {things} does {hero} have now?",
    "How many {things} are there now?",
)

HELLO = (
    ("Hello! I am {hero}.", "Hello, {hero}! What would you like to know?"),
    ("Hi, my name is {hero}. My friend {friend} is here too.", "Hi, {hero} and {friend}! What can I do for you?"),
    ("Good morning! This is {friend}, and I am {hero}.", "Good morning, {friend} and {hero}! Ask me something."),
)
GOODBYE = (
    ("Thank you! What is my name?", "{hero}", "Your name is {hero}."),
    ("Do you still know who I am?", "{hero}", "You are {hero}."),
)
FACTS = (
    (
        ("What does a {a} say?", "Which sound does a {a} make?"),
        "{b}",
        "A {a} says {b}.",
        "dog woof/cat meow/cow moo/duck quack/sheep baa/pig oink/frog croak/bee buzz/mouse squeak/horse neigh",
    ),
    (
        ("How many legs does a {a} have?", "Can you tell me how many legs a {a} has?"),
        "{b}",
        "A {a} has {b} legs.",
        "dog four/duck two/spider eight/bee six/horse four/chicken two/beetle six/rabbit four/parrot two/butterfly six",
    ),
    (
        ("What is a young {a} called?", "What do you call the child of a {a}?"),
        "a {b}",
        "A young {a} is called a {b}.",
        "dog puppy/cat kitten/sheep lamb/duck duckling/cow calf/horse foal/pig piglet/chicken chick/bear cub/goat kid",
    ),
    (
        ("What is the opposite of {a}?", "Which word means the opposite of {a}?"),
        "{b}",
        "The opposite of {a} is {b}.",
        "big small/small big/hot cold/cold hot/old new/new old/happy sad/sad happy/fast slow/slow fast/day night/"
        "night day/loud quiet/quiet loud/wet dry/dry wet/up down/down up/open closed/full empty/empty full",
    ),
    (
        ("Which color does {a} have?", "What color is {a}?"),
        "{b}",
        "The color of {a} is {b}.",
        "grass green/snow white/honey yellow/milk white/coal black/fire red/chocolate brown/mud brown/corn yellow",
    ),
    (
        ("Where does a {a} live?", "Where is the home of a {a}?"),
        "in a {b}",
        "A {a} lives in a {b}.",
        "bird nest/bee hive/rabbit burrow/spider web/fish pond/horse stable/bear cave/chicken coop/dog kennel",
    ),
)
"""Ways to ask, the short answer, the one in a sentence, and the pairs of words that are asked about."""

SHORT = ("Keep your answers short.", "Answer in as few words as you can.")
"""System messages after which answers are short."""
FULL = ("You are a kind helper who answers the questions of children.", "Answer in a full sentence.")
"""System messages after which, as without any, answers are sentences."""
