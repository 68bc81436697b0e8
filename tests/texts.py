"""Texts for alignment tests, written for this project: prose, code, numbers, other scripts."""

REPAIR_CAFE = """\
The repair café opens on the first Saturday of the month, in the old fire station behind the
market. People bring what is broken: toasters that no longer pop, lamps that flicker, bicycles
with a wheel out of true, a radio that belonged to somebody's grandfather. At the first table a
volunteer writes down what the thing is, what it does, and what it should do instead. Nobody is
asked to pay. There is a jar for coins, and a cake that is gone by eleven.

Most faults are small. A cable is broken where it bends, a switch is full of crumbs, a screw has
worked itself loose. The volunteers have a rule: the owner holds the screwdriver. Whoever has
opened a coffee machine once will open the next one without fear, and will know where the water
goes in and where it should come out. In the last year four hundred and twelve things were
brought in, and two hundred and ninety of them went home working.

What cannot be repaired is taken apart. Springs, knobs, motors and good cables are sorted into
boxes along the wall, and the boxes are the reason why so much can be repaired the month after.
A boy of nine has built a small crane from them. It lifts a teaspoon, slowly, and it squeaks.
"""

LIGHTHOUSE = """\
The keeper counted the seconds between two flashes of the other light, far out on the reef:
eleven, always eleven. When the fog came in he counted them anyway, by the clock, and wrote the
number into the book as if he had seen them. In spring a letter came. The other light had been
out since November, it said, and would he please be so kind as to confirm the dates."""

CODE = """\
def merge(left: list[int], right: list[int]) -> list[int]:
    merged = []
    while left and right:
        smaller = left if left[0] <= right[0] else right
        merged.append(smaller.pop(0))
    return merged + left + right


def test_merge_keeps_the_order():
    assert merge([1, 4, 9], [2, 3, 10]) == [1, 2, 3, 4, 9, 10]
    assert merge([], [7]) == [7]
"""

NUMBERS = """\
Day 1: 12 loaves, 7 rolls, 31.50 in the till. Day 2: 15 loaves, 9 rolls, 38.25 in the till.
Day 3: 8 loaves, 22 rolls, 40.00 in the till. Day 4: closed. Day 5: 19 loaves, 4 rolls, 41.75"""

OTHER_SCRIPTS = """\
"Guten Morgen" heißt auf Chinesisch 早上好, auf Japanisch おはようございます und auf Griechisch
καλημέρα. Eine Tasse Kaffee ☕ kostet 2,80 €, ein Stück Kuchen 🍰 3,20 €."""

SYSTEM_PROMPT = """\
You answer questions of visitors to a small museum of clocks. The museum has four rooms. The
first shows sundials and water clocks, the second church clocks, the third pocket watches, the
fourth the workshop in which visitors may look over the clockmaker's shoulder. Opening hours are
from ten to five, on Thursdays to eight; on Mondays the museum is closed. Children under twelve
pay nothing. The large church clock in the second room strikes at noon, and it is loud. Answer in
one or two short sentences, and say so when you do not know.

Visitor: """

QUESTIONS = [
    "When do you close on Thursdays?",
    "How much does my son pay? He is nine.",
    "Is there something to see for people who like small watches?",
    "Why did everybody jump at noon?",
]
