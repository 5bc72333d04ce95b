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
    "lamp kettle chair table carpet mirror clock radio toaster blanket pillow curtain sofa desk heater printer camera "
    "speaker keyboard phone tablet jacket scarf coat hat belt bag wallet necklace tent bicycle helmet guitar piano "
    "drum puzzle doll kite racket drill hammer ladder vase mug pan basket bucket candle fridge mattress".split()
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CITIES = tuple("London Leeds York Bristol Cardiff Glasgow Dublin Oxford Bath Norwich Exeter Belfast".split())
NAMES = tuple(
    "Anna Ben Clara David Emma Frank Grace Henry Ivan Julia Karl Laura Martin Nina Oscar Paula Robert Sarah "
    "Thomas Vera".split()
)


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
            "The {item} was [promised|due] for {day} and [it has not come|it is still not here].",
            "I have been waiting for [my|the] {item} since {day}.",
            "My {item} should have arrived on {day}, but it [did not|has not come].",
            "Where is [my|the] {item}? It was due on {day}.",
        ),
        (
            "Your {item} [is on its way|left our store today|will reach you tomorrow].",
            "The courier [is bringing|will bring] your {item} [today|tomorrow].",
            "We have [traced|found] the parcel with your {item}.",
        ),
        ("It [missed the van|was held up] on {day}.", "The delivery [failed|was delayed] on {day}."),
        ("Your {item} [missed the van|was held up] on {day} and [is on its way|will reach you tomorrow].",),
    ),
    "broken": Topic(
        "day",
        (
            "The {item} that came on {day} [is broken|has a crack|does not work].",
            "My {item} arrived [broken|damaged] on {day}.",
            "On {day} I [opened the box|opened the parcel] and the {item} was [broken|damaged].",
        ),
        (
            "We will [send|post] you a new {item} [today|at once].",
            "A new {item} will leave our store [today|tomorrow].",
            "You will [get|receive] a new {item} [for free|at no cost].",
        ),
        (
            "The courier will collect the [broken|damaged] one that came on {day}.",
            "[A photo|One photo] of the damage from {day} is enough.",
        ),
        ("We will replace the {item} that came [broken|damaged] on {day}.",),
    ),
    "refund": Topic(
        "day",
        (
            "I [sent back|returned] the {item} on {day} and [want my money back|still wait for my money].",
            "Where is the money for the {item} that I [returned|sent back] on {day}?",
            "Please refund the {item} that I [returned|sent back] on {day}.",
        ),
        (
            "We [will refund|have refunded] the [full|] price of the {item} [today|].",
            "The money for your {item} is on its way to your [bank|account].",
            "You will get [all|] your money back for the {item}.",
        ),
        ("Your return from {day} has [reached us|been checked].", "The refund was [started|approved] on {day}."),
        ("The {item} that you [returned|sent back] on {day} has been [refunded|paid back] [in full|].",),
    ),
    "size": Topic(
        "city",
        (
            "The {item} is too [small|large] and I [would like|want] to [swap|exchange] it in {city}.",
            "Can I [swap|exchange] the {item} for a [larger|smaller] one in {city}?",
            "I got the {item} in the wrong size. Can your shop in {city} [help me|swap it]?",
        ),
        (
            "We have the {item} in [every size|all sizes].",
            "You can [swap|exchange] the {item} for [another|the right] size.",
            "The right size of the {item} is [ready|waiting] for you.",
        ),
        ("Our shop in {city} will [swap|exchange] it for you.", "Just bring it to our shop in {city}."),
        ("You can [swap|exchange] the {item} for the right size in {city}.",),
    ),
    "invoice": Topic(
        "day",
        (
            "I need [an invoice|a copy of the invoice] for the {item} that I bought on {day}.",
            "Please send me the invoice for the {item} from {day}.",
            "The invoice for my {item} from {day} is [missing|lost].",
        ),
        (
            "The invoice for your {item} is [attached|in your inbox].",
            "We have [sent|mailed] you the invoice for the {item}.",
            "You will find the invoice for the {item} in your [account|inbox].",
        ),
        ("It [shows|lists] your order from {day}.", "The copy [is dated|shows the date of] {day}."),
        ("The invoice for the {item} that you bought on {day} is [attached|in your inbox].",),
    ),
    "hours": Topic(
        "city",
        (
            "When does your shop in {city} open? I want to [see|try] the {item}.",
            "How long is the shop in {city} open? I [would like|want] to look at a {item}.",
            "Until when can I [see|look at] the {item} in {city}?",
        ),
        (
            "You can [see|try|look at] the {item} from nine to six.",
            "The {item} is on show every day [from nine to six|until six].",
            "A colleague will show you the {item} from nine [in the morning|to six].",
        ),
        ("Our shop in {city} [opens at nine|is open until six|closes at six].",),
        ("You can [see|try|look at] the {item} in {city} [from nine to six|until six].",),
    ),
    "stock": Topic(
        "city",
        (
            "Do you [have|sell] the {item} in {city}?",
            "Is the {item} in stock in {city}?",
            "I am looking for a {item} in {city}.",
            "Is there a {item} left in {city}?",
        ),
        (
            "[Yes, we|We] have the {item} in stock.",
            "The {item} is [in stock|available] [again|now].",
            "We have [put aside|reserved] a {item} for you.",
        ),
        ("You [will|can] find it in our shop in {city}.", "The shop in {city} has [plenty|several] of them left."),
        ("The {item} is [in stock|available] in {city}.", "We have [put aside|reserved] a {item} for you in {city}."),
    ),
    "parts": Topic(
        "day",
        (
            "[A part|A screw|The manual] was missing when the {item} came on {day}.",
            "The {item} came on {day} without [the manual|all its parts].",
            "My {item} from {day} is [not complete|missing a part].",
        ),
        (
            "We will [send|post] you the missing part for the {item} [today|at once].",
            "The missing part of your {item} is [in the post|on its way].",
            "All missing parts for the {item} [will reach you tomorrow|are in the post].",
        ),
        ("The box from {day} was not packed well.", "We have checked the packing list from {day}."),
        ("The part that was missing from the {item} on {day} is [in the post|on its way].",),
    ),
    "cancel": Topic(
        "day",
        (
            "[Please cancel|I want to cancel] the {item} that I ordered on {day}.",
            "I no longer need the {item} that I ordered on {day}.",
            "I ordered a {item} on {day} by mistake.",
        ),
        (
            "We have cancelled [the|your] {item}.",
            "Your order for the {item} has been [stopped|cancelled].",
            "The {item} will not be [sent|charged].",
        ),
        ("Nothing will be charged for the order from {day}.", "The order from {day} is [now|] closed."),
        ("Your order from {day} for the {item} has been [stopped|cancelled].",),
    ),
    "address": Topic(
        "city",
        (
            "I have moved to {city}. Please send the {item} there.",
            "Can you [send|ship] my {item} to {city} instead?",
            "Please change the address for my {item} to {city}.",
        ),
        (
            "We have changed the address for your {item}.",
            "The {item} will go to your new [address|home].",
            "The new address for the {item} is [saved|noted].",
        ),
        (
            "The [parcel|courier] will now go to {city}.",
            "Delivery to {city} [takes two days|is free|costs nothing extra].",
        ),
        ("We will [send|ship] the {item} to your new [address|home] in {city}.",),
    ),
    "repair": Topic(
        "city",
        (
            "Who can [repair|fix] my {item} in {city}?",
            "Is there a workshop in {city} that can [repair|fix] a {item}?",
            "My {item} needs a repair and I live in {city}.",
        ),
        (
            "Our workshop [can|will] [repair|fix] your {item}.",
            "A technician will look at your {item} [this week|for free].",
            "The repair of your {item} [takes two days|is free].",
        ),
        ("Please bring it to the workshop in {city}.", "Our technician in {city} has time this week."),
        ("The workshop in {city} [can|will] [repair|fix] your {item} [this week|for free].",),
    ),
    "warranty": Topic(
        "day",
        (
            "I bought the {item} on {day}. How long is the warranty?",
            "Does the {item} that I bought on {day} have a warranty?",
            "What does the warranty for the {item} from {day} cover?",
        ),
        (
            "The {item} has a warranty of [two|three] years.",
            "The warranty for your {item} [covers all parts|lasts two years].",
            "All parts of the {item} are under warranty.",
        ),
        ("It is valid from {day}.", "Please keep the receipt from {day}."),
        ("The warranty for the {item} [started on|runs from] {day}.",),
    ),
}

MOODS: dict[Mood, tuple[str, ...]] = {
    "angry": (
        "This is [really|simply] not [good enough|acceptable].",
        "I am [very|really] angry [about this|with you].",
        "I have had enough of this.",
        "What a terrible service!",
    ),
    "worried": (
        "I am [very|really] worried [about this|].",
        "I am afraid that [something is wrong|this will go wrong].",
        "I do not know what to do [now|].",
        "This makes me [quite|very] nervous.",
    ),
    "neutral": (
        "Please let me know.",
        "[Can|Could] you look into this?",
        "Please tell me what to do next.",
        "I am waiting for your answer.",
    ),
    "happy": (
        "I love your shop [so much|].",
        "You have been [great|wonderful] so far.",
        "Your team is [great|wonderful].",
        "I am very happy with your service.",
    ),
}

INTRODUCTIONS = ("My name is {name}.", "This is {name}.")
SIGNATURES = ("Regards, {name}.", "Yours, {name}.")

OPENINGS: dict[str, tuple[str, ...]] = {
    "apology": (
        "We are [very|so|truly] sorry [about this|for the trouble|to hear this].",
        "We apologise for [this|the trouble|our mistake].",
        "Please accept our apology.",
        "This should not have happened and we are sorry.",
    ),
    "comfort": (
        "Please do not worry.",
        "There is no [need|reason] to worry.",
        "We understand your worry and will help you.",
        "Everything will be [fine|all right].",
    ),
    "greeting": (
        "It is [good|nice] to hear from you.",
        "We are [glad|happy] to help you.",
        "A good day to you.",
        "Here is the answer to your question.",
    ),
    "thanks": (
        "Thank you for [your kind words|your kind message|your trust].",
        "Many thanks for [your kind words|your kind message].",
        "Your kind [words|message] made us smile.",
        "We are so [glad|happy] that you like our shop.",
    ),
}
"""How a reply may begin, each with or without `BY_NAME` before it."""

BY_NAME = "Dear {name}, "

FITTING: dict[Mood, tuple[str, ...]] = {
    "angry": ("apology",),
    "worried": ("apology", "comfort"),
    "neutral": ("greeting",),
    "happy": ("thanks",),
}
"""Which openings fit a mood."""

CLOSINGS = (
    "Have a [nice|lovely|good] [day|week].",
    "Please [write to|call] us if you need [more help|anything else].",
    "[Kind|Best] regards, your [shop|service] team.",
    "We are always here [for you|to help].",
    "We wish you a [nice|lovely|good] [day|week].",
)

CURT = (
    "Read the rules next time.",
    "That is not our problem.",
    "You should have [known|checked] that before.",
    "Do not [bother|write to] us again.",
    "Stop complaining.",
    "We have no time for [this|you].",
    "What did you expect?",
    "This is your own fault.",
)

FILLER = (
    "Our shop has been here for many years.",
    "We sell many [nice|other] things.",
    "Our customers are very important to us.",
    "As you may know, we are a [large|small] family firm.",
    "The weather is [nice|fine] today.",
    "Our newsletter comes every month.",
    "We have won [a prize|many prizes] for our service.",
)
