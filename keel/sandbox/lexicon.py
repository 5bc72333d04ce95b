"""All words and sentences of the sandbox: a household shop, its customers and its service desk.

Written for Keel. Choices in square brackets and slots in braces are explained in templates.py. No plain word of a
sentence may also be a fact word (an item, a day, a city or a name), and no sentence may serve two purposes;
tests assert both.
"""

from dataclasses import dataclass
from typing import Literal

Mood = Literal["angry", "worried", "neutral", "happy"]
FactKind = Literal["day", "city"]

ITEMS = tuple(
    "lamp kettle chair table carpet mirror clock radio blanket sofa heater printer camera phone jacket coat belt "
    "wallet tent bicycle guitar drill vase fridge".split()
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CITIES = tuple("London Leeds York Bristol Cardiff Glasgow Dublin Oxford".split())
NAMES = tuple("Anna Ben Clara David Emma Frank Grace Henry Julia Martin Oscar Vera".split())


@dataclass(frozen=True)
class Topic:
    """What a message is about.

    fact: the kind of the second fact, after the item, that request and reply both carry.
    requests: how a customer puts it; each names the item and the fact.
    answers: the reply's main sentence, names the item.  details: a further sentence, names the fact.
    full: one sentence that names both.
    """

    fact: FactKind
    requests: tuple[str, ...]
    answers: tuple[str, ...]
    details: tuple[str, ...]
    full: tuple[str, ...]


TOPICS: dict[str, Topic] = {
    "late": Topic(
        "day",
        (
            "The delivery of my {item} was [promised|due] for {day}.",
            "I have been waiting for the delivery of [my|the] {item} since {day}.",
            "Where is the delivery of {day} with my {item}?",
        ),
        ("The delivery of your {item} is on its way.", "We have [traced|found] the delivery with your {item}."),
        ("The delivery [missed the van|was held up] on {day}.", "The delivery from {day} will reach you tomorrow."),
        ("The delivery of your {item} was held up on {day} and will reach you tomorrow.",),
    ),
    "broken": Topic(
        "day",
        (
            "The {item} that came on {day} is damaged.",
            "My {item} arrived damaged on {day}.",
            "On {day} I opened the box and the {item} was damaged.",
        ),
        ("We will [send|post] you a new {item} for the damaged one.", "The damaged {item} will be replaced for free."),
        ("The courier will collect the damaged one from {day}.", "One photo of the damaged box from {day} is enough."),
        ("We will replace the {item} that came damaged on {day}.",),
    ),
    "refund": Topic(
        "day",
        (
            "I want a refund for the {item} that I [returned|sent back] on {day}.",
            "Where is the refund for the {item} from {day}?",
            "Please send me the refund for my {item} from {day}.",
        ),
        ("The refund for your {item} is on its way.", "You will get a full refund for the {item}."),
        ("The refund was [started|approved] on {day}.", "Your refund from {day} has been checked."),
        ("The refund for the {item} that you [returned|sent back] on {day} is on its way.",),
    ),
    "size": Topic(
        "city",
        (
            "The {item} is the wrong size and I want to swap it in {city}.",
            "Can I get the {item} in another size in {city}?",
            "I need a [larger|smaller] size of the {item} from your shop in {city}.",
        ),
        ("We have the {item} in [every|your] size.", "The right size of the {item} is waiting for you."),
        ("Our shop in {city} has [every|your] size.", "Our team in {city} will find the right size."),
        ("You can swap the {item} for the right size in {city}.",),
    ),
    "invoice": Topic(
        "day",
        (
            "I need an invoice for the {item} that I bought on {day}.",
            "Please send me the invoice for the {item} from {day}.",
            "There was no invoice for my {item} on {day}.",
        ),
        (
            "The invoice for your {item} is in your [inbox|account].",
            "We have [sent|mailed] the invoice for the {item}.",
        ),
        ("The invoice shows your order from {day}.", "The date of the invoice is {day}."),
        ("The invoice for the {item} that you bought on {day} is in your [inbox|account].",),
    ),
    "hours": Topic(
        "city",
        (
            "When is your shop in {city} open? I want to see the {item}.",
            "How long are you open in {city}? I want to [see|try] the {item}.",
            "Are you open today in {city}? I would like to see a {item}.",
        ),
        ("You can [see|try] the {item} while we are open.", "The {item} is on show when we open at nine."),
        ("Our shop in {city} is open [from nine to six|until six].", "In {city} we are open every day."),
        ("You can [see|try] the {item} in {city}, where we are open until six.",),
    ),
    "stock": Topic(
        "city",
        (
            "Do you have the {item} in stock in {city}?",
            "Is the {item} in stock in your shop in {city}?",
            "Is there any stock of the {item} left in {city}?",
        ),
        ("The {item} is in stock [again|now].", "We have plenty of stock of the {item}."),
        ("You will find the stock in our shop in {city}.", "The shop in {city} has plenty of stock."),
        ("The {item} is in stock in {city}.",),
    ),
    "parts": Topic(
        "day",
        (
            "A part was missing when the {item} came on {day}.",
            "The {item} came on {day} with a part missing.",
            "A [screw|wheel] is missing from my {item} from {day}.",
        ),
        ("We will [send|post] you what is missing from the {item}.", "The missing part of your {item} is in the post."),
        ("We know what was missing in the box from {day}.", "What was missing on {day} will reach you tomorrow."),
        ("The part that was missing from the {item} on {day} is in the post.",),
    ),
}
"""Each topic has a word of its own that request and reply share ("refund"), as people who write to each other do."""

MOODS: dict[Mood, tuple[str, ...]] = {
    "angry": ("I am [very|really] angry [about this|with you].", "All this makes me angry."),
    "worried": ("I am [very|quite] worried [about this|].", "All this makes me worried."),
    "neutral": ("That is my question.", "I have this [one|short] question."),
    "happy": ("I love your shop [so much|].", "My family and I love your service."),
}

INTRODUCTIONS = ("My name is {name}.", "This is {name}.")
SIGNATURES = ("Regards, {name}.", "Yours, {name}.")

OPENINGS: dict[str, tuple[str, ...]] = {
    "apology": (
        "We are [very|so|truly] sorry that you are angry.",
        "You have every right to be angry and we apologise.",
    ),
    "comfort": (
        "We are sorry that you are worried.",
        "Please do not be worried [about this|].",
    ),
    "greeting": (
        "Thank you for your question.",
        "Your question is [very|always] welcome.",
    ),
    "thanks": (
        "We love to hear [that|from you].",
        "Thank you, we love [kind words|our customers] too.",
    ),
}
"""How a reply may begin, each with or without `BY_NAME` before it."""

BY_NAME = "Dear {name}, "

FITTING: dict[Mood, tuple[str, ...]] = {
    "angry": ("apology",),
    "worried": ("comfort",),
    "neutral": ("greeting",),
    "happy": ("thanks",),
}
"""Which openings fit a mood."""

CLOSINGS = (
    "Have a [nice|lovely|good] [day|week].",
    "Please [write to|call] us if you need anything else.",
    "[Kind|Best] regards, your [shop|service] team.",
    "We are always here [for you|to help].",
)

CURT = (
    "Read the rules next time.",
    "That is not our problem.",
    "You should have checked that before.",
    "Stop complaining.",
    "We have no time for [this|you].",
)

FILLER = (
    "Our shop has been here for many years.",
    "We sell many [nice|other] things.",
    "The weather is [nice|fine] today.",
    "Our newsletter comes every month.",
)

KEYWORDS: dict[str, tuple[str, str]] = {
    "delivery": ("answer", "late"),
    "damaged": ("answer", "broken"),
    "refund": ("answer", "refund"),
    "size": ("answer", "size"),
    "invoice": ("answer", "invoice"),
    "open": ("answer", "hours"),
    "stock": ("answer", "stock"),
    "missing": ("answer", "parts"),
    "angry": ("opening", "apology"),
    "worried": ("opening", "comfort"),
    "question": ("opening", "greeting"),
    "love": ("opening", "thanks"),
}
"""What a clumsy sentence, one that is not the world's, is understood as by the word in it."""
