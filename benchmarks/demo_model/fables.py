"""Short fables written by a small grammar of our own: simple English that a small model can learn to write well.

A plot is a list of steps; a step is a list of alternative sentences; slots in braces are filled once per fable, so that
names, animals and things stay the same from beginning to end. Eight plots with two to four alternatives a step and
thousands of slot fillings give more fables than a training run reads twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# fmt: off
ANIMALS = ["fox", "bear", "mouse", "dove", "lion", "lamb", "horse", "dog", "cat", "raven", "goat", "hare", "wolf", "sparrow",
           "donkey", "bee", "frog", "duck", "stork", "crow", "pig", "hen", "rabbit", "deer"]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mary", "Noah",
         "Olive", "Peter", "Ruth", "Simon", "Tom", "Violet"]
PEOPLE = ["miller", "baker", "farmer", "fisherman", "shepherd", "weaver", "sailor", "king", "queen", "soldier", "widow",
          "carpenter", "tailor", "merchant", "gardener", "hunter"]
PLACES = ["river", "forest", "mountain", "village", "garden", "harbor", "castle", "market", "field", "island", "bridge",
          "meadow", "valley", "lighthouse", "mill", "well", "lake", "hill"]
THINGS = ["lamp", "letter", "boat", "crown", "ring", "basket", "cloak", "bell", "key", "mirror", "drum", "coin", "lantern",
          "ladder", "book", "feather", "knife", "flute", "hat", "kite"]
FOODS = ["bread", "cheese", "honey", "apples", "soup", "milk", "nuts", "fish", "corn", "berries", "cake"]
COLORS = ["red", "blue", "green", "white", "black", "golden", "grey", "brown", "silver", "purple"]
MOODS = ["happy", "lonely", "hungry", "curious", "proud", "tired", "brave", "quiet", "clever", "gentle", "young", "lazy"]
SEASONS = ["spring", "summer", "autumn", "winter"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["two", "three", "four", "five", "six", "seven"]
# fmt: on

OPENINGS = [
    "Once upon a time there was {a_mood} {hero} who lived near a {place}.",
    "Long ago, by a {place}, there lived {a_mood} {hero} whose name was {name}.",
    "There was once {a_mood} {hero} who had never left the {place}.",
    "In the days when animals could speak, {a_mood} {hero} lived beside the {place}.",
    "Far away from here, near a {color} {place}, there lived {a_mood} {hero}.",
    "Everyone who lived by the {place} knew the {mood} {hero}.",
]
MORALS = [
    "And so the {hero} learned that a good friend is worth more than a {color} {thing}.",
    "From that day on the {hero} and the {friend} were the best of friends.",
    "And the {hero} was never lonely again.",
    "If they have not moved away, they still live by the {place} today.",
    "That is why, to this day, the {hero} always shares its {food} with the {friend}.",
    "And whenever it is {season}, the {friend} comes to visit the {hero}, and they talk about that day.",
]
PLOTS: list[list[list[str]]] = [
    [  # a lost thing finds its owner
        ["One morning the {hero} found a {color} {thing} lying in the grass.",
         "One day, on the way to the {far}, the {hero} saw something in the grass. It was a {color} {thing}."],
        ["'Whose {thing} is this?' asked the {hero}, but nobody answered.",
         "The {hero} asked everyone it met, but nobody had lost a {thing}."],
        ["So the {hero} walked all day until it came to a {far}.", "So the {hero} carried it as far as the {far}.",
         "For {number} days the {hero} carried the {thing}, and at last it came to the {far}."],
        ["There it met a {friend}, who was looking for something.",
         "A {friend} was sitting there and weeping, for it had lost what it loved most."],
        ["'That is my {thing}!' cried the {friend}. 'I thought that I would never see it again.'",
         "'You have found my {thing},' said the {friend}. 'How can I ever thank you?'"],
        ["The {hero} gave the {thing} back, and asked for nothing.",
         "The {hero} was glad to give it back, and the {friend} shared its {food}."],
    ],
    [  # the race
        ["One day a {friend} came by and laughed. 'I am faster than you,' it said.",
         "The {friend} liked to say that nobody in the valley could run as fast as it could."],
        ["'Then let us run to the {far},' said the {hero}.", "'We shall see,' said the {hero}. 'Let us race to the {far} tomorrow.'"],
        ["On {day} all the animals came to watch.", "Early on {day} they began to run, and a {other} counted to {number}."],
        ["The {friend} was soon far ahead, and it lay down to sleep under a tree.",
         "The {friend} ran so fast that it did not look where it was going, and it fell into a ditch."],
        ["The {hero} did not stop. It went on, step by step, until it reached the {far}.",
         "But the {hero} went on slowly, and never looked back."],
        ["When the {friend} arrived, the {hero} was already eating {food}.",
         "'You have won,' said the {friend}, 'and I have learned something.'"],
    ],
    [  # the storm
        ["One night in {season} there was a great storm.", "In {season} the wind began to blow, and it did not stop for {number} days."],
        ["The rain fell, the {place} rose, and the house of the {hero} was washed away.",
         "The wind took the roof from the house of the {hero}, and everything was wet and cold."],
        ["'Where shall I go?' said the {hero}. 'I have no house, and I have no {food}.'",
         "The {hero} sat down in the rain and did not know what to do."],
        ["Then a {friend} opened its door. 'Come in,' it said, 'there is room for two.'",
         "A {friend} saw it and called, 'Come to my house by the {far}. It is small, but it is dry.'"],
        ["They sat by the fire, ate {food}, and listened to the storm.", "They ate warm {food}, and told each other stories all night."],
        ["In the morning the sun was shining, and together they built a new house.",
         "When the storm was over, they built a new house, and it was better than the old one."],
    ],
    [  # the stranger and the bargain
        ["One evening a {person} knocked at the door.", "One day an old {person} came along the road with a heavy bag."],
        ["'I am hungry,' said the {person}. 'Give me some {food}, and I will give you this {color} {thing}.'",
         "'Please give me a little {food},' said the {person}, 'for I have walked for {number} days.'"],
        ["The {hero} had only a little {food} left, but it gave half of it away.",
         "'Sit down and eat,' said the {hero}. 'You do not have to give me anything.'"],
        ["The {person} ate and smiled. 'You are kind,' the {person} said. 'Keep this {thing}, and do not lose it.'",
         "When the {person} had gone, there was a {color} {thing} on the table."],
        ["From that time on there was always enough {food} in the house.",
         "The next morning the {hero} looked at the {thing}, and it shone like the sun."],
        ["The {friend} heard of it and asked for some {food} as well, and the {hero} gave it gladly.",
         "The {hero} called the {friend}, and there was enough for both of them."],
    ],
    [  # the journey
        ["'What is behind the {far}?' asked the {hero} every day, but nobody knew.",
         "The {hero} wished to see the sea, and so it packed some {food} and a {thing}."],
        ["On {day} it said goodbye to the {friend} and went away.", "'I will come back in {season},' it told the {friend}."],
        ["It crossed a {far}, and it slept under the stars.", "It walked for {number} days, over hills and through valleys."],
        ["At the end of the road it met a {person}, who asked, 'What are you looking for?'",
         "There it saw things that it had never seen before: great ships, tall towers, and a {color} bird."],
        ["'It is beautiful here,' thought the {hero}, 'but there is no one to talk to.'",
         "After {number} weeks the {hero} began to think of home."],
        ["So it went back to the {place}, and the {friend} was waiting at the door.",
         "When it came home, the {friend} asked, 'What did you bring me?' 'A story,' said the {hero}."],
    ],
    [  # a person and a helper
        ["{name} was a {person} who had only one {thing}.", "A {person} called {name} worked by the {place} from morning until night."],
        ["One day {name} saw a {friend} that was caught in a net.", "In {season} {name} found a {friend} in the snow, and it could not walk."],
        ["'Do not be afraid,' said {name}, and set the {friend} free.", "{name} carried it home, and gave it {food} and water."],
        ["'I will not forget this,' said the {friend}.", "After {number} days the {friend} was well again, and went back to the {far}."],
        ["The next year {name} lost the {thing} in the {far}, and was very sad.",
         "Some time later {name} fell into the {far} and called for help."],
        ["Then the {friend} came, and brought the {thing} back.", "The {friend} heard it, and came with all its brothers to help."],
    ],
    [  # the quarrel about food
        ["The {hero} and the {friend} found some {food} near the {far}.", "One {day} the {hero} and the {friend} had only a little {food}."],
        ["'I saw it first,' said the {hero}. 'No, I saw it first,' said the {friend}.",
         "They could not agree who should have it, and they began to shout."],
        ["A {other} came by and said, 'I will divide it for you.'", "'Let us ask the {other},' said the {friend}. 'The {other} is wise.'"],
        ["The {other} took a bite from one half, and then a bite from the other half, until nothing was left.",
         "The {other} ate it all, and said, 'Now you have nothing to quarrel about.'"],
        ["The {hero} looked at the {friend}, and the {friend} looked at the {hero}.", "At first they were angry, but then they had to laugh."],
        ["'Next time we will share,' they said.", "'We have been foolish,' said the {hero}, and the {friend} thought so too."],
    ],
    [  # the proud one
        ["The {hero} had a {color} {thing}, and showed it to everyone.", "'Nobody has such a fine {thing} as I have,' the {hero} used to say."],
        ["The {friend} had nothing, but it could sing.", "The {friend}, who lived next door, had only an old hat and some {food}."],
        ["One night a thief came and took the {thing} away.", "On {day} the {thing} fell into the {far}, and was gone."],
        ["The {hero} wept and would not eat.", "'Now I am nobody,' said the {hero}, and hid in its house for {number} days."],
        ["But the {friend} came every day, and sang, and brought {food}.",
         "Then the {friend} knocked at the door. 'I never liked the {thing},' it said. 'I came to see you.'"],
        ["At last the {hero} began to smile.", "'You are a true friend,' said the {hero}, 'and I did not know it.'"],
    ],
]  # fmt: skip


def fable(rng: np.random.Generator, **given: str) -> str:
    """One fable; `given` fixes slots such as hero, friend or thing."""

    def pick(items: list[Any]) -> Any:
        return items[int(rng.integers(len(items)))]

    animals = [ANIMALS[i] for i in rng.permutation(len(ANIMALS)) if ANIMALS[i] not in given.values()]
    places = rng.permutation(len(PLACES))
    slots = {
        "hero": animals[0],
        "friend": animals[1],
        "other": animals[2],
        "place": PLACES[places[0]],
        "far": PLACES[places[1]],
        "name": pick(NAMES),
        "person": pick(PEOPLE),
        "thing": pick(THINGS),
        "food": pick(FOODS),
        "color": pick(COLORS),
        "mood": pick(MOODS),
        "season": pick(SEASONS),
        "day": pick(DAYS),
        "number": pick(NUMBERS),
    } | given
    slots["a_mood"] = ("an " if slots["mood"][0] in "aeiou" else "a ") + slots["mood"]
    sentences = [pick(OPENINGS), *(pick(step) for step in pick(PLOTS)), pick(MORALS)]
    return " ".join(sentence.format(**slots) for sentence in sentences)
